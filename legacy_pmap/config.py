"""Every option of the original trainer (spec, section 6), checked once, plus the model sizes of section 2.

One frozen `Config` is the only configuration there is: the command line, the drop-in functions and the trainer all take it.
"""

import argparse
import dataclasses
import difflib
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# name -> (num_layers, hidden_size, num_heads, ffn_dim)
MODEL_SIZES = {
    "b12c192": (12, 192, 3, 512),
    "b12c384": (12, 384, 6, 1024),
    "b12c512": (12, 512, 8, 1536),
    "b24c512": (24, 512, 8, 1536),
    "b12c768": (12, 768, 12, 2048),
    "b40c768": (40, 768, 12, 2048),
    "b12c1024": (12, 1024, 16, 3072),
    "b24c1024": (24, 1024, 16, 3072),
    "b12c1536": (12, 1536, 24, 4096),
    "b16c1536": (16, 1536, 24, 4096),
    "b12c1792": (12, 1792, 28, 5120),
    **{f"b{layers}c2048": (layers, 2048, 32, 6144) for layers in (8, 10, 12, 14, 16, 18, 20, 22, 24)},
    "b2c32": (2, 32, 2, 64),  # the last two are for tests
    "b3c96": (3, 96, 3, 256),
}

DTYPE_NAMES = ("float32", "fp32", "bfloat16", "bf16")
SYMMETRY_TYPES = ("xyt", "x", "xy", "x+y", "t", "all", "none")
AXIS = "data"  # the pmap axis


def _option(default, kind, *, choices=None, low=None, high=None, below=None, help=""):
    rules = dict(kind=kind, choices=choices, low=low, high=high, below=below, help=help)
    return dataclasses.field(default=default, metadata=rules)


def _dtype_option():
    return _option("float32", str, choices=DTYPE_NAMES)


@dataclasses.dataclass(frozen=True, init=False)
class Config:
    """Options of one run: the original's command line with underscores, same defaults (spec, section 6).

    Raises ValueError naming the option for an unknown name, a bad value, or two options that
    exclude each other. With `data_parallel` the devices are counted, which starts JAX's backend.
    """

    traindir: str | None = _option(None, str, help="folder of the checkpoint (required by train)")
    datadir: str | None = _option(None, str, help="folder with train/ and val/ (required by train)")
    pos_len: int = _option(19, int, low=2, help="board edge")
    batch_size: int = _option(16, int, low=1, help="global rows per step")
    model_kind: str = _option("b12c2048", str, choices=tuple(MODEL_SIZES))
    lr: float = _option(2e-4, float, low=0.0)
    wd: float = _option(0.1, float, low=0.0)
    optimizer: str = _option("adamw", str, choices=("adamw", "muon", "sgd", "none"))
    muon_lr_multiplier: float = _option(0.2, float, low=0.0)
    muon_momentum: float = _option(0.95, float, low=0.0, below=1.0)
    muon_row_split_size: int = _option(0, int, low=0)
    muon_target: str = _option("all", str, choices=("all", "attn", "ffn", "square", "none"))
    muon_polar_steps: int = _option(5, int, low=1, high=5)
    muon_group_blocks: bool = _option(True, bool)
    muon_split_jit: bool = _option(False, bool, help="compile Muon's update apart from the gradient")
    loss_profile: str = _option("full", str, choices=("full", "policy_value", "policy_only", "value_only"))
    grad_clip_norm: float = _option(0.0, float, low=0.0, help="0: off")
    lr_schedule: str = _option("cosine", str, choices=("cosine", "constant"))
    max_training_samples: int = _option(32768, int, low=1)
    warmup_samples: int = _option(4096, int, low=0)
    print_every: int = _option(20, int, low=1)
    steps_per_jit: int = _option(1, int, low=1, help="optimizer steps per compiled call")
    save_every_samples: int = _option(0, int, low=0, help="0: at the end")
    val_every_samples: int = _option(0, int, low=0, help="0: at the end")
    max_val_batches: int = _option(16, int, low=0, help="0: all")
    symmetry_type: str = _option("xyt", str, choices=SYMMETRY_TYPES)
    enable_history_matrices: bool = _option(False, bool)
    allow_nonfull_mask: bool = _option(False, bool, help="do not warn about boards smaller than pos_len")
    no_resume: bool = _option(False, bool)
    no_final_save: bool = _option(False, bool)
    fuse_projections: bool = _option(False, bool, help="one matrix for q, k, v and one for w1, wgate")
    separate_projections: bool = _option(False, bool, help="wins over --fuse-projections")
    attention_impl: str = _option("manual", str, choices=("manual", "xla"))
    activation_dtype: str = _dtype_option()
    param_dtype: str = _dtype_option()
    opt_state_dtype: str = _dtype_option()
    opt_update_dtype: str = _dtype_option()
    rope_dtype: str = _dtype_option()
    ffn_mul_dtype: str = _dtype_option()
    attention_logits_dtype: str = _dtype_option()
    int8_train: bool = _option(False, bool, help="refused: not part of this project")
    int8_target: str = _option("ffn", str, help="recorded in checkpoints, otherwise without effect")
    int8_fwd_bits: int = _option(8, int, low=1, help="recorded")
    int8_bwd_bits: int = _option(8, int, low=1, help="recorded")
    ema_decay: float = _option(0.0, float, low=0.0, below=1.0, help="0: off")
    log_grad_norm: bool = _option(False, bool)
    log_step_time: bool = _option(False, bool)
    component_profile: bool = _option(False, bool, help="time the parts of a step, then stop")
    component_profile_repeats: int = _option(3, int, low=1)
    component_profile_grad: bool = _option(False, bool, help="profile gradients too")
    donate_train_buffers: bool = _option(False, bool)
    data_parallel: bool = _option(False, bool)
    stack_blocks: bool = _option(False, bool, help="block leaves with a leading layer axis")
    scan_blocks: bool = _option(False, bool, help="scan over the blocks; stacks them")
    remat_blocks: bool = _option(False, bool, help="recompute each block in the backward pass")
    seed: int = _option(1234, int, low=0)
    init_std: float = _option(0.02, float, low=0.0)
    score_mode: str = _option("simple", str, choices=("simple",))
    xla_peak_tflops: float = _option(918.0, float, low=0.0)
    # Not the original's: its compute dtype was fixed in the source; it had one objective and always used every local device.
    compute_dtype: str = _option("bfloat16", str, choices=(*DTYPE_NAMES, "float64"), help="float64: the harness's reference")
    objective: str = _option("replica", str, choices=("replica",))
    data_parallel_devices: int = _option(0, int, low=0, help="0: all local devices")

    def __init__(self, **options):
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name in options:
            if name not in fields:
                close = difflib.get_close_matches(name, fields, n=3)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(f"unknown option {name!r}{hint}")
        for name, field in fields.items():
            object.__setattr__(self, name, _checked(name, options.get(name, field.default), field.default, field.metadata))
        if self.separate_projections:  # "wins": asking for both is asking for separate ones
            object.__setattr__(self, "fuse_projections", False)
        if self.scan_blocks:  # as recorded: a scanned run's meta says stack_blocks too
            object.__setattr__(self, "stack_blocks", True)
        _check_together(self)

    @property
    def model_config(self):
        """The dict that the checkpoint's meta carries (spec, section 2)."""
        layers, hidden, heads, ffn = MODEL_SIZES[self.model_kind]
        return {"version": 15, "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_dim": ffn,
                "num_scorebeliefs": 8}

    @property
    def board_area(self):
        return self.pos_len * self.pos_len

    @property
    def score_buckets(self):
        return (self.board_area + 60) * 2

    @property
    def num_devices(self):
        return (self.data_parallel_devices or jax.local_device_count()) if self.data_parallel else 1

    @property
    def splits_update(self):
        return self.muon_split_jit and self.optimizer == "muon"

    @property
    def uses_norm(self):
        """Whether the step computes the gradient norm at all (spec, section 4: if logged or clipping)."""
        return self.log_grad_norm or self.grad_clip_norm > 0.0


def _checked(name, value, default, rules):
    """The value in the option's own type, or a ValueError naming option, value and what is allowed."""
    if value is None and default is None:
        return None
    kind = rules["kind"]
    bad = None
    if kind is bool:
        bad = None if isinstance(value, (bool, np.bool_)) else "True or False"
        value = bool(value) if bad is None else value
    elif kind is int:
        try:
            bad = "an integer" if isinstance(value, (bool, np.bool_)) else None
            value = value if bad else operator.index(value)
        except TypeError:
            bad = "an integer"
    elif kind is float:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            bad = "a number"
        else:
            value = float(value)
            bad = None if math.isfinite(value) else "a finite number"
    elif not isinstance(value, (str, bytes)) and name in ("traindir", "datadir"):
        try:
            value = value.__fspath__()
        except AttributeError:
            bad = "a path"
    elif not isinstance(value, str):
        bad = "text"
    if bad is None and rules["choices"] is not None and value not in rules["choices"]:
        bad = "one of " + ", ".join(map(str, rules["choices"]))
    if bad is None and rules["low"] is not None and value < rules["low"]:
        bad = f"at least {rules['low']}"
    if bad is None and rules["high"] is not None and value > rules["high"]:
        bad = f"at most {rules['high']}"
    if bad is None and rules["below"] is not None and value >= rules["below"]:
        bad = f"below {rules['below']}"
    if bad is not None:
        raise ValueError(f"option {name}={value!r} is not allowed: it must be {bad}")
    return value


def _check_together(config):
    """Rules over more than one option."""
    if config.compute_dtype == "float64":
        require_x64()
    if config.int8_train:
        raise ValueError("option int8_train=True is not allowed: INT8 products need the original's optional quantisation package and are "
                         "not part of this project; drop --int8-train")
    if config.symmetry_type == "all" and config.batch_size % 8:
        raise ValueError(f"option batch_size={config.batch_size} is not allowed with symmetry_type='all': it must divide by 8")
    if config.data_parallel_devices and not config.data_parallel:
        raise ValueError(f"option data_parallel_devices={config.data_parallel_devices} needs data_parallel=True; add --data-parallel")
    if config.data_parallel:
        for name in ("component_profile", "muon_split_jit"):
            if getattr(config, name):
                raise ValueError(f"option data_parallel=True excludes {name}; drop one of them")
        available = jax.local_device_count()
        if config.data_parallel_devices > available:
            raise ValueError(f"option data_parallel_devices={config.data_parallel_devices} is not allowed: "
                             f"this process has {available} local devices")
        if config.batch_size % config.num_devices:
            raise ValueError(f"option batch_size={config.batch_size} does not divide by the {config.num_devices} devices "
                             "of data_parallel")


def require_x64():
    if not jax.config.jax_enable_x64:
        raise ValueError("option compute_dtype='float64' needs JAX's 64-bit mode: set jax_enable_x64 first")


class Dtypes(NamedTuple):
    """The dtype of every place of the step. `full` is float32, or float64 in the reference run, where all others are too."""

    full: np.dtype
    compute: np.dtype
    activation: np.dtype
    param: np.dtype
    opt_state: np.dtype
    opt_update: np.dtype
    rope: np.dtype
    ffn_mul: np.dtype
    attention_logits: np.dtype
    polar: np.dtype


def dtypes_of(config):
    """Resolves the dtype options once. Raises ValueError for float64 without JAX's 64-bit mode."""
    if config.compute_dtype == "float64":
        require_x64()
        return Dtypes(*[np.dtype("float64")] * len(Dtypes._fields))
    names = {"float32": np.dtype("float32"), "fp32": np.dtype("float32"),
             "bfloat16": np.dtype(jnp.bfloat16), "bf16": np.dtype(jnp.bfloat16)}
    places = (names[getattr(config, f"{place}_dtype")] for place in Dtypes._fields[1:-1])
    return Dtypes(np.dtype("float32"), *places, polar=np.dtype(jnp.bfloat16))


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {message}\n")  # one line: the usage of some sixty flags would bury it


def parse_args(argv):
    """Command line -> Config. Flags are the option names with dashes; an unknown flag ends the process with status 2 and one line."""
    parser = _Parser(prog="python -m legacy_pmap", description="The original pmap KataGo Transformer trainer.",
                                     allow_abbrev=False)
    for field in dataclasses.fields(Config):
        flag, rules = "--" + field.name.replace("_", "-"), field.metadata
        if field.name == "muon_group_blocks":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=True)
        elif rules["kind"] is bool:
            parser.add_argument(flag, action="store_true", help=rules["help"])
        else:
            text = f"{rules['help']} (default {field.default})".strip()
            parser.add_argument(flag, type=rules["kind"], default=field.default, required=field.name in ("traindir", "datadir"),
                                help=text.replace("%", "%%"))
    return Config(**vars(parser.parse_args(argv)))
