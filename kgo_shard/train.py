"""The host loop: batch, step, log, validate, save."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from . import checkpoint, layout
from .batches import check_files, epoch_files, read_packed_batches, read_validation, rows_read
from .config import Config, ConfigError, Parser, add_options, from_arguments
from .flops import muon_line, training_flops
from .npz import DataError
from .profile import profile_components
from .replicas import ReplicaError, check_replicas
from .state import TrainState, init_state
from .step import Batch, make_eval_step, make_train_step

SHOWN_TERMS = ("p0loss", "vloss", "oloss", "skloss", "pacc1")


def train(config: Config, log: Callable[[str], None] = print) -> TrainState:
    """Train until `max_training_samples`, resuming from the run folder's checkpoint; the original's loop and log lines.

    With `component_profile` it times the parts of a step instead: it neither trains nor writes.
    Raises ConfigError, DataError or CheckpointError before anything is written.
    """
    for name in ("traindir", "datadir"):
        if not getattr(config, name):
            raise ConfigError(f"{name} is missing: give --{name} DIR")
    data = Path(config.datadir)
    train_files = check_files(data / "train", config, rows_read(config))
    val_files = check_files(data / "val", config, config.batch_size)
    path = Path(config.traindir) / checkpoint.FILE_NAME
    for _ in read_validation(val_files, config, 0):
        pass  # the rows of every validation, read before hours are spent: a bad file would end the run unsaved
    state = start(path, config, log)
    if config.optimizer == "muon":
        log(muon_line(config))
    if config.component_profile:
        seed = config.seed + state.step
        batch = next(read_packed_batches(epoch_files(train_files, seed), config, seed))
        for line in profile_components(state, batch, config):
            log(line)
        return state
    check_folder(path.parent)
    step, evaluate = make_train_step(config), make_eval_step(config)
    window, warned = Window(state.step), config.allow_nonfull_mask
    save_marks = Marks(config.save_every_samples, state.samples)
    val_marks = Marks(config.val_every_samples, state.samples)
    replica_marks = Marks(config.check_replicas, state.step)
    chunks = training_chunks(train_files, config, lambda: state)
    times = StepTimes() if config.log_step_time else None
    if times:
        step, chunks = times.timed_step(step), times.timed_chunks(chunks)
    for chunk in chunks:
        warned = warned or warn_of_small_boards(chunk, config)
        state, metrics = step(state, chunk)
        window.add(metrics)
        done = state.samples >= config.max_training_samples
        if replica_marks.reached(state.step, at_end=False):
            check_replicas(state)
        if state.step - window.start_step >= config.print_every:
            log(window.line(state, config))
            if times:
                log(times.take_line(state.step, state.step - window.start_step))
            window = Window(state.step)
        if val_marks.reached(state.samples, done):
            log(validate(evaluate, state, val_files, config))
        if save_marks.reached(state.samples, done and not config.no_final_save):
            save(path, state, config)
    return state


class Marks:
    """When to save, validate or check: whenever `every` more samples (or steps) are done (0: never), and at the end."""

    def __init__(self, every: int, samples: int):
        self.every, self.next = every, samples + every

    def reached(self, samples: int, at_end: bool) -> bool:
        passed = bool(self.every) and samples >= self.next
        if passed:  # one call of K steps may pass several marks
            self.next += self.every * ((samples - self.next) // self.every + 1)
        return passed or at_end


def start(path: Path, config: Config, log: Callable[[str], None]) -> TrainState:
    """The checkpoint's state, where there is one and the run wants it, else a fresh one."""
    if path.exists() and not config.no_resume:
        state = checkpoint.load_checkpoint(path, config)
        log(f"resumed from {path}: step {state.step}, {state.samples} samples")
        return state
    return init_state(config)


def check_folder(folder: Path):
    """The run's folder, tried before hours are spent. ConfigError where nothing can be written into it."""
    try:
        checkpoint.try_folder(folder)
    except OSError as error:
        raise ConfigError(f"traindir {folder}: nothing can be written there ({error.strerror}): give --traindir another folder") from None


def save(path: Path, state: TrainState, config: Config):
    if config.check_replicas:
        check_replicas(state)
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save_checkpoint(path, state, config)


def training_chunks(files: Sequence[Path], config: Config, current: Callable[[], TrainState]) -> Iterator[list[Batch]]:
    """The batches of a run, `steps_per_jit` at a time, until `max_training_samples`; an epoch's last chunk may be shorter.

    An epoch's file order and draws come from the seed plus the step at which it starts, which is asked of `current`.
    """
    while current().samples < config.max_training_samples:
        seed = config.seed + current().step
        batches = read_packed_batches(epoch_files(files, seed), config, seed)
        while chunk := list(itertools.islice(batches, min(config.steps_per_jit, steps_left(current(), config)))):
            yield chunk


def warn_of_small_boards(chunk: Sequence[Batch], config: Config) -> bool:
    """Say once that rows hold boards smaller than pos_len, which the model treats as if they filled the frame."""
    points = layout.num_points(config.pos_len)
    for batch in chunk:
        if layout.PACKED in batch:
            on_board = np.unpackbits(batch[layout.PACKED][:, 0], axis=-1, count=points)
        else:
            on_board = batch[layout.PLANES][:, 0].reshape(-1, points)
        if on_board.min() < 1:
            print("warning: rows with boards smaller than pos_len; --allow-nonfull-mask silences this", file=sys.stderr)
            return True
    return False


def steps_left(state: TrainState, config: Config) -> int:
    return max(0, -(-(config.max_training_samples - state.samples) // config.batch_size))


class Window:
    """Sums of the metrics since the last log line."""

    def __init__(self, start_step: int):
        self.start_step = start_step
        self.start_time = time.perf_counter()
        self.sums: dict[str, np.float32] = {}
        self.learning_rate = 0.0

    def add(self, metrics: dict[str, float]):
        self.learning_rate = metrics["lr"]
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, np.float32(0)) + np.float32(value)

    def line(self, state: TrainState, config: Config) -> str:
        """The original's log line: loss and norm are means over the window's steps, the other terms means over weight."""
        steps = state.step - self.start_step
        seconds = max(time.perf_counter() - self.start_time, 1e-9)
        rate = steps * config.batch_size / seconds
        tflops = rate * training_flops(config.model) / 1e12
        norm = f"{float(self.sums['grad_norm']) / steps:.3f}" if config.needs_grad_norm else "off"
        return (
            f"step={state.step}, samples={state.samples}, time={seconds:.1f}s, lr={self.learning_rate:.2e}, wd={config.wd:.4f}, "
            f"loss={float(self.sums['loss']) / steps:.4f}, {shown(self.sums)}, grad_norm={norm}, "
            f"sps={rate:.1f}, TFLOPS={tflops:.2f}, MFU={100 * tflops / config.xla_peak_tflops if config.xla_peak_tflops else 0:.2f}%"
        )


class StepTimes:
    """Seconds of the window's steps, by what the loop waited for. Measuring has a price: no work overlaps any more.

    data: the batch stream, files and host side of augmentation; host_submit: batches onto the devices, and the call
    itself; train_wait: from there until every output is ready.
    """

    def __init__(self):
        self.data = self.host_submit = self.train_wait = 0.0

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
            started = time.perf_counter()

            def submitted(outputs):
                under_way = time.perf_counter()
                jax.block_until_ready(outputs)
                self.host_submit += under_way - started
                self.train_wait += time.perf_counter() - under_way

            return step(state, batches, submitted=submitted)

        return timed

    def take_line(self, step: int, num_steps: int) -> str:
        """The means over the window's steps, as the line that follows its log line; the next window starts from nothing."""
        data, host_submit, train_wait = (seconds / num_steps for seconds in (self.data, self.host_submit, self.train_wait))
        self.data = self.host_submit = self.train_wait = 0.0
        return (
            f"STEP_TIME: step={step}, steps={num_steps}, data={data:.4f}s, host_submit={host_submit:.4f}s, "
            f"train_wait={train_wait:.4f}s, total={data + host_submit + train_wait:.4f}s"
        )


def shown(sums: dict[str, np.float32]) -> str:
    with np.errstate(divide="ignore", invalid="ignore"):  # rows of no weight at all show nan
        return ", ".join(f"{name}={sums[name] / sums['wsum']:.4f}" for name in SHOWN_TERMS)


def validate(evaluate, state: TrainState, files: Sequence[Path], config: Config) -> str:
    """The original's validation line: loss is the mean over batches, terms are float32 sums over the sum of weights."""
    sums: dict[str, np.float32] = {}
    for count, batch in enumerate(read_validation(files, config, state.samples), start=1):
        for name, value in evaluate(state, batch).items():
            sums[name] = sums.get(name, np.float32(0)) + np.float32(value)
    return f"  VAL [{state.samples} samples]: loss={float(sums['loss']) / count:.4f}, {shown(sums)}"


def make_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Train with the original's command line.")
    add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`kgo-shard train`: 0 when trained, 1 where replicas part, 2 where it cannot start; one line says what is wrong."""
    arguments = make_parser("kgo-shard train").parse_args(argv)
    try:
        train(from_arguments(arguments), log=lambda line: print(line, flush=True))
    except (ConfigError, DataError, checkpoint.CheckpointError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except ReplicaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was saved last is whole, and the same command goes on from there", file=sys.stderr)
        return 130
    return 0
