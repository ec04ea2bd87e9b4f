"""A run folder's checkpoint, changed at random, and the start of a run from it: the worker of test_fuzz.py, in a process of its own.

    python -m tests.fuzz_checkpoints RUN DATA FOLDER FIRST LAST

prints a line before and after each case, so that a crash or a hang is known by its number. A case is its seed alone.
"""

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path

from kgo_shard import resume
from kgo_shard.batches import BadFiles, find_files
from kgo_shard.checkpoint import CheckpointError
from kgo_shard.config import Config, ConfigError
from kgo_shard.keeper import Keeper
from kgo_shard.npz import DataError
from kgo_shard.store import CHECKSUMS, FOLDER, RUN

VALUES = (None, True, -1, 0, 2**31, 10**30, 1e308, "", "x", "../../x", [], {}, [[]], {"a": 1}, "float32", "<f4", "0" * 1000)


def change_bytes(rng: random.Random, path: Path):
    whole = path.read_bytes()
    while (content := changed(rng, whole)) == whole:
        pass  # zeros where zeros were
    path.write_bytes(content)


def changed(rng: random.Random, whole: bytes) -> bytes:
    content = bytearray(whole)
    how = rng.choice(("flip", "cut", "insert", "empty", "zeros"))
    place = rng.randrange(len(content) + 1)
    if how == "flip" and content:
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "insert":
        content[place:place] = rng.randbytes(rng.randint(1, 50))
    elif how == "empty":
        content.clear()
    else:
        content[place : place + 20] = bytes(len(content[place : place + 20]))
    return bytes(content)


def change_json(rng: random.Random, path: Path):
    """One entry anywhere in it gets another value, or goes."""
    content = json.loads(path.read_text())
    holder, key, part = None, None, content
    while isinstance(part, dict | list) and part and (holder is None or rng.random() < 0.8):
        holder, key = part, rng.choice(sorted(part)) if isinstance(part, dict) else rng.randrange(len(part))
        part = holder[key]
    if rng.random() < 0.3:
        del holder[key]
    else:
        holder[key] = rng.choice([value for value in VALUES if value != holder[key]])
    path.write_text(json.dumps(content))


def change(seed: int, folder: Path) -> tuple[Path, str]:
    """Damage one file of the checkpoint: which, and how. Most cases bring the checksums up to date, so that only what reads it can notice."""
    rng = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    described = [path for path in files if path.suffix == ".json" or path.name in (".zarray", "_METADATA", "_CHECKPOINT_METADATA")]
    reseal = rng.random() < 0.7
    chosen = rng.choice((folder / RUN, rng.choice(described), rng.choice(files)))
    how = rng.choice(("bytes", "json", "json", "gone"))
    if how == "gone":
        chosen.unlink()
    elif how == "json" and chosen in described:
        change_json(rng, chosen)
    else:
        change_bytes(rng, chosen)
    if reseal and chosen.name != CHECKSUMS:
        left = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKSUMS)
        sums = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in left}
        (folder / CHECKSUMS).write_text(json.dumps(sums))
    return chosen, f"{how} {chosen.relative_to(folder)}{' resealed' if reseal else ''}"


def main() -> int:
    run, data, folder, first, last = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    [newest] = (run / FOLDER).iterdir()
    config = Config(**json.loads((newest / RUN).read_text())["options"]).replace(traindir=str(folder), datadir=str(data))
    damaged = folder / FOLDER / newest.name
    shutil.copytree(newest, damaged)
    for seed in range(first, last):
        chosen, what = change(seed, damaged)
        print(f"case {seed}: {what}", flush=True)
        try:
            with Keeper(config, find_files(data / "train"), BadFiles(skip=False), lambda line: None) as keeper:
                state, memory = keeper.start()
                json.dumps(resume.to_json(state, memory, config, {}, data / "train"))  # what was read can be saved again
            outcome = "loaded"
        except (CheckpointError, ConfigError, DataError) as error:
            outcome = f"refused: {' '.join(str(error).split())[:200]}"
            assert "\n" not in str(error), error
        print(f"  {outcome}", flush=True)
        for path in (chosen, damaged / CHECKSUMS):
            shutil.copyfile(newest / path.relative_to(damaged), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
