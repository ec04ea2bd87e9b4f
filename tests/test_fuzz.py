"""Checkpoints changed at random: refused in a line or loaded, and never a crash, a hang or a bare traceback. See test_npz.py for data files
and test_checkpoint.py for the original's format."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kgo_shard.config import Config
from kgo_shard.train import train

from .test_store import SMALL, free  # noqa: F401

CASES = 500


@pytest.mark.parametrize(("first", "last"), [(0, 40), pytest.param(40, CASES, marks=pytest.mark.long)])
def test_a_damaged_checkpoint_is_refused_or_loads(free, tmp_path, rows9, first, last):  # noqa: F811
    options = SMALL | {"max_training_samples": 32, "save_every_samples": 0, "val_every_samples": 0}
    train(Config(**options, traindir=tmp_path / "run", datadir=rows9), log=lambda line: None)
    words = [tmp_path / "run", rows9, tmp_path / "damaged", first, last]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz_checkpoints", *map(str, words)], capture_output=True, text=True, timeout=900, check=False,
        cwd=Path(__file__).parent.parent, env=os.environ,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, lines[-2:] + done.stderr.splitlines()[-5:]
    outcomes = [line.strip().partition(":")[0] for line in lines if line.startswith("  ")]
    assert len(outcomes) == last - first and {"refused", "loaded"} >= set(outcomes)
    assert outcomes.count("refused") > 0.6 * len(outcomes), "the changes have to do harm"
    for what, outcome in zip(lines[::2], lines[1::2], strict=True):
        if "resealed" not in what:
            assert outcome.startswith("  refused"), f"{what}: the checksums have to notice"
