"""What every benchmark shares: who measures, with what, and how samples are summed up."""

import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data" / "selfplay19"
RESULTS = Path(__file__).parent / "results"


def use_devices(count: int):
    """Have `count` logical devices where there is no accelerator; before JAX starts."""
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    if jax.local_device_count() < count:
        raise SystemExit(f"{count} devices are asked for, this machine has {jax.local_device_count()}")


def result(question: str, settings: dict[str, Any], **content) -> dict[str, Any]:
    """The start of a result: question, date, machine and versions, settings; then what was measured."""
    from kgo_shard.diff import report

    facts = report.environment_facts() | {"memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"}
    return {"question": question, "date": datetime.date.today().isoformat(), "environment": facts, "settings": settings} | content


def write(path: Path | None, content: dict[str, Any]):
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, 90th percentile and spread (the range of the middle half) of samples."""
    ordered = sorted(seconds)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
    tenths = statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 9
    return {"median": statistics.median(ordered), "90 %": tenths[8], "spread": quartiles[2] - quartiles[0]}


class UnequalWork(RuntimeError):
    """The sides do not compute the same: nothing is timed."""


def refuse_unequal_work(options: dict[str, Any], datadir: Path, devices: int):
    """UnequalWork unless one step of old and new is equal in every bit of state and metrics, in exact mode and a process of its own."""
    words = [text for name, value in options.items() for text in words_of(name, value)]
    command = [sys.executable, "-m", "kgo_shard", "diff", "--exact", "--states-only", "--steps", "1", "--devices", str(devices)]
    done = subprocess.run([*command, "--datadir", str(datadir), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnequalWork(f"{' '.join(command[3:])}: exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")


def words_of(name: str, value) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    return [] if value is False else [flag, str(value)]
