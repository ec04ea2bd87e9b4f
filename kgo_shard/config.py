"""Every option of a run, in one frozen object; the command line is made from the same table.

Names and defaults are those of the original trainer (dashes become underscores).
"""

import argparse
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import layout


class ConfigError(ValueError):
    """An option that does not exist, has a bad value, or does not go with another one."""


# name -> (layers, channels, heads, feed-forward channels)
MODEL_SIZES = {
    "b2c32": (2, 32, 2, 64),
    "b3c96": (3, 96, 3, 256),
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
}
MODEL_VERSION = 15
NUM_SCORE_BELIEFS = 8

DTYPES = {"float32": jnp.float32, "fp32": jnp.float32, "bfloat16": jnp.bfloat16, "bf16": jnp.bfloat16}

# The images that a symmetry type may draw; numbers as in augment.py. `all` emits the eight images of B / 8 rows.
SYMMETRIES = {
    "xyt": (0, 1, 2, 3, 4, 5, 6, 7),
    "x": (0, 5),
    "xy": (0, 2, 5, 7),
    "x+y": (0, 2),
    "t": (0, 4),
    "none": (),
    "all": (0, 1, 2, 3, 4, 5, 6, 7),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network, the layout of its parameters, and how its blocks are run. All variants compute one function."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_dim: int
    pos_len: int
    fused: bool = False  # one matrix for q, k and v, and one for the two halves of the feed-forward part
    stacked: bool = False  # one Block whose leaves have a leading axis of layers
    scanned: bool = False  # a scan over stacked blocks
    rematerialised: bool = False  # blocks are computed again in the backward pass
    attention: str = "manual"  # or "xla"

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_points(self) -> int:
        return layout.num_points(self.pos_len)

    @property
    def num_score_buckets(self) -> int:
        return layout.num_score_buckets(self.pos_len)

    def to_meta(self) -> dict[str, int]:
        """The `model_config` entry of the original's checkpoint."""
        return {
            "version": MODEL_VERSION,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "ffn_dim": self.ffn_dim,
            "num_scorebeliefs": NUM_SCORE_BELIEFS,
        }


@dataclass(frozen=True)
class Precision:
    """The dtype of each place where the original lets one choose.

    `compute` is what every matrix product and the convolution cast their operands to. Norms, heads, losses and
    reductions of metrics are float32 always.
    """

    compute: Any
    activation: Any
    param: Any
    opt_state: Any
    opt_update: Any
    rope: Any
    ffn_mul: Any
    attention_logits: Any
    master: Any  # of the parameters between steps; the network gets them in `param`


def option(default, help: str, choices: tuple = (), low: float | None = None, high: float | None = None, below: float | None = None):
    """One row of the option table: default, help text, allowed values or range (from low to high, or below `below`)."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high, "below": below})


def dtype_option(help: str):
    return option("float32", help, choices=tuple(DTYPES))


@dataclass(frozen=True, init=False)
class Config:
    """Every option of the original's command line, with its name and default; `Config(batch_size=32, ...)`.

    Raises ConfigError (a ValueError) that names an unknown option, or a bad value and what is allowed.
    """

    traindir: str | None = option(None, "folder for checkpoints and logs (train: required)")
    datadir: str | None = option(None, "folder with train/ and val/ npz files (train: required)")
    pos_len: int = option(19, "board edge of the rows", low=2)
    batch_size: int = option(16, "global batch: rows of all devices together", low=1)
    model_kind: str = option("b12c2048", "model size", choices=tuple(MODEL_SIZES))
    lr: float = option(2e-4, "peak learning rate", low=0)
    wd: float = option(0.1, "weight decay, decoupled", low=0)
    optimizer: str = option("adamw", "update rule", choices=("adamw", "muon", "sgd", "none"))
    muon_lr_multiplier: float = option(0.2, "learning rate of Muon leaves relative to --lr", low=0)
    muon_momentum: float = option(0.95, "momentum of Muon leaves, in [0, 1)", low=0, below=1)
    muon_row_split_size: int = option(0, "rows of the chunks that Muon orthogonalises (0: whole matrices)", low=0)
    muon_target: str = option("all", "block matrices that Muon updates", choices=("all", "attn", "ffn", "square", "none"))
    muon_polar_steps: int = option(5, "steps of the polar iteration", low=1, high=5)
    muon_group_blocks: bool = option(True, "stack same-named block leaves before Muon's update")
    muon_split_jit: bool = option(False, "compile Muon's update apart")
    loss_profile: str = option("full", "objective", choices=("full", "policy_value", "policy_only", "value_only"))
    grad_clip_norm: float = option(0.0, "clip the gradient's global norm (0: off)", low=0)
    lr_schedule: str = option("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    max_training_samples: int = option(32768, "train until this many rows", low=1)
    warmup_samples: int = option(4096, "rows of linear warm-up", low=0)
    print_every: int = option(20, "steps between log lines", low=1)
    steps_per_jit: int = option(1, "optimizer steps per compiled call", low=1)
    save_every_samples: int = option(0, "rows between checkpoints (0: at the end)", low=0)
    val_every_samples: int = option(0, "rows between validations (0: at the end)", low=0)
    max_val_batches: int = option(16, "batches of one validation (0: all)", low=0)
    symmetry_type: str = option("xyt", "random board symmetries", choices=tuple(SYMMETRIES))
    enable_history_matrices: bool = option(False, "drop move history at random, as KataGo does")
    allow_nonfull_mask: bool = option(False, "train on rows with boards smaller than pos_len, which are refused otherwise")
    no_resume: bool = option(False, "start afresh although traindir holds a checkpoint")
    no_final_save: bool = option(False, "do not save at the end")
    fuse_projections: bool = option(False, "one matrix for q, k, v and one for the two halves of the FFN")
    separate_projections: bool = option(False, "separate matrices (wins over --fuse-projections)")
    attention_impl: str = option("manual", "attention", choices=("manual", "xla"))
    activation_dtype: str = dtype_option("dtype of the residual stream")
    param_dtype: str = dtype_option("dtype in which parameters are stored")
    opt_state_dtype: str = dtype_option("dtype in which moments are stored")
    opt_update_dtype: str = dtype_option("dtype of the optimizer's arithmetic")
    rope_dtype: str = dtype_option("dtype of the rotary embedding")
    ffn_mul_dtype: str = dtype_option("dtype of the gate product")
    attention_logits_dtype: str = dtype_option("dtype of attention logits and softmax")
    int8_train: bool = option(False, "INT8 matrix products: refused, not part of this project")
    int8_target: str = option("ffn", "matrices in INT8; recorded in checkpoints, otherwise without effect")
    int8_fwd_bits: int = option(8, "bits of the forward INT8 products; recorded", low=1)
    int8_bwd_bits: int = option(8, "bits of the backward INT8 products; recorded", low=1)
    ema_decay: float = option(0.0, "exponential moving average of the parameters, in [0, 1) (0: off)", low=0, below=1)
    log_grad_norm: bool = option(False, "compute and log the gradient norm")
    log_step_time: bool = option(False, "log the time of every step's parts")
    component_profile: bool = option(False, "time the parts of the network, then stop")
    component_profile_repeats: int = option(3, "repeats of the component profile", low=1)
    component_profile_grad: bool = option(False, "profile gradients too")
    donate_train_buffers: bool = option(False, "let the step reuse the buffers of the old state")
    data_parallel: bool = option(False, "train on all local devices")
    stack_blocks: bool = option(False, "keep the blocks' parameters stacked")
    scan_blocks: bool = option(False, "scan over stacked blocks")
    remat_blocks: bool = option(False, "recompute activations in the backward pass")
    seed: int = option(1234, "seed of initialisation, file order and batch stream", low=0)
    init_std: float = option(0.02, "standard deviation of initial weights", low=0)
    score_mode: str = option("simple", "score head", choices=("simple",))
    xla_peak_tflops: float = option(918.0, "peak of the device, for the MFU figure", low=0)
    # Beyond the original: it has one compute dtype, one objective, and takes every local device.
    compute_dtype: str = option("bfloat16", "dtype of matrix products", choices=tuple(DTYPES))
    objective: str = option("replica", "seki weight from each device's own rows, or from the batch", choices=("replica", "global"))
    data_parallel_devices: int = option(0, "devices to use with --data-parallel (0: all local ones)", low=0)
    shard_state: str = option("none", "every device holds the whole state, or a share of it", choices=("none", "data"))
    master_dtype: str = option("param", "dtype of the parameters that updates are added to: --param-dtype, or float32", choices=("param", "float32"))
    checkpoint_format: str = option("orbax", "own checkpoints, or the original's single file", choices=("orbax", "legacy"))
    keep: int = option(3, "own checkpoints to keep", low=1)
    resume_order: str = option("exact", "a resumed run finishes its epoch, or begins another as the original does", choices=("exact", "legacy"))
    allow_changes: str = option("", "options that may differ from the checkpoint's, separated by commas")
    on_nonfinite: str = option("stop", "a step whose loss or gradient is not finite: end the run, drop the update, or train on", choices=("stop", "skip", "ignore"))
    skip_bad_files: bool = option(False, "leave out data files that cannot be trained on, instead of ending the run")
    tensorboard: bool = option(False, "also write the figures as TensorBoard event files")
    check_replicas: int = option(0, "steps between checks that all devices hold the same state; also before each save (0: off); a split state's shares have no copies to compare", low=0)

    def __init__(self, **options):
        table = {f.name: f for f in fields(self)}
        for name in options:
            if name not in table:
                raise ConfigError(f"unknown option {name}{did_you_mean(name, table)}")
        for name, row in table.items():
            object.__setattr__(self, name, _checked(row, options.get(name, row.default)))
        self._check_combinations()

    def _check_combinations(self):
        if self.int8_train:
            raise ConfigError(
                "int8_train = True: INT8 products need the original's optional quantisation package and are not part of this project: "
                "drop --int8-train"
            )
        if self.symmetry_type == "all" and self.batch_size % 8:
            raise ConfigError(f"symmetry_type 'all' emits eight images of each row: batch_size {self.batch_size} must divide by 8")
        if self.data_parallel_devices and not self.data_parallel:
            raise ConfigError(f"data_parallel_devices is {self.data_parallel_devices} but data_parallel is off: turn it on")
        if self.master_dtype != "param" and self.checkpoint_format == "legacy":
            raise ConfigError(f"checkpoint_format legacy has no room for master_dtype {self.master_dtype}: each resume would lose the copies; leave one out")
        if self.data_parallel_devices and self.batch_size % self.data_parallel_devices:
            raise ConfigError(f"batch_size {self.batch_size} does not divide by the {self.data_parallel_devices} devices")
        unknown = sorted(set(self.allowed_changes) - {f.name for f in fields(self)})
        if unknown:
            raise ConfigError(f"allow_changes names {unknown[0]}, which is no option{did_you_mean(unknown[0], [f.name for f in fields(self)])}")
        for name in ("component_profile", "muon_split_jit"):
            if self.splits_state and getattr(self, name):
                raise ConfigError(f"shard_state data does not go with {name}: leave one of them out")
            if self.data_parallel and getattr(self, name):
                raise ConfigError(f"data_parallel does not go with {name}: train on one device, or without {name}")

    @property
    def allowed_changes(self) -> list[str]:
        return [name.strip() for name in self.allow_changes.split(",") if name.strip()]

    @property
    def update_apart(self) -> bool:
        """Whether the optimizer's update is a compiled call of its own."""
        return self.muon_split_jit and self.optimizer == "muon"

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            *MODEL_SIZES[self.model_kind],
            pos_len=self.pos_len,
            fused=self.fuse_projections and not self.separate_projections,
            stacked=self.stack_blocks or self.scan_blocks,
            scanned=self.scan_blocks,
            rematerialised=self.remat_blocks,
            attention=self.attention_impl,
        )

    @property
    def precision(self) -> Precision:
        return Precision(
            compute=DTYPES[self.compute_dtype],
            activation=DTYPES[self.activation_dtype],
            param=DTYPES[self.param_dtype],
            opt_state=DTYPES[self.opt_state_dtype],
            opt_update=DTYPES[self.opt_update_dtype],
            rope=DTYPES[self.rope_dtype],
            ffn_mul=DTYPES[self.ffn_mul_dtype],
            attention_logits=DTYPES[self.attention_logits_dtype],
            master=DTYPES[self.param_dtype if self.master_dtype == "param" else self.master_dtype],
        )

    @property
    def splits_state(self) -> bool:
        """Whether each device holds a share of every leaf, see shares.py."""
        return self.shard_state == "data"

    @property
    def needs_grad_norm(self) -> bool:
        return self.log_grad_norm or self.grad_clip_norm > 0

    def replace(self, **changes) -> "Config":
        """A copy with some options changed, checked anew."""
        return Config(**({f.name: getattr(self, f.name) for f in fields(self)} | changes))


def _checked(row, value):
    """`value` as the option's type, or ConfigError naming the option, the value and what is allowed."""
    kind = type(row.default) if row.default is not None else str
    if row.default is None and value is None:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if kind is float and type(value) is int:
        value = float(value)
    if kind is str and row.default is None and hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if type(value) is not kind:
        raise ConfigError(f"{row.name} = {value!r}: expected {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{row.name} = {value!r}: must be a finite number")
    meta = row.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{row.name} = {value!r}: choose from {', '.join(map(str, meta['choices']))}")
    if meta["low"] is not None and value < meta["low"]:
        raise ConfigError(f"{row.name} = {value!r}: must be at least {meta['low']}")
    if meta["high"] is not None and value > meta["high"]:
        raise ConfigError(f"{row.name} = {value!r}: must be at most {meta['high']}")
    if meta["below"] is not None and value >= meta["below"]:
        raise ConfigError(f"{row.name} = {value!r}: must be below {meta['below']}")
    return value


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line: the usage of some sixty flags would bury it.

    Flags are spelled out, as the old stack has them: an abbreviation would be another flag once a new one begins like it.
    """

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        flags = [*self._option_string_actions, *(flag_of(row.name) for row in fields(Config))]
        self.exit(2, f"error: {message}{did_you_mean(unknown[1], flags) if unknown else ''}\n")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about a name that does not exist: the closest one that does, or nothing."""
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]}?" if close else ""


def flag_of(name: str) -> str:
    """An option's flag on the command line."""
    return "--" + name.replace("_", "-")


METAVARS = {int: "N", float: "X", str: "NAME"}


def help_text(row) -> str:
    """What an option does, what it may be, and what it is where it is not given."""
    parts = [", ".join(row.metadata["choices"])] if len(row.metadata["choices"]) > 1 else []
    if row.default is not None and type(row.default) is not bool:
        parts.append(f"default {row.default}")
    return (row.metadata["help"] + (f" ({'; '.join(parts)})" if parts else "")).replace("%", "%%")


def add_options(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()):
    """Add the command-line flag of every option; flags not given leave no attribute, so Config's defaults hold."""
    for row in fields(Config):
        if row.name in leave_out:
            continue
        flag, settings = flag_of(row.name), {"default": argparse.SUPPRESS, "help": help_text(row)}
        if type(row.default) is bool:
            on_by_default = row.default
            action = argparse.BooleanOptionalAction if on_by_default else "store_true"
            parser.add_argument(flag, action=action, **settings)
        else:
            kind = str if row.default is None else type(row.default)
            assert row.default is not MISSING
            parser.add_argument(flag, type=kind, metavar=METAVARS[kind], **settings)


def from_arguments(arguments: argparse.Namespace, **fixed) -> Config:
    """The Config of parsed flags; `fixed` options win."""
    names = {row.name for row in fields(Config)}
    return Config(**({k: v for k, v in vars(arguments).items() if k in names} | fixed))
