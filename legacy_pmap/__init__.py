"""The original pmap KataGo Transformer trainer, written from its specification: the old side of the migration.

    import legacy_pmap as stack
    config = stack.Config(pos_len=9, batch_size=32, model_kind="b2c32", data_parallel=True)
    state = stack.init_state(config)
    state, metrics = stack.make_train_step(config)(state, [batch])

The same names exist in `kgo_shard`, so that one caller runs both.
"""

from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .config import Config
from .data import DataError, list_files, read_batches
from .losses import METRICS
from .step import head_outputs, init_state, make_eval_step, make_gradient, make_probe, make_train_step, to_host
from .train import main, train

__all__ = ["CheckpointError", "Config", "DataError", "METRICS", "head_outputs", "init_state", "list_files", "load_checkpoint", "main",
           "make_eval_step", "make_gradient", "make_probe", "make_train_step", "read_batches", "save_checkpoint", "to_host", "train"]
