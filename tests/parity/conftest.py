"""Fixtures that compile once for all parity tests. The process is in exact mode (see tests/conftest.py)."""

import pytest

from kgo_shard.__main__ import SAMPLE, SAMPLE_OPTIONS
from kgo_shard.batches import find_files
from kgo_shard.diff import legacy_side, shard_side
from kgo_shard.diff.trace import Tape, record


@pytest.fixture(scope="session")
def tape(tmp_path_factory) -> Tape:
    """Three steps on 8 devices from a checkpoint of the old stack; the seed's first batch has points that nobody owns."""
    options = SAMPLE_OPTIONS | {"log_grad_norm": True, "data_parallel": True, "data_parallel_devices": 8, "seed": 7}
    start = tmp_path_factory.mktemp("start") / "checkpoint_jax.pkl"
    legacy_side.save_start(start, options)
    return Tape(options, find_files(SAMPLE / "train"), 3, start, find_files(SAMPLE / "val"))


@pytest.fixture(scope="session")
def old_trace(tape):
    return record(legacy_side.make_side(tape), tape)


@pytest.fixture(scope="session")
def new_trace(tape):
    return record(shard_side.make_side(tape), tape)
