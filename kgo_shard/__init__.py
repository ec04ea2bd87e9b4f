"""kgo_shard: KataGo Transformer training as Equinox modules, Optax transforms and one shard_map step over a mesh.

The drop-in interface, the same as `legacy_pmap`'s: one caller runs unchanged with either as `stack`.
"""

from .batches import read_batches
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .config import Config, ConfigError
from .npz import DataError
from .replicas import ReplicaError, check_replicas
from .state import TrainState, init_state, to_host
from .step import head_outputs, make_eval_step, make_gradient, make_probe, make_train_step
from .train import main, train

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "ReplicaError",
    "TrainState",
    "check_replicas",
    "head_outputs",
    "init_state",
    "load_checkpoint",
    "main",
    "make_eval_step",
    "make_gradient",
    "make_probe",
    "make_train_step",
    "read_batches",
    "save_checkpoint",
    "to_host",
    "train",
]
