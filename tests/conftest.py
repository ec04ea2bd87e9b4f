"""Every test process runs in exact mode on 16 logical devices: bits then depend on the arithmetic alone (see the README)."""

import os
from pathlib import Path

EXACT_FLAGS = "--xla_disable_hlo_passes=fusion --xla_cpu_max_isa=SSE4_2"
os.environ["XLA_FLAGS"] = EXACT_FLAGS  # read once, when JAX starts: before its import
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402

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
