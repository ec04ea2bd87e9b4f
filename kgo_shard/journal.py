"""What a run tells: the original's log lines, the same figures for programs, and the line that shows how far it is."""

import contextlib
import errno
import importlib
import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from .config import Config, ConfigError
from .flops import training_flops
from .loss import Terms
from .state import TrainState
from .step import Batch
from .store import spare_name

SHOWN_TERMS = ("p0loss", "vloss", "oloss", "skloss", "pacc1")
LOG, METRICS, EVENTS = "train_jax.log", "metrics.jsonl", "tensorboard"


class JournalError(OSError):
    """A log that cannot be written; the message names it and the remedy."""


class Journal:
    """The files of a run folder that tell of the run, each cut back at the start to where the checkpoint found it.

    `train_jax.log` has every line that the run says, `metrics.jsonl` one JSON object for each window and validation; with --tensorboard
    there are event files too. A run that was killed prints again what came after its last save: so nothing stands there twice.
    """

    def __init__(self, config: Config, say: Callable[[str], None]):
        self.folder, self.say = Path(config.traindir), say
        self.tensorboard = config.tensorboard
        self.files: dict[str, BinaryIO] = {}
        self.early: list[str] = []  # lines from before the files are open
        self.events = None

    def open(self, samples: int, positions: dict[str, int] | None):
        """For a run that goes on after `samples`. `positions` are its checkpoint's; where that has none the files are added to.
        What former runs left is kept under another name where a run begins with nothing. Raises JournalError."""
        try:
            for name in (LOG, METRICS, EVENTS):
                path = self.folder / name
                if samples == 0 and path.exists() and (path.is_dir() or path.stat().st_size):
                    path.rename(spare_name(path, "before"))
                elif path.is_file() and positions and name in positions:
                    os.truncate(path, min(positions[name], path.stat().st_size))
            for name in (LOG, METRICS):
                self.files[name] = open(self.folder / name, "ab", buffering=0)  # a killed run has told all that it did
        except OSError as error:
            raise JournalError(f"{error.filename}: cannot be written ({error.strerror}): make room, or give another --traindir") from None
        for text in self.early:
            self.write(LOG, text)
        if self.tensorboard:
            self.events = open_events(self.folder / EVENTS, samples)

    def positions(self) -> dict[str, int]:
        """How long each file is, for a checkpoint to remember; so much of it is on the disk, where the disk can promise that."""
        for file in self.files.values():
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
        return {name: file.tell() for name, file in self.files.items()}

    def line(self, text: str):
        self.say(text)
        if LOG in self.files:
            self.write(LOG, text)
        else:
            self.early.append(text)

    def figures(self, kind: str, state: TrainState, figures: dict[str, float | None]):
        """What a line tells, and all terms, in full: a row of `metrics.jsonl`; numbers that are not finite become null."""
        plain = {name: None if value is None or not math.isfinite(value) else value for name, value in figures.items()}
        self.write(METRICS, json.dumps({"kind": kind, "step": state.step, "samples": state.samples} | plain))
        if self.events is not None:
            for name, value in plain.items():
                if value is not None:
                    self.events.add_scalar(f"{kind}/{name}", value, state.samples)
            self.events.flush()

    def write(self, name: str, text: str):
        """A whole line or none. JournalError where the disk is full, say."""
        file = self.files[name]
        start, content = file.tell(), (text + "\n").encode("utf-8", "surrogateescape")
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(start)
                file.seek(start)
            message = f"{self.folder / name}: cannot be written ({error.strerror}): make room; the same command goes on from the last checkpoint"
            raise JournalError(message) from None

    def close(self):
        for file in (*self.files.values(), self.events):
            if file is not None:
                file.close()


def open_events(folder: Path, samples: int):
    """The writer of event files, whose readers then forget what came after `samples`. ConfigError where its package is missing."""
    suffix = f".{time.time_ns()}"  # its own names tell seconds: a run that starts again within one would overwrite
    try:
        return importlib.import_module("tensorboardX").SummaryWriter(
            str(folder), purge_step=samples + 1 if samples else None, filename_suffix=suffix
        )
    except ImportError:
        raise ConfigError("tensorboard = True: its package is not installed: pip install 'kgo-shard[tensorboard]', or drop --tensorboard") from None


class Window:
    """Sums of the metrics since the last log line."""

    def __init__(self, start_step: int):
        self.start_step = start_step
        self.start_time = time.perf_counter()
        self.sums: dict[str, np.float32] = {}
        self.learning_rate = 0.0

    def to_json(self) -> dict[str, Any]:
        sums = {name: float(value) for name, value in self.sums.items()}
        return {"start_step": self.start_step, "seconds": time.perf_counter() - self.start_time, "sums": sums, "learning_rate": self.learning_rate}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Window":
        """Raises KeyError, TypeError or ValueError where it was not made by `to_json`."""
        window = cls(operator.index(saved["start_step"]))
        window.start_time -= float(saved["seconds"])
        window.sums = {name: np.float32(float(value)) for name, value in saved["sums"].items()}
        window.learning_rate = float(saved["learning_rate"])
        return window

    def add(self, metrics: dict[str, float]):
        self.learning_rate = metrics["lr"]
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, np.float32(0)) + np.float32(value)

    def figures(self, state: TrainState, config: Config) -> dict[str, float | None]:
        """Loss and norm are means over the window's steps, the other terms means over weight; seconds, and samples a second."""
        steps = state.step - self.start_step
        seconds = max(time.perf_counter() - self.start_time, 1e-9)
        rate = steps * config.batch_size / seconds
        tflops = rate * training_flops(config.model) / 1e12
        return {
            "steps": steps,
            "seconds": seconds,
            "lr": self.learning_rate,
            "wd": config.wd,
            "loss": float(self.sums["loss"]) / steps,
            **means_over_weight(self.sums),
            "grad_norm": float(self.sums["grad_norm"]) / steps if config.needs_grad_norm else None,
            "sps": rate,
            "tflops": tflops,
            "mfu": 100 * tflops / config.xla_peak_tflops if config.xla_peak_tflops else 0.0,
            "skipped": int(self.sums.get("skipped", 0)),
        }


def window_line(state: TrainState, figures: dict[str, float | None]) -> str:
    """The original's log line of a window's figures."""
    norm = "off" if figures["grad_norm"] is None else f"{figures['grad_norm']:.3f}"
    return (
        f"step={state.step}, samples={state.samples}, time={figures['seconds']:.1f}s, lr={figures['lr']:.2e}, wd={figures['wd']:.4f}, "
        f"loss={figures['loss']:.4f}, {shown(figures)}, grad_norm={norm}, "
        f"sps={figures['sps']:.1f}, TFLOPS={figures['tflops']:.2f}, MFU={figures['mfu']:.2f}%"
    )


def validation_line(state: TrainState, figures: dict[str, float]) -> str:
    """The original's line of a validation."""
    return f"  VAL [{state.samples} samples]: loss={figures['loss']:.4f}, {shown(figures)}"


def shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name}={figures[name]:.4f}" for name in SHOWN_TERMS)


def means_over_weight(sums: dict[str, np.float32]) -> dict[str, float]:
    """Every term of float32 `sums` over the sum of weights, which stays a sum itself; nan where no row had any."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means = {name: float(sums[name] / sums["wsum"]) for name in Terms._fields if name not in ("loss", "wsum") and name in sums}
    return means | {"wsum": float(sums["wsum"])}


class StepTimes:
    """Seconds of the window's steps, by what the loop waited for. Measuring has a price: no work overlaps any more.

    data: the batch stream, files and host side of augmentation; host_submit: batches onto the devices, and the call
    itself; train_wait: from there until every output is ready.
    """

    def __init__(self):
        self.data = self.host_submit = self.train_wait = 0.0
        self.steps = 0  # a window that a restart cut in two was measured in part only

    def timed_chunks(self, chunks: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        while True:
            started = time.perf_counter()
            chunk = next(chunks, None)
            self.data += time.perf_counter() - started
            if chunk is None:
                return
            yield chunk

    def timed_step(self, step: Callable) -> Callable:
        def timed(state, batches):
            started, self.steps = time.perf_counter(), self.steps + len(batches)

            def submitted(outputs):
                under_way = time.perf_counter()
                jax.block_until_ready(outputs)
                self.host_submit += under_way - started
                self.train_wait += time.perf_counter() - under_way

            return step(state, batches, submitted=submitted)

        return timed

    def take_line(self, step: int) -> str:
        """The means over the window's steps, as the line that follows its log line; the next window starts from nothing."""
        data, host_submit, train_wait = (seconds / self.steps for seconds in (self.data, self.host_submit, self.train_wait))
        line = (
            f"STEP_TIME: step={step}, steps={self.steps}, data={data:.4f}s, host_submit={host_submit:.4f}s, "
            f"train_wait={train_wait:.4f}s, total={data + host_submit + train_wait:.4f}s"
        )
        self.data = self.host_submit = self.train_wait = 0.0
        self.steps = 0
        return line
