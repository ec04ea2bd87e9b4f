"""The original's `checkpoint_jax.pkl`: read without running code from it, written without ever leaving half a file."""

import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import convert, shares
from .config import Config, flag_of
from .loss import MovingStatistics
from .mesh import make_mesh
from .model import net_shapes
from .optim import Moments
from .resume import known
from .state import Learned, TrainState, init_ema, learned_shapes, place, to_host
from .store import FOLDER, RUN, CheckpointError, complete, newest, read

FILE_NAME = "checkpoint_jax.pkl"

# Everything that a checkpoint of arrays and plain values needs to be rebuilt, under both of NumPy's module spellings.
ALLOWED = {
    (module, name)
    for core in ("numpy.core", "numpy._core")
    for module, name in ((f"{core}.multiarray", "_reconstruct"), (f"{core}.multiarray", "scalar"), (f"{core}.numeric", "_frombuffer"))
} | {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("ml_dtypes", "bfloat16"),
    ("ml_dtypes._ml_dtypes_ext", "bfloat16"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),  # how protocol 2 writes bytes
}


class ArrayUnpickler(pickle.Unpickler):
    """Rebuilds arrays and plain containers; anything else that a pickle asks for is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise CheckpointError(f"it asks for {module}.{name}, which is not an array or a plain container: not loaded")
        return super().find_class(module.replace("numpy.core.", "numpy._core."), name)  # the old spelling warns


def read_pickle(path: str | Path) -> dict[str, Any]:
    """The pickled dict of a checkpoint. Raises CheckpointError; never runs what the file asks for."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            content = ArrayUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}): it is truncated or damaged") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a dict with params, opt_state and meta")
    for key in ("params", "opt_state", "meta"):
        if not isinstance(content.get(key), dict):
            raise CheckpointError(f"{path}: key {key} is missing or not a dict: this is not a checkpoint of this trainer")
    return content


def load_checkpoint(path: str | Path, config: Config) -> TrainState:
    """The state of a `checkpoint_jax.pkl`, of an own checkpoint, or of the newest in a run folder that is whole; on the devices.

    Raises CheckpointError naming both values where the file's model, board, optimizer or block layout is another, and
    the leaf where one is missing, extra or of another shape. A moving average that is asked for but absent starts from
    the parameters.
    """
    path = Path(path)
    if path.is_dir():
        found = find_newest(path)
        if found is not None:
            if "options" in found[2]:
                check_meta(found[0], meta_of(Config(**known(found[2]["options"]))), config)
            return from_own(*found, config)
        path = path / FILE_NAME
    content = read_pickle(path)
    check_meta(path, content["meta"], config)
    for key in ("m", "v"):
        if not isinstance(content["opt_state"].get(key), dict):
            raise CheckpointError(f"{path}: key opt_state/{key} is missing: this is not a checkpoint of this trainer")
    return from_trees(path, content, content["meta"], config)


def find_newest(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """The own checkpoint that `folder` is, or the newest whole one of the run folder, as `store.read` gives it; None where there is
    none or the original's file is further."""
    if (folder / RUN).is_file():
        return folder, *read(folder)
    found = next(newest(folder / FOLDER, lambda text: print(f"warning: {text}", file=sys.stderr)), None)
    pickled = folder / FILE_NAME
    if found is not None and pickled.exists():
        try:
            if count_steps(pickled) > found[2]["step"]:
                return None
        except CheckpointError as error:
            print(f"warning: {error}; {found[0]} is used", file=sys.stderr)
    if found is None and complete(folder / FOLDER) and not pickled.exists():
        raise CheckpointError(f"{folder / FOLDER}: every checkpoint is damaged: begin in another --traindir")
    return found


def load_any(path: str | Path, config: Config | None) -> tuple[TrainState, Config]:
    """The state of any checkpoint and the options that go with it: an own one has them, for the original's `config` must say them."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder: name a run folder, a checkpoint or a {FILE_NAME}")
    found = find_newest(path) if path.is_dir() else None
    if found is None and path.is_dir() and not (path / FILE_NAME).is_file():
        raise CheckpointError(f"{path}: holds no checkpoint: name a run folder, one of its checkpoints, or a {FILE_NAME}")
    if found is not None:
        if config is not None:
            raise CheckpointError(f"{path}: it holds its own options: convert it without any")
        if "options" not in found[2]:
            raise CheckpointError(f"{found[0]}: run.json has no options: it is not of this trainer")
        config = Config(**known(found[2]["options"]))
        return from_own(*found, config), config
    if config is None:
        if path.is_file():
            read_pickle(path)  # what is no checkpoint needs no options
        raise CheckpointError(f"{path}: the original's file does not hold the options: give them, as for training")
    return load_checkpoint(path, config), config


def use_average(state: TrainState) -> TrainState:
    """The state with its moving average as the parameters. Raises CheckpointError where it has none."""
    learned = state.learned
    if learned.ema is None:
        raise CheckpointError("the checkpoint has no moving average (--ema-decay was 0)")
    net = jax.tree.map(lambda average, param: average.astype(param.dtype), learned.ema, learned.net)
    return TrainState(Learned(net, learned.opt_state, learned.ema, learned.statistics), state.step, state.samples)


def from_own(path: Path, tree: dict[str, Any], run: dict[str, Any], config: Config) -> TrainState:
    """The state of an own checkpoint, from what `store.read` gives of it."""
    if run.get("options", {}).get("shard_state") == "data":
        devices = run.get("devices")
        if type(devices) is not int or devices < 1:
            raise CheckpointError(f"{path}: run.json: devices is {devices!r}, expected the number of devices that each have a share")
        tree = join_shares(path, tree, devices, config)
    return from_trees(path, tree, run | tree["statistics"], config)


def join_shares(path: Path, tree: dict[str, Any], devices: int, config: Config) -> dict[str, Any]:
    """The trees of a state that was saved split over `devices`, their leaves whole. CheckpointError naming one that is not so split."""
    like = net_shapes(config.model, config.precision)
    wholes, layers = convert.to_named(like), convert.to_named(shares.num_layers(like))

    def join(kind, saved):
        named = convert.flatten(saved)
        for name in named.keys() & wholes.keys():
            leaf = named[name]
            expected = (devices, layers[name], shares.share_size(wholes[name].size // layers[name], devices))
            if leaf.shape not in ((), expected):
                raise CheckpointError(f"{path}: {kind}: leaf {name} has shape {leaf.shape}, expected {expected}: a share for each of {devices} devices")
            named[name] = shares.join(leaf, wholes[name].shape if leaf.shape else ())
        return convert.nest(named)

    moments = {key: join(f"opt_state/{key}", saved) for key, saved in tree["opt_state"].items()}
    return tree | {kind: join(kind, tree[kind]) for kind in ("params", "ema_params") if kind in tree} | {"opt_state": moments}


def from_trees(path: Path, content: dict[str, Any], meta: dict[str, Any], config: Config) -> TrainState:
    """The state on the devices from nested dicts of named leaves, and `meta` with the counts and statistics; see `load_checkpoint`."""
    like = learned_shapes(config)
    net = take(path, "params", content["params"], like.net)
    opt_state = Moments(*(take(path, f"opt_state/{key}", content["opt_state"][key], getattr(like.opt_state, key)) for key in ("m", "v")))
    ema = None
    if config.ema_decay > 0:
        saved = content.get("ema_params")
        ema = init_ema(net) if saved is None else take(path, "ema_params", saved, like.ema)
    try:
        with np.errstate(over="ignore"):
            statistics = MovingStatistics(np.float32(float(meta["moving_sum"])), np.float32(float(meta["moving_weight"])))
        if not np.isfinite(statistics).all():
            raise ValueError("not finite")
        step, samples = int(meta["step"]), int(meta["samples"])
        if min(step, samples) < 0:
            raise ValueError(f"step {step}, samples {samples}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: meta: moving_sum, moving_weight, step and samples must be numbers, the counts not negative ({error!r})"
        ) from None
    learned = Learned(net, opt_state, ema, statistics)
    return TrainState(place(learned, config), step, samples)


def to_trees(learned: Learned) -> dict[str, Any]:
    """Nested dicts of named leaves, as `from_trees` takes them; the arrays stay where they are."""
    trees = {"params": learned.net, "m": learned.opt_state.m, "v": learned.opt_state.v, "ema_params": learned.ema}
    nested = {kind: convert.nest(convert.to_named(tree)) for kind, tree in trees.items() if tree is not None}
    statistics = {"moving_sum": learned.statistics.sum, "moving_weight": learned.statistics.weight}
    return {"opt_state": {kind: nested.pop(kind) for kind in ("m", "v")}} | nested | {"statistics": statistics}


def count_steps(path: Path) -> int:
    """The step of a `checkpoint_jax.pkl`; -1 where it names none."""
    step = read_pickle(path)["meta"].get("step")
    return step if isinstance(step, int) else -1


def take(path: Path, kind: str, tree, like):
    """The leaves of one saved tree as `like`, in its dtypes; CheckpointError naming the leaf."""
    try:
        named = convert.flatten(tree)
        for name, leaf in named.items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise CheckpointError(f"{path}: {kind}: leaf {name} has dtype {leaf.dtype}, expected floating-point numbers")
        net = convert.from_named(like, named)
        return jax.tree.map(lambda leaf, shape: np.asarray(leaf, shape.dtype), net, like)
    except convert.ConvertError as error:
        raise CheckpointError(f"{path}: {kind}: {error}") from None
    except (AttributeError, TypeError):
        raise CheckpointError(f"{path}: {kind} holds something that is not an array") from None


def meta_of(config: Config) -> dict[str, Any]:
    """What a checkpoint must agree with a run in."""
    return {
        "model_config": config.model.to_meta(),
        "pos_len": config.pos_len,
        "optimizer": config.optimizer,
        "muon_target": config.muon_target,
        "stack_blocks": config.model.stacked,
        "fuse_projections": config.model.fused,
        "int8_train": config.int8_train,
        "int8_target": config.int8_target,
        "int8_fwd_bits": config.int8_fwd_bits,
        "int8_bwd_bits": config.int8_bwd_bits,
    }


def check_meta(path: Path, meta: dict[str, Any], config: Config):
    """Refuse another model, board, optimizer or layout, naming both values."""
    wanted = meta_of(config)
    # Absent in files of early versions of the original, which had no such choice.
    assumed = {"stack_blocks": False, "fuse_projections": False, "int8_train": False}
    assumed |= {key: wanted[key] for key in ("muon_target", "int8_target", "int8_fwd_bits", "int8_bwd_bits")}
    for key, value in wanted.items():
        saved = meta.get(key, assumed.get(key))
        if saved != value:
            option = flag_of("model_kind" if key == "model_config" else key)
            raise CheckpointError(f"{path}: written with {key} {saved}, but the options say {value}: give {option} as it was, or another folder (--traindir)")


def save_checkpoint(path: str | Path, state: TrainState, config: Config):
    """Write the original's file: first beside it as `.tmp`, then renamed, so the old one survives until the new is whole.

    Raises CheckpointError where it cannot be written (a full disk, say): what was there before is still there.
    """
    path = Path(path)
    flat = to_host(state)
    # The original has no master copies: it gets the parameters that the network computes with.
    flat |= {name: leaf.astype(config.precision.param) for name, leaf in flat.items() if name.startswith("params/")}

    def tree(kind):
        return convert.nest({name.removeprefix(kind): leaf for name, leaf in flat.items() if name.startswith(kind)})

    content = {"params": tree("params/"), "opt_state": {"m": tree("opt_state/m/"), "v": tree("opt_state/v/")}, "meta": to_meta(flat, config)}
    if state.learned.ema is not None:
        content["ema_params"] = tree("ema_params/")
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            pickle.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary.is_file():
            temporary.unlink()
        kept = "the checkpoint before it is whole" if path.is_file() else "there is none from before"
        raise CheckpointError(f"{path}: cannot be saved ({error.strerror}); {kept}: make room, or name another place") from None


def try_folder(folder: Path):
    """Raises OSError where nothing can be written into `folder`, which need not be there yet; leaves nothing behind."""
    with tempfile.TemporaryDirectory(dir=next(above for above in (folder, *folder.absolute().parents) if above.exists())):
        pass


def to_meta(flat: dict[str, np.ndarray], config: Config) -> dict[str, Any]:
    """The original's `meta`, key by key."""
    devices = make_mesh(config).size
    copied = (
        "optimizer muon_lr_multiplier muon_momentum muon_row_split_size muon_target muon_polar_steps muon_group_blocks muon_split_jit"
        " loss_profile score_mode log_step_time ema_decay data_parallel attention_impl activation_dtype param_dtype opt_state_dtype"
        " opt_update_dtype rope_dtype ffn_mul_dtype attention_logits_dtype int8_train int8_target int8_fwd_bits int8_bwd_bits"
        " donate_train_buffers scan_blocks remat_blocks pos_len"
    ).split()
    return {name: getattr(config, name) for name in copied} | {
        "step": int(flat["step"]),
        "samples": int(flat["samples"]),
        "model_config": config.model.to_meta(),
        "moving_sum": float(flat["moving_sum"]),
        "moving_weight": float(flat["moving_weight"]),
        "ema_dtype": "float32" if config.ema_decay > 0 else "none",
        "data_parallel_devices": devices if config.data_parallel else 0,
        "per_device_batch": config.batch_size // devices,
        "fuse_projections": config.model.fused,
        "stack_blocks": config.model.stacked,
    }
