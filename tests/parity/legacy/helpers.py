"""What the tests of legacy_pmap share: the small sample, a small configuration, its first batches."""

from pathlib import Path

import numpy as np

import legacy_pmap as stack

DATA = Path(__file__).parents[2] / "data" / "selfplay9"
FILES = sorted(str(path) for path in (DATA / "train").glob("*.npz"))
SMALL = dict(pos_len=9, batch_size=16, model_kind="b2c32", compute_dtype="float32", log_grad_norm=True, max_training_samples=64,
             warmup_samples=32, ema_decay=0.9)


def small_config(**options):
    return stack.Config(**{**SMALL, **options})


def first_batches(config, count, seed=5):
    stream = stack.read_batches(FILES, config, seed)
    return [next(stream) for _ in range(count)]


def assert_same_bits(old, new):
    """Two flat dicts of arrays: the same names, dtypes, shapes and bits; never empty."""
    assert old and old.keys() == new.keys()
    for name in old:
        a, b = np.asarray(old[name]), np.asarray(new[name])
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name
