"""Every planted fault against the clean old side, in exact mode: is it found, and is it named where it was planted?

    python -m tests.parity.fault_matrix --json tests/parity/results/faults_jax_X.json

Exit code 1 if one is not. The last full results are committed in `results/`; pytest runs one fault of every stage.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

from kgo_shard.__main__ import EXACT_FLAGS, SAMPLE, SAMPLE_OPTIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = " ".join(EXACT_FLAGS)
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from kgo_shard.batches import find_files
    from kgo_shard.diff import compare, legacy_side, report, shard_side
    from kgo_shard.diff.faults import FAULTS
    from kgo_shard.diff.trace import Tape, record

    options = SAMPLE_OPTIONS | {"log_grad_norm": True, "data_parallel": True, "data_parallel_devices": 8, "seed": 7}
    results = {"date": datetime.date.today().isoformat(), "environment": report.environment_facts(), "faults": {}}
    with tempfile.TemporaryDirectory() as folder:
        tape = Tape(options, find_files(SAMPLE / "train"), 2, Path(folder) / "checkpoint_jax.pkl")
        legacy_side.save_start(tape.checkpoint, options)
        old = record(legacy_side.make_side(tape, probe_only=True), tape)
        clean = compare.compare(old, record(shard_side.make_side(tape, probe_only=True), tape))
        results["without a fault"] = clean.verdict()
        print(clean.verdict(), flush=True)
        for name, fault in FAULTS.items():
            with fault.plant():
                comparison = compare.compare(old, record(shard_side.make_side(tape, probe_only=True), tape))
            bad = comparison.first_bad
            found = bad is not None and (bad.step, bad.stage) == (fault.step, fault.stage)
            results["faults"][name] = {"planted": fault.stage, "named": found, "meaning": fault.meaning, "verdict": comparison.verdict()}
            print(f"{'named' if found else 'MISSED':7} {name:30} {comparison.verdict()}", flush=True)
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    named = sum(entry["named"] for entry in results["faults"].values())
    print(f"{named} of {len(FAULTS)} faults named where they were planted")
    return 0 if clean.equal and named == len(FAULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
