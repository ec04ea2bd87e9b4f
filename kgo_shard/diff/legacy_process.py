"""Replays a recorded tape with the old stack under this interpreter: `PYTHON legacy_process.py FOLDER OUT [--exact]`.

Reads FOLDER's tape and writes the trace to OUT. A program of its own, for interpreters whose JAX kgo_shard does not support (0.4.35, say): it needs jax, NumPy and ml_dtypes only.
"""

import os
import sys
import types
from pathlib import Path


def main(folder: str, out: str, exact: str = "") -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    # A bare package in place of kgo_shard's own, which imports Equinox.
    for name, path in (("kgo_shard", root / "kgo_shard"), ("kgo_shard.diff", root / "kgo_shard" / "diff")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    from kgo_shard.diff import recording

    tape = recording.read_tape(Path(folder))
    flags = recording.exact_flags() if exact else ()
    devices = tape.options.get("data_parallel_devices") or 1
    os.environ["XLA_FLAGS"] = " ".join((f"--xla_force_host_platform_device_count={devices}", *flags))  # before JAX starts
    from kgo_shard.diff import legacy_side, trace

    recorded = trace.record(legacy_side.make_side(tape), tape)
    recording.write_trace(Path(out), recorded, recording.facts_here("legacy_pmap"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
