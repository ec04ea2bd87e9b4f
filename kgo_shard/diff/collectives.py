"""Every collective of a compiled program: kind, dtype, elements, devices. What two programs do not share must be explained.

Read from the text of the lowered program (StableHLO: what was asked for) and of the compiled one (HLO: what the compiler made
of it, combined or not).
"""

import re
from collections import Counter
from typing import NamedTuple

from . import shard_side
from .run import old_stack
from .trace import Tape

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")
DTYPES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s32": 4, "i32": 4, "s64": 8, "i64": 8, "u32": 4, "ui32": 4, "pred": 1, "i1": 1}


class Collective(NamedTuple):
    kind: str
    dtype: str
    elements: int
    devices: int  # of one group

    @property
    def bytes(self) -> int:
        return self.elements * DTYPES[self.dtype]


def lowered_collectives(text: str) -> Counter[Collective]:
    """Of a StableHLO module: one entry for each operand."""
    found: Counter[Collective] = Counter()
    for match in re.finditer(r'"?stablehlo\.(' + "|".join(KINDS) + r')"?\(', text):
        kind, rest = match[1], text[match.start() :]
        # The signature follows the region that says how to reduce, where there is one.
        end = rest.index("}) : (") + 5 if kind in ("all_reduce", "reduce_scatter") else rest.index(" : (") + 3
        operands = rest[end : rest.index(" -> ", end)]
        groups = re.search(r"replica_groups = dense<.*?> : tensor<(\d+)x(\d+)xi64>", rest[:end])
        for shape in re.findall(r"tensor<([^>]*)>", operands):
            *sizes, dtype = shape.split("x")
            found[Collective(kind, dtype, product(sizes), int(groups[2]) if groups else axis_size(rest[:end], text))] += 1
    return found


def axis_size(operation: str, text: str) -> int:
    """The size of the mesh axis that JAX 0.12 names in place of groups; 0 if there is none."""
    axis = re.search(r'replica_group_mesh_axes<.*?name = "(\w+)"', operation)
    size = axis and re.search(f'"{axis[1]}"=(\\d+)', text)
    return int(size[1]) if size else 0


def compiled_collectives(text: str) -> Counter[Collective]:
    """Of an optimised HLO module: one entry for each operand, also of a combined one."""
    found: Counter[Collective] = Counter()
    names = "|".join(kind.replace("_", "-") for kind in KINDS)
    for line in text.splitlines():
        match = re.search(r"= (.*?) (" + names + r")(?:-start)?\(", line)
        if match:
            groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\['\w+'=(\d+)\])", line)
            size = 0 if groups is None else len(groups[1].split(",")) if groups[1] else int(groups[2] or groups[3])
            for dtype, sizes in re.findall(r"\b(" + "|".join(DTYPES) + r")\[([\d,]*)\]", match[1]):
                found[Collective(match[2].replace("-", "_"), dtype, product(sizes.split(",")), size)] += 1
    return found


def product(sizes: list[str]) -> int:
    total = 1
    for size in sizes:
        total *= int(size) if size else 1
    return total


class Audit(NamedTuple):
    """The collectives of two programs, and what only one of them has."""

    old: Counter[Collective]
    new: Counter[Collective]

    @property
    def only_old(self) -> Counter[Collective]:
        return self.old - self.new

    @property
    def only_new(self) -> Counter[Collective]:
        return self.new - self.old

    @property
    def equal(self) -> bool:
        return bool(self.old) and self.old == self.new

    def verdict(self) -> str:
        if not self.old and not self.new:
            return "DIFFERENT: neither program holds a collective: nothing was compared"
        if self.equal:
            return f"EQUAL: {sum(self.old.values())} collectives, {total_bytes(self.old):,} bytes a step on each device"
        return f"DIFFERENT: only the old has {describe(self.only_old)}; only the new has {describe(self.only_new)}"

    def rows(self) -> list[list[str]]:
        return [
            [c.kind, c.dtype, f"{c.elements:,}", str(c.devices), str(self.old[c]), str(self.new[c]), f"{c.bytes:,}",
             "equal" if self.old[c] == self.new[c] else "DIFFERENT"]
            for c in sorted(self.old | self.new, reverse=True)
        ]  # fmt: skip


COLUMNS = ("kind", "dtype", "elements", "devices", "old", "new", "bytes each", "verdict")


def audit(tape: Tape, num_steps: int = 1) -> dict[str, Audit]:
    """The training steps of both stacks: {"lowered": ..., "compiled": ...}."""
    lowered = [side.lower_step(tape, num_steps) for side in (old_stack(), shard_side)]
    return {
        "lowered": Audit(*(lowered_collectives(program.as_text()) for program in lowered)),
        "compiled": Audit(*(compiled_collectives(program.compile().as_text()) for program in lowered)),
    }


def total_bytes(collectives: Counter[Collective]) -> int:
    return sum(c.bytes * count for c, count in collectives.items())


def describe(collectives: Counter[Collective]) -> str:
    return ", ".join(f"{count} {c.kind} of {c.elements} {c.dtype}" for c, count in sorted(collectives.items())) or "none"


def sections(audits: dict[str, Audit]) -> list[dict]:
    """One section of a report for each form of the program."""
    texts = {
        "lowered": "What the step asks for, one entry for each array.",
        "compiled": "What the compiler made of it.",
    }
    return [
        {
            "title": f"Collectives of the {form} step",
            "text": texts[form],
            "columns": list(COLUMNS),
            "rows": found.rows(),
            "verdict": found.verdict(),
            "image_png": None,
        }
        for form, found in audits.items()
    ]
