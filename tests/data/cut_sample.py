"""Cuts the rows beside this file out of a folder of KataGo self-play files (standard names, first rows)."""

import argparse
import pathlib
import sys

import numpy as np

# (file, rows): the first `rows` rows of that file, every key and dtype as it is.
SAMPLE = (
    ("selfplay9/train/data0.npz", 192),
    ("selfplay9/train/data1.npz", 192),
    ("selfplay9/val/data0.npz", 96),
    ("selfplay19/train/data0.npz", 64),
    ("selfplay19/train/data1.npz", 64),
    ("selfplay19/val/data0.npz", 48),
)


def cut_file(source: pathlib.Path, target: pathlib.Path, rows: int) -> int:
    """Writes the first rows of every array of one file, and returns the bytes written."""
    with np.load(source, allow_pickle=False) as arrays:
        kept = {name: arrays[name][:rows] for name in arrays.files}
    for name, array in kept.items():
        if len(array) != rows:
            raise ValueError(f"{source}: {name} has {len(array)} rows, {rows} are needed")
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **kept)
    return target.stat().st_size


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=pathlib.Path, required=True, help="folder that holds selfplay9/ and selfplay19/")
    parser.add_argument("--target", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args(argv)
    total = 0
    for name, rows in SAMPLE:
        size = cut_file(args.source / name, args.target / name, rows)
        print(f"{name}: {rows} rows, {size} bytes")
        total += size
    print(f"{total} bytes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
