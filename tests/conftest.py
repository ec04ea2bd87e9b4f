"""Every test process runs in exact mode on 16 logical devices: bits then depend on the arithmetic alone (see the README)."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX is imported

import jax  # noqa: E402
import pytest  # noqa: E402

from kgo_shard.diff.recording import exact_flags  # noqa: E402

# As `--exact`, which keeps the flags that are there, so that both find the same programs. LLVM's optimiser changes no bits in exact mode
# (test_replay.py compares with a process that has it on) and takes a quarter of the time. Read when JAX starts, which no import does.
os.environ["XLA_FLAGS"] = " ".join((*exact_flags(), "--xla_backend_optimization_level=0"))

jax.config.update("jax_num_cpu_devices", 16)
# Compiled programs are kept between test runs; a fresh clone fills its own.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def rows9() -> Path:
    """Folder of real 9x9 self-play rows, with train/ and val/."""
    return DATA / "selfplay9"


@pytest.fixture(scope="session")
def rows19() -> Path:
    """Folder of real 19x19 self-play rows, with train/ and val/."""
    return DATA / "selfplay19"
