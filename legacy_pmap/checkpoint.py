"""The original's checkpoint file: one pickled dict of NumPy arrays and plain values (spec, section 6), loaded with an allow-list.

{"params": tree, "opt_state": {"m": tree, "v": tree}, "meta": {...}, "ema_params": tree (only with EMA)}; no device axis.
"""

import importlib
import os
import pickle

import jax
import numpy as np

from .config import dtypes_of
from .model import init_params
from .optim import flatten, init_opt_state
from .step import get_carry, put_state

FILE_NAME = "checkpoint_jax.pkl"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit the configuration; one line naming file, key and both values."""


# ---------------------------------------------------------------------------------------------------------------- saving


def make_meta(state, carry, config):
    """The meta dict, keys in the original's order. Dtypes are spelled as given on the command line."""
    full = str(dtypes_of(config).full)
    return {
        "step": state.step,
        "samples": state.samples,
        "model_config": config.model_config,
        "pos_len": config.pos_len,
        "optimizer": config.optimizer,
        "muon_lr_multiplier": config.muon_lr_multiplier,
        "muon_momentum": config.muon_momentum,
        "muon_row_split_size": config.muon_row_split_size,
        "muon_target": config.muon_target,
        "muon_polar_steps": config.muon_polar_steps,
        "muon_group_blocks": config.muon_group_blocks,
        "muon_split_jit": config.muon_split_jit,
        "loss_profile": config.loss_profile,
        "score_mode": config.score_mode,
        "log_step_time": config.log_step_time,
        "moving_sum": float(carry.moving_sum),
        "moving_weight": float(carry.moving_weight),
        "ema_decay": config.ema_decay,
        "ema_dtype": "none" if carry.ema_params is None else full,
        "data_parallel": config.data_parallel,
        "data_parallel_devices": config.num_devices if config.data_parallel else 0,
        "per_device_batch": config.batch_size // config.num_devices,
        "fuse_projections": config.fuse_projections,
        "attention_impl": config.attention_impl,
        "activation_dtype": config.activation_dtype,
        "param_dtype": config.param_dtype,
        "opt_state_dtype": config.opt_state_dtype,
        "opt_update_dtype": config.opt_update_dtype,
        "rope_dtype": config.rope_dtype,
        "ffn_mul_dtype": config.ffn_mul_dtype,
        "attention_logits_dtype": config.attention_logits_dtype,
        "int8_train": config.int8_train,
        "int8_target": config.int8_target,
        "int8_fwd_bits": config.int8_fwd_bits,
        "int8_bwd_bits": config.int8_bwd_bits,
        "donate_train_buffers": config.donate_train_buffers,
        "stack_blocks": config.stack_blocks,
        "scan_blocks": config.scan_blocks,
        "remat_blocks": config.remat_blocks,
    }


def save_checkpoint(path, state, config):
    """Writes the checkpoint to `path`.tmp, then renames it: a kill at any moment leaves the old file or the new one."""
    carry = get_carry(state)
    payload = {"params": carry.params, "opt_state": carry.opt_state, "meta": make_meta(state, carry, config)}
    if carry.ema_params is not None:
        payload["ema_params"] = carry.ema_params
    path = os.fspath(path)
    with open(path + ".tmp", "wb") as file:
        pickle.dump(payload, file, protocol=5)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


# --------------------------------------------------------------------------------------------------------------- loading

_ALLOWED = {
    "numpy": ("ndarray", "dtype"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "ml_dtypes": ("bfloat16",),
    "collections": ("OrderedDict",),
}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays and plain values only: an ordinary pickle may run any code (spec, 7.7)."""

    def find_class(self, module, name):
        # NumPy 1 wrote numpy.core where NumPy 2 writes numpy._core; either may be installed here.
        known = "numpy._core" + module[len("numpy.core"):] if module.startswith("numpy.core.") else module
        known = "ml_dtypes" if module == "ml_dtypes._ml_dtypes_ext" else known
        if name not in _ALLOWED.get(known, ()):
            raise CheckpointError(f"refuses to load {module}.{name}: only NumPy arrays and plain values are allowed")
        if known.startswith("numpy._core") and not hasattr(np, "_core"):
            known = known.replace("numpy._core", "numpy.core")
        return getattr(importlib.import_module(known), name)


def read_checkpoint(path):
    """The file's dict, as it is. Raises CheckpointError for a missing, truncated or foreign file, or one with code in it."""
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            payload = _ArrayUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{path}: truncated or not a checkpoint ({type(error).__name__}: {reason})") from None
    for key in ("params", "opt_state", "meta"):
        if not isinstance(payload, dict) or not isinstance(payload.get(key), dict):
            raise CheckpointError(f"{path}: key {key} is missing or not a dict; not a checkpoint of this trainer")
    return payload


def _check_tree(path, key, tree, template):
    """Every leaf of `template` there with its shape, and nothing else."""
    try:
        found, wanted = flatten(tree), flatten(template)
    except (TypeError, ValueError):  # keys that cannot be sorted
        raise CheckpointError(f"{path}: key {key} is not a tree of named arrays") from None
    for name in wanted:
        if name not in found:
            raise CheckpointError(f"{path}: key {key}/{name} is missing")
    for name in found:
        if name not in wanted:
            raise CheckpointError(f"{path}: key {key}/{name} is not in this model")
    for name, leaf in wanted.items():
        array = found[name]
        if not isinstance(array, (np.ndarray, np.generic)) or (array.dtype.kind != "f" and array.dtype.name != "bfloat16"):
            raise CheckpointError(f"{path}: key {key}/{name} is not an array of floats")
        if array.shape != leaf.shape:
            raise CheckpointError(f"{path}: key {key}/{name} has shape {array.shape}, but this model needs {leaf.shape}")
    if jax.tree_util.tree_structure(tree) != jax.tree_util.tree_structure(template):
        raise CheckpointError(f"{path}: key {key} is not nested as this model needs it")


# meta key, how the configuration says it: a resume may change none of these
_MUST_MATCH = (
    ("model_config", lambda config: config.model_config),
    ("pos_len", lambda config: config.pos_len),
    ("optimizer", lambda config: config.optimizer),
    ("muon_target", lambda config: config.muon_target),
    ("stack_blocks", lambda config: config.stack_blocks),
    ("fuse_projections", lambda config: config.fuse_projections),
    ("int8_train", lambda config: config.int8_train),
    ("int8_target", lambda config: config.int8_target),
    ("int8_fwd_bits", lambda config: config.int8_fwd_bits),
    ("int8_bwd_bits", lambda config: config.int8_bwd_bits),
)


def load_checkpoint(path, config):
    """Reads a checkpoint of this trainer or the original's -> State on the devices, cast to the configured dtypes.

    EMA asked for but absent starts from the parameters; EMA present but not asked for is dropped.
    Raises CheckpointError naming both values for another model_config, pos_len, optimizer, muon target, block layout or int8
    setting; naming the key for a missing or misshapen array; and for a truncated file or one that would run code.
    """
    path = os.fspath(path)
    payload = read_checkpoint(path)
    meta = payload["meta"]
    for key, say in _MUST_MATCH:
        if key not in meta:
            raise CheckpointError(f"{path}: key meta/{key} is missing")
        if type(meta[key]) is not type(say(config)) or meta[key] != say(config):
            raise CheckpointError(f"{path}: checkpoint has {key}={meta[key]!r}, but this run has {key}={say(config)!r}; "
                                  "use the checkpoint's value, another traindir, or no_resume")
    counters = {}
    for key, kind in (("step", int), ("samples", int), ("moving_sum", float), ("moving_weight", float)):
        value = meta.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 <= value < float("inf"):
            raise CheckpointError(f"{path}: key meta/{key} is missing or not a number: {value!r}")
        counters[key] = value
    params = jax.eval_shape(lambda: init_params(config))
    _check_tree(path, "params", payload["params"], params)
    _check_tree(path, "opt_state", payload["opt_state"], jax.eval_shape(lambda: init_opt_state(params, config)))
    ema = None
    if config.ema_decay > 0.0:
        ema = payload.get("ema_params", payload["params"])
        _check_tree(path, "ema_params", ema, params)
    return put_state(config, payload["params"], payload["opt_state"], ema, counters["moving_sum"], counters["moving_weight"],
                     counters["step"], counters["samples"])
