"""Replays a recorded tape with the old stack under this interpreter: `PYTHON legacy_process.py FOLDER DEVICES [XLA flags]`.

A program of its own, for interpreters whose JAX kgo_shard does not support (0.4.35, say): it needs jax, NumPy and ml_dtypes only.
"""

import os
import sys
import types
from pathlib import Path


def main(folder: str, devices: str, *flags: str) -> int:
    os.environ["XLA_FLAGS"] = " ".join((f"--xla_force_host_platform_device_count={devices}", *flags))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    # A bare package in place of kgo_shard's own, which imports Equinox.
    for name, path in (("kgo_shard", root / "kgo_shard"), ("kgo_shard.diff", root / "kgo_shard" / "diff")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    import jax

    from kgo_shard.diff import legacy_side, recording, trace

    tape = recording.read_tape(Path(folder))
    facts = {"side": "legacy_pmap", "JAX": jax.__version__, "Python": sys.version.split()[0], "XLA_FLAGS": os.environ["XLA_FLAGS"]}
    recording.write_trace(Path(folder), trace.record(legacy_side.make_side(tape), tape), facts)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
