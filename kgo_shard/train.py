"""The host loop: batch, step, log, validate, save."""

import contextlib
import fcntl
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import checkpoint, layout, resume
from .batches import Place, check_files, epoch_files, read_packed_batches, read_validation, rows_read
from .config import Config, ConfigError, Parser, add_options, from_arguments
from .flops import muon_line, training_flops
from .mesh import make_mesh
from .npz import DataError
from .profile import profile_components
from .replicas import ReplicaError, check_replicas
from .resume import Memory
from .state import TrainState, init_state
from .step import Batch, make_eval_step, make_train_step
from .store import RUN, Store, clear_unfinished, complete, set_aside

SHOWN_TERMS = ("p0loss", "vloss", "oloss", "skloss", "pacc1")


def train(config: Config, log: Callable[[str], None] = print) -> TrainState:
    """Train until `max_training_samples`, going on from the run folder's newest checkpoint; the original's loop and log lines.

    Where the run was killed or stopped (SIGTERM, SIGINT: it saves and returns) it goes on as if it had not been.
    With `component_profile` it times the parts of a step instead: it neither trains nor writes.
    Raises ConfigError, DataError or CheckpointError before anything is written, NonfiniteError before a bad state is.
    """
    for name in ("traindir", "datadir"):
        if not getattr(config, name):
            raise ConfigError(f"{name} is missing: give --{name} DIR")
    data = Path(config.datadir)
    train_files = check_files(data / "train", config, rows_read(config))
    val_files = check_files(data / "val", config, config.batch_size)
    for _ in read_validation(val_files, config, 0):
        pass  # the rows of every validation, read before hours are spent: a bad file would end the run unsaved
    with contextlib.ExitStack() as entered:
        keeper = entered.enter_context(Keeper(config, train_files, log))
        state, memory = keeper.start()
        if config.optimizer == "muon":
            log(muon_line(config))
        if config.component_profile:
            seed = config.seed + state.step
            batch = next(read_packed_batches(epoch_files(train_files, seed), config, seed))
            for line in profile_components(state, batch, config):
                log(line)
            return state
        keeper.claim(state.step)
        stop = entered.enter_context(StopSignals())
        step, evaluate = make_train_step(config), make_eval_step(config)
        window, warned = Window.from_json(memory.window), memory.warned or config.allow_nonfull_mask
        save_marks = Marks.from_json(memory.marks["save"], config.save_every_samples, state.samples)
        val_marks = Marks.from_json(memory.marks["validate"], config.val_every_samples, state.samples)
        replica_marks = Marks.from_json(memory.marks["replicas"], config.check_replicas, state.step)
        chunks = training_chunks(train_files, config, lambda: state, memory.place)
        times = StepTimes() if config.log_step_time else None
        if times:
            step, chunks = times.timed_step(step), times.timed_chunks(chunks)
        for chunk in chunks:
            warned = warned or warn_of_small_boards(chunk, config)
            state, metrics = step(state, chunk)
            if config.on_nonfinite == "stop":
                refuse_nonfinite(metrics, state, len(chunk), memory.place)
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
            stopped = None if done else stop.signal
            if save_marks.reached(state.samples, bool(stopped) or done and not config.no_final_save):
                marks = {"save": save_marks.to_json(), "validate": val_marks.to_json(), "replicas": replica_marks.to_json()}
                keeper.save(state, Memory(memory.place, window.to_json(), marks, warned))
            if stopped:
                keeper.wait()
                command = "the same command without --no-resume" if config.no_resume else "the same command"
                log(f"stopped by {stopped} after step {state.step}: saved in {config.traindir}, {command} goes on from there")
                break
    return state


class Keeper:
    """The run folder: what the run starts from and what it leaves there, in the own format or in the original's."""

    def __init__(self, config: Config, files: Sequence[Path], log: Callable[[str], None]):
        self.config, self.files, self.log = config, files, log
        self.folder, self.data = Path(config.traindir), Path(config.datadir) / "train"
        self.store = Store(self.folder, config.keep)
        self.lock = None
        self.contents: dict[str, str] = {}

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind, *_):
        try:
            self.store.close()
        except checkpoint.CheckpointError:
            if kind is None:  # else the first error is the one to hear of
                raise
        finally:
            if self.lock is not None:
                self.lock.close()

    def claim(self, step: int):
        """Make the folder this run's alone, which starts at `step`. ConfigError where it cannot be written, or another trainer has it."""
        self.hold()
        self.contents = resume.contents(self.files, self.data)
        if self.config.checkpoint_format == "legacy":
            return
        clear_unfinished(self.store.folder)
        if self.config.no_resume:
            for former in (self.store.folder, self.folder / checkpoint.FILE_NAME):
                if former.is_file() or complete(former):
                    kept = next(to for n in itertools.count(1) if not (to := former.with_name(f"{former.name}.before{n}")).exists())
                    self.log(f"{former} is kept as {former.rename(kept)}")
        for path in set_aside(self.store.folder, step):
            self.log(f"a checkpoint that is further, but was not used, is kept as {path}")
        self.try_to_write(self.store.folder)

    def hold(self):
        """Take the folder's lock, which ends with the process."""
        if self.lock is not None:
            return
        if (self.folder / RUN).exists():
            raise ConfigError(f"traindir {self.folder}: is a checkpoint, not a run folder: give --traindir the folder above its checkpoints")
        self.try_to_write(self.folder)
        self.lock = open(self.folder / "lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"traindir {self.folder}: another trainer is at work there: wait for it, or give --traindir another folder") from None
        except OSError as error:
            raise ConfigError(f"traindir {self.folder}: cannot be locked ({error.strerror}): give --traindir another folder") from None

    def try_to_write(self, folder: Path):
        try:
            checkpoint.try_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"traindir {folder}: nothing can be written there ({error.strerror}): give --traindir another folder") from None

    def start(self) -> tuple[TrainState, Memory]:
        """The newest checkpoint's state and memory, where there is one and the run wants it, else a fresh beginning."""
        config, pickled = self.config, self.folder / checkpoint.FILE_NAME
        if self.folder.is_dir() and not config.component_profile:
            self.hold()  # nobody removes a checkpoint while it is read
        found = None if config.no_resume else checkpoint.find_newest(self.folder)
        if found is None and (config.no_resume or not pickled.exists()):
            return self.fresh(init_state(config))
        if found is None:
            state = checkpoint.load_checkpoint(pickled, config)
            self.log(f"resumed from {pickled}: step {state.step}, {state.samples} samples")
            return self.fresh(state)
        path, tree, run = found
        memory = resume.from_json(path, run, config, self.files, self.data)
        state = checkpoint.from_own(path, tree, run, config)
        self.log(f"resumed from {path}: step {state.step}, {state.samples} samples")
        if config.resume_order == "legacy":
            return self.fresh(state)
        if run["versions"]["jax"] != jax.__version__:
            self.log(f"on JAX {jax.__version__}, before on {run['versions']['jax']}: last bits may differ from here on")
        devices = make_mesh(config).size
        if devices != run["devices"]:
            says = "as it would have been but for rounding" if config.objective == "global" else (
                "another than it would have been: each device's seki weight comes from its own rows; --objective global takes the batch's"
            )
            self.log(f"on {devices} devices, before on {run['devices']}: the next loss is {says}")
        return state, memory

    def fresh(self, state: TrainState) -> tuple[TrainState, Memory]:
        """A beginning as the original's: another epoch, a new window, marks that count from here."""
        config = self.config
        due = {"save": (config.save_every_samples, state.samples), "validate": (config.val_every_samples, state.samples)}
        due |= {"replicas": (config.check_replicas, state.step)}
        marks = {name: Marks(every, now + every).to_json() for name, (every, now) in due.items()}
        return state, Memory(Place(), Window(state.step).to_json(), marks, False)

    def save(self, state: TrainState, memory: Memory):
        if self.config.check_replicas:
            check_replicas(state)
        if self.config.checkpoint_format == "legacy":
            checkpoint.save_checkpoint(self.folder / checkpoint.FILE_NAME, state, self.config)
            return
        run = resume.to_json(state.step, state.samples, memory, self.config, self.contents, self.data)
        learned = jax.tree.map(jnp.copy, state.learned) if self.config.donate_train_buffers else state.learned
        self.store.save(state.step, checkpoint.to_trees(learned), run)

    def wait(self):
        self.store.wait()


def keep_converted(traindir: Path, state: TrainState, config: Config):
    """`state` as the only checkpoint of a new run folder; a run there begins an epoch, as after the original's file."""
    with Keeper(config.replace(traindir=traindir, datadir=config.datadir or traindir, checkpoint_format="orbax"), [], print) as keeper:
        keeper.claim(state.step)
        keeper.save(*keeper.fresh(state))


class StopSignals:
    """While it is entered, SIGTERM and SIGINT do not end the process: `signal` is the name of the one that came, or None."""

    def __init__(self):
        self.signal: str | None = None
        self.former = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self.former = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def note(self, number, frame):
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.signal = signal.Signals(number).name

    def __exit__(self, *_):
        for number, handler in self.former.items():
            signal.signal(number, handler)


class Marks:
    """When to save, validate or check: from `next` on whenever `every` more samples (or steps) are done (0: never), and at the end."""

    def __init__(self, every: int, next: int):
        self.every, self.next = every, next

    def to_json(self) -> dict[str, int]:
        return {"every": self.every, "next": self.next}

    @classmethod
    def from_json(cls, saved: dict[str, int], every: int, now: int) -> "Marks":
        """The saved ones; counted from `now` where they are to come more or less often than before."""
        return cls(every, saved["next"] if saved["every"] == every else now + every)

    def reached(self, samples: int, at_end: bool) -> bool:
        passed = bool(self.every) and samples >= self.next
        if passed:  # one call of K steps may pass several marks
            self.next += self.every * ((samples - self.next) // self.every + 1)
        return passed or at_end


def training_chunks(
    files: Sequence[Path], config: Config, current: Callable[[], TrainState], place: Place | None = None
) -> Iterator[list[Batch]]:
    """The batches of a run, `steps_per_jit` at a time, until `max_training_samples`; an epoch's last chunk may be shorter.

    An epoch's file order and draws come from the seed plus the step at which it starts, which is asked of `current`. Where a
    `place` is given, the epoch that it stands in is finished first; it always says where the next chunk begins.
    """
    place = Place() if place is None else place
    while current().samples < config.max_training_samples:
        if not place.order:
            place.begin(files, config.seed + current().step)
        batches = read_packed_batches(place.order, config, place.seed, place)
        while chunk := list(itertools.islice(batches, min(config.steps_per_jit, steps_left(current(), config)))):
            yield chunk
        if current().samples < config.max_training_samples:
            place.order = []  # the epoch is over


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


class NonfiniteError(ArithmeticError):
    """A step whose loss is not finite; the message names the step, the term and the rows."""


def refuse_nonfinite(metrics: dict[str, float], state: TrainState, num_steps: int, place: Place):
    """NonfiniteError where a sum of the call's metrics is NaN or infinite: before its state replaces a good one in the run folder."""
    bad = next((name for name, value in metrics.items() if not np.isfinite(value)), None)
    if bad is not None:
        steps = f"step {state.step}" if num_steps == 1 else f"one of the steps {state.step - num_steps + 1} to {state.step}"
        raise NonfiniteError(
            f"{steps}: {bad} is {metrics[bad]}; its rows end with batch {place.batch} of {place.order[place.file]}. Nothing of it is saved: "
            "lower --lr, or look at the rows; --on-nonfinite ignore trains on"
        )


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
        window = cls(saved["start_step"])
        window.start_time -= saved["seconds"]
        window.sums = {name: np.float32(value) for name, value in saved["sums"].items()}
        window.learning_rate = saved["learning_rate"]
        return window

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


def keep_compiled(config: Config):
    """What this run compiles is kept in its folder, for its next start; JAX_COMPILATION_CACHE_DIR names another place."""
    if config.traindir and jax.config.jax_compilation_cache_dir is None and not config.component_profile:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.traindir).absolute() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the many small programs of a start add up


def make_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Train with the original's command line.")
    add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`kgo-shard train`: 0 when trained, 1 where replicas part or a loss is not finite, 2 where it cannot start; one line says what is wrong."""
    arguments = make_parser("kgo-shard train").parse_args(argv)
    try:
        config = from_arguments(arguments)
        keep_compiled(config)
        train(config, log=lambda line: print(line, flush=True))
    except (ConfigError, DataError, checkpoint.CheckpointError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except (ReplicaError, NonfiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was saved last is whole, and the same command goes on from there", file=sys.stderr)
        return 130
    return 0
