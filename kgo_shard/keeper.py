"""The run folder: who may write there, what a run starts from, and what it leaves."""

import fcntl
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from . import checkpoint, resume
from .batches import BadFiles
from .config import Config, ConfigError
from .mesh import make_mesh
from .replicas import check_replicas
from .resume import Memory
from .state import TrainState, init_state
from .store import RUN, Store, clear_unfinished, complete, set_aside, spare_name


class Keeper:
    """The run folder: what the run starts from and what it leaves there, in the own format or in the original's."""

    def __init__(self, config: Config, files: Sequence[Path], bad: BadFiles, log: Callable[[str], None]):
        self.config, self.files, self.bad, self.log = config, files, bad, log
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
        if self.config.no_resume:
            overwritten = self.config.checkpoint_format == "legacy"  # the file is, as in the original
            for former in (self.store.folder, *(() if overwritten else (self.folder / checkpoint.FILE_NAME,))):
                if former.is_file() or complete(former):
                    self.log(f"{former} is kept as {former.rename(spare_name(former, 'before'))}")
        if self.config.checkpoint_format == "legacy":
            return
        for path in set_aside(self.store.folder, step):
            self.log(f"a checkpoint that is further, but was not used, is kept as {path}")
        self.try_to_write(self.store.folder)

    def hold(self):
        """Take the folder's lock, which ends with the process."""
        if self.lock is not None:
            return
        if (self.folder / RUN).exists():
            raise ConfigError(f"traindir {self.folder}: is a checkpoint, not a run folder: give --traindir the folder above its checkpoints")
        try:
            str(self.folder).encode()
        except UnicodeEncodeError:  # Orbax would find out after hours of training
            raise ConfigError(f"traindir {self.folder!r}: its name is not UTF-8: give --traindir another folder") from None
        self.try_to_write(self.folder)
        self.lock = open(self.folder / "lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"traindir {self.folder}: another trainer is at work there: wait for it, or give --traindir another folder") from None
        except OSError as error:
            raise ConfigError(f"traindir {self.folder}: cannot be locked ({error.strerror}): give --traindir another folder") from None
        clear_unfinished(self.store.folder)

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
            state = init_state(config)
            return state, Memory.fresh(state, config)
        if found is None:
            state = checkpoint.load_checkpoint(pickled, config)
            self.log(f"resumed from {pickled}: step {state.step}, {state.samples} samples")
            return state, Memory.fresh(state, config)
        path, tree, run = found
        memory = resume.from_json(path, run, config, self.files, self.data)
        state = checkpoint.from_own(path, tree, run, config)
        self.log(f"resumed from {path}: step {state.step}, {state.samples} samples")
        if config.resume_order == "legacy":
            return state, replace(Memory.fresh(state, config), journal=memory.journal)
        if run["versions"]["jax"] != jax.__version__:
            self.log(f"on JAX {jax.__version__}, before on {run['versions']['jax']}: last bits may differ from here on")
        if config.shard_state != (before := run["options"].get("shard_state", "none")):
            self.log(f"with shard_state {config.shard_state}, before {before}: last bits may differ from here on")
        devices = make_mesh(config).size
        if devices != run["devices"]:
            says = "as it would have been but for rounding" if config.objective == "global" else (
                "another than it would have been: each device's seki weight comes from its own rows; --objective global takes the batch's"
            )
            self.log(f"on {devices} devices, before on {run['devices']}: the next loss is {says}")
        return state, memory

    def save(self, state: TrainState, memory: Memory):
        """Begin to save (`wait` ends it); in the original's format, save."""
        if self.config.check_replicas:
            check_replicas(state)
        if self.config.checkpoint_format == "legacy":
            checkpoint.save_checkpoint(self.folder / checkpoint.FILE_NAME, state, self.config)
            return
        data = {name: content for name, content in self.contents.items() if self.data / name not in self.bad.reasons}
        run = resume.to_json(state, memory, self.config, data, self.data)
        learned = jax.tree.map(jnp.copy, state.learned) if self.config.donate_train_buffers else state.learned
        self.store.save(state.step, checkpoint.to_trees(learned), run)

    def wait(self):
        self.store.wait()


def keep_converted(traindir: Path, state: TrainState, config: Config):
    """`state` as the only checkpoint of a new run folder, which is not there if it fails; a run there begins an epoch, as after the
    original's file."""
    config = config.replace(traindir=traindir, datadir=config.datadir or traindir, checkpoint_format="orbax")
    try:
        with Keeper(config, [], BadFiles(skip=False), print) as keeper:
            keeper.claim(state.step)
            keeper.save(state, Memory.fresh(state, config))
    except (checkpoint.CheckpointError, ConfigError):
        shutil.rmtree(traindir, ignore_errors=True)
        raise


class StopSignals:
    """While it is entered, SIGTERM and SIGINT do not end the process: `signal` is the name of the one that came, or None."""

    def __init__(self):
        self.signal: str | None = None
        self.former = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
            self.former = {number: signal.signal(number, self.note) for number in heard}
        return self

    def note(self, number, frame):
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.signal = signal.Signals(number).name

    def __exit__(self, *_):
        for number, handler in self.former.items():
            signal.signal(number, handler)
