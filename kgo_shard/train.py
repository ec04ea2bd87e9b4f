"""The host loop: batch, step, log, validate, save."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from . import checkpoint, nonfinite
from .batches import BadFiles, Place, check_files, epoch_files, read_packed_batches, read_validation, rows_read, warn
from .config import Config, ConfigError, Parser, add_options, from_arguments
from .flops import muon_line
from .journal import Journal, JournalError, StepTimes, Window, means_over_weight, validation_line, window_line
from .keeper import Keeper, StopSignals
from .npz import DataError, on_board
from .profile import profile_components
from .replicas import ReplicaError, check_replicas
from .state import TrainState
from .step import Batch, NonfiniteError, make_eval_step, make_train_step

MAX_SKIPPED_CALLS = 100  # in a row without a finite step: then the data are not what is wrong


class FruitlessError(RuntimeError):
    """Calls in a row without a finite step, under --on-nonfinite skip; what was trained before is saved."""


def train(config: Config, log: Callable[[str], None] = print, show: Callable[[TrainState, float], None] | None = None) -> TrainState:
    """Train until `max_training_samples`, going on from the run folder's newest checkpoint; the original's loop and log lines.

    Where the run was killed or stopped (SIGTERM, SIGINT: it saves and returns) it goes on as if it had not been. `show(state, loss)`
    is told of every call. With `component_profile` it times the parts of a step instead: it neither trains nor writes.
    Raises ConfigError, DataError or CheckpointError before anything is written; later DataError at a bad file, JournalError on a full disk
    and FruitlessError, when what was trained before is saved; NonfiniteError before a bad state is.
    """
    for name in ("traindir", "datadir"):
        if not getattr(config, name):
            raise ConfigError(f"{name} is missing: give --{name} DIR")
    if config.splits_state and not config.data_parallel:
        raise ConfigError("shard_state is data but data_parallel is off, so one device would keep the whole state: add --data-parallel")
    data, bad = Path(config.datadir), BadFiles(config.skip_bad_files)
    refuse_traindir_among(config, (data / "train", data / "val"))
    train_files = check_files(data / "train", config, rows_read(config), bad)
    val_files = check_files(data / "val", config, config.batch_size, bad)
    for _ in read_validation(val_files, config, 0, bad):
        pass  # the rows of every validation, read before hours are spent: a bad file would end the run unsaved
    with contextlib.ExitStack() as entered:
        stop = entered.enter_context(StopSignals())
        journal = entered.enter_context(contextlib.closing(Journal(config, log)))
        keeper = entered.enter_context(Keeper(config, train_files, bad, journal.line))
        state, memory = keeper.start()
        if config.optimizer == "muon":
            journal.line(muon_line(config))
        if config.component_profile:
            profile(state, train_files, config, journal)
            return state
        keeper.claim(state.step)
        journal.open(state.samples, memory.journal)
        step, evaluate = make_train_step(config), make_eval_step(config)
        window, place, bad.former = memory.window, memory.place.copy(), set(memory.bad_files)
        chunks = training_chunks(train_files, config, lambda: state, place, bad)
        times = StepTimes() if config.log_step_time else None
        if times:
            step, chunks = times.timed_step(step), times.timed_chunks(chunks)
        fruitless = 0  # calls in a row in which every step was skipped

        def validate_now():
            memory.owed = True
            figures = validate(evaluate, state, val_files, config, bad)
            memory.owed = False
            journal.line(validation_line(state, figures))
            journal.figures("validation", state, figures)

        def save_now():
            memory.journal, memory.bad_files = journal.positions(), bad.paths
            keeper.save(state, memory)

        try:
            if memory.owed:
                validate_now()
            for chunk in chunks:
                if config.allow_nonfull_mask and not memory.warned:
                    memory.warned = tell_of_small_boards(chunk, config)
                steps_before = state.step
                try:
                    state, metrics = step(state, chunk)
                except NonfiniteError as error:
                    raise nonfinite.explain(error, chunk[error.index], place.taken[error.index], config) from None
                memory.place = place.copy()
                window.add(metrics)
                if metrics.get("skipped"):
                    memory.skipped += metrics["skipped"]
                    warn_of_skipped(metrics["skipped"], memory.skipped, state, place)
                    fruitless = fruitless + 1 if state.step == steps_before else 0
                    if fruitless == MAX_SKIPPED_CALLS:
                        raise FruitlessError(nonfinite.give_up_line(state, fruitless, place.taken[-1]))
                if show is not None and state.step > steps_before:
                    show(state, metrics["loss"] / (state.step - steps_before))
                done = state.samples >= config.max_training_samples
                if memory.replicas.reached(state.step, at_end=False):
                    check_replicas(state)
                if state.step - window.start_step >= config.print_every:
                    figures = window.figures(state, config)
                    journal.line(window_line(state, figures))
                    journal.figures("train", state, figures)
                    if times:
                        journal.line(times.take_line(state.step))
                    window = memory.window = Window(state.step)
                if memory.validate.reached(state.samples, done):
                    validate_now()
                stopped = None if done else stop.signal
                if stopped:
                    command = "the same command without --no-resume" if config.no_resume else "the same command"
                    journal.line(f"stopped by {stopped} after step {state.step}: saved in {config.traindir}, {command} goes on from there")
                if (done or stopped) and (line := bad.line()):
                    journal.line(line)
                if memory.save.reached(state.samples, bool(stopped) or done and not config.no_final_save):
                    save_now()
                if stopped:
                    keeper.wait()
                    break
        except (DataError, JournalError, FruitlessError):
            if state.step:
                save_before_the_end(journal, state, keeper, save_now)
            raise
    return state


def refuse_traindir_among(config: Config, folders: Sequence[Path]):
    """ConfigError where the run would write npz files (tapes of steps) into a folder that is searched for them."""
    traindir = Path(config.traindir).resolve()
    for folder in folders:
        if traindir.is_relative_to(folder.resolve()):
            raise ConfigError(f"traindir {config.traindir}: lies in {folder}, where every file is taken for data: give another --traindir")


def save_before_the_end(journal: Journal, state: TrainState, keeper: Keeper, save_now: Callable[[], None]):
    """What was trained on before a bad file, say. Whatever fails here, the run's own error is the one to hear of."""
    try:
        journal.line(f"stopped after step {state.step}: saved in {keeper.folder}, the same command goes on from there")
    except JournalError:
        pass
    try:
        save_now()
        keeper.wait()
    except (checkpoint.CheckpointError, OSError) as error:
        warn(str(error))


def profile(state: TrainState, files: Sequence[Path], config: Config, journal: Journal):
    """The parts of one step, timed."""
    seed = config.seed + state.step
    batch = next(read_packed_batches(epoch_files(files, seed), config, seed))
    for line in profile_components(state, batch, config):
        journal.line(line)


def training_chunks(
    files: Sequence[Path], config: Config, current: Callable[[], TrainState], place: Place | None = None, bad: BadFiles | None = None
) -> Iterator[list[Batch]]:
    """The batches of a run, `steps_per_jit` at a time, until `max_training_samples`; an epoch's last chunk may be shorter.

    An epoch's file order and draws come from the seed plus the step at which it starts, which is asked of `current`. Where a
    `place` is given, the epoch that it stands in is finished first; it always says where the next chunk begins.
    """
    place = Place() if place is None else place
    while current().samples < config.max_training_samples:
        if not place.order:
            place.begin(files, config.seed + current().step)
        batches = read_packed_batches(place.order, config, place.seed, place, bad)
        while chunk := take(batches, min(config.steps_per_jit, steps_left(current(), config)), place):
            yield chunk
        if current().samples < config.max_training_samples:
            place.order = []  # the epoch is over


def take(batches: Iterator[Batch], count: int, place: Place) -> list[Batch]:
    """The next `count` batches, or what is left; `place.taken` says where their rows are."""
    chunk, place.taken = [], []
    for batch in itertools.islice(batches, count):
        chunk.append(batch)
        place.taken.append(place.last)
    return chunk


def tell_of_small_boards(chunk: Sequence[Batch], config: Config) -> bool:
    """Say that rows hold boards smaller than pos_len, which the model treats as if they filled the frame."""
    small = not all(on_board(batch, config.pos_len).all() for batch in chunk)
    if small:
        warn("rows with boards smaller than pos_len are trained on as if they filled the frame (--allow-nonfull-mask)")
    return small


def warn_of_skipped(skipped: int, total: int, state: TrainState, place: Place):
    read = ", ".join(f"{path} from row {start}" for path, start in place.taken)
    warn(f"after step {state.step}: dropped updates that were not finite: {skipped}, so far {total}; the call read {read}")


def steps_left(state: TrainState, config: Config) -> int:
    return max(0, -(-(config.max_training_samples - state.samples) // config.batch_size))


def validate(evaluate, state: TrainState, files: Sequence[Path], config: Config, bad: BadFiles | None = None) -> dict[str, float]:
    """Loss is the mean over the batches, the terms are float32 sums over the sum of weights."""
    sums: dict[str, np.float32] = {}
    for count, batch in enumerate(read_validation(files, config, state.samples, bad), start=1):
        for name, value in evaluate(state, batch).items():
            sums[name] = sums.get(name, np.float32(0)) + np.float32(value)
    return {"loss": float(sums["loss"]) / count} | means_over_weight(sums)


def keep_compiled(config: Config):
    """What this run compiles is kept in its folder, for its next start; JAX_COMPILATION_CACHE_DIR names another place."""
    wanted = config.traindir and jax.config.jax_compilation_cache_dir is None and not config.component_profile
    if wanted and not os.path.isfile(config.traindir):
        jax.config.update("jax_compilation_cache_dir", str(Path(config.traindir).absolute() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the many small programs of a start add up


def make_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Train with the original's command line.")
    add_options(parser)
    return parser


def say_plainly(line: str):
    """A line on stdout; where nobody reads it any more (`| head`) the run goes on, and the log in its folder tells."""
    try:
        print(line.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress_line(config: Config):
    """(log, show) of a run that somebody watches: the log's lines scroll by above a line that says how far it is."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("{task.percentage:.0f}%  loss {task.fields[loss]}"), TimeRemainingColumn()
    with Progress(*columns, transient=True, redirect_stderr=sys.stderr.isatty()) as progress:
        task = progress.add_task("train", total=config.max_training_samples, step=0, loss="-")

        def say(line: str):
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        def show(state: TrainState, loss: float):
            progress.update(task, completed=state.samples, step=state.step, loss=f"{loss:.4f}")

        yield say, show


def main(argv: Sequence[str] | None = None) -> int:
    """`kgo-shard train`: 0 when trained, 1 where replicas part or a loss is not finite, 2 where it cannot start; one line says what is wrong."""
    arguments = make_parser("kgo-shard train").parse_args(argv)
    try:
        config = from_arguments(arguments)
        keep_compiled(config)
        if sys.stdout.isatty() and not config.component_profile:
            with progress_line(config) as (say, show):
                train(config, say, show)
        else:
            train(config, say_plainly)
    except (ConfigError, DataError, checkpoint.CheckpointError, JournalError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except (ReplicaError, NonfiniteError, FruitlessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was saved last is whole, and the same command goes on from there", file=sys.stderr)
        return 130
    return 0
