"""The trainer: epochs of batches, steps, log lines, validation, checkpoints (spec, section 6)."""

import dataclasses
import itertools
import os
import sys
import time

import jax
import numpy as np

from .checkpoint import FILE_NAME, CheckpointError, load_checkpoint, save_checkpoint
from .config import parse_args
from .data import DataError, list_files, check_rows, read_batches
from .flops import muon_line, training_flops
from .profile import component_lines
from .step import init_state, make_eval_step, make_train_step

VALIDATION_SEED = 999983
LOGGED_TERMS = ("p0loss", "vloss", "oloss", "skloss", "pacc1")


def add_metrics(totals, metrics):
    """Sums of a window, in float32. `totals` is {} at its start; returns the new sums."""
    return {name: np.float32(totals.get(name, 0.0)) + np.float32(value) for name, value in metrics.items()}


def metrics_text(totals, count):
    """`loss=..., p0loss=...`: loss is the mean over `count` steps or batches, a term its sum over the sum of wsum."""
    parts = [f"loss={float(totals['loss']) / count:.4f}"]
    with np.errstate(divide="ignore", invalid="ignore"):  # rows of no weight at all print nan
        parts += [f"{name}={float(totals[name] / totals['wsum']):.4f}" for name in LOGGED_TERMS]
    return ", ".join(parts)


def epoch_chunks(files, config, step, most=None):
    """The batches of one epoch started at `step`, at most `most`, K at a time; the last chunk may be shorter.

    The file order and the stream depend on the step the epoch started at: a resumed run sees other batches (spec, 7.4).
    """
    files = list(files)
    np.random.default_rng(config.seed + step).shuffle(files)
    batches = itertools.islice(read_batches(files, config, config.seed + step), most)
    while chunk := list(itertools.islice(batches, config.steps_per_jit)):
        yield chunk


def validate(state, files, config, evaluate):
    """Up to max_val_batches full batches, no symmetry, history as configured. Returns the printed line."""
    totals, count = {}, 0
    quiet = dataclasses.replace(config, symmetry_type="none")
    for batch in read_batches(files, quiet, config.seed + state.samples + VALIDATION_SEED):
        totals = add_metrics(totals, evaluate(state, batch))
        count += 1
        if count == config.max_val_batches:
            break
    return f"  VAL [{state.samples} samples]: {metrics_text(totals, count)}"


def check_files(folder, files, rows, config):
    """Refuses the run before anything is written: every file must be readable and one must hold a batch."""
    largest = max(check_rows(path, config) for path in files)
    if largest < rows:
        raise DataError(f"{folder}: none of {len(files)} files holds the {rows} rows one batch needs (the largest has {largest}); "
                        "lower option batch_size or join the files")


def train(config):
    """Trains until max_training_samples, from TRAINDIR's checkpoint when there is one. Returns the last State.

    Writes TRAINDIR/checkpoint_jax.pkl and prints the original's log lines. With component_profile it times the parts of a step
    instead, and neither trains nor writes. Raises ValueError without traindir or datadir,
    DataError for bad data and CheckpointError for a checkpoint that does not fit; all before anything is written.
    """
    for name in ("traindir", "datadir"):
        if getattr(config, name) is None:
            raise ValueError(f"option {name} is required to train")
    train_dir, val_dir = os.path.join(config.datadir, "train"), os.path.join(config.datadir, "val")
    train_files, val_files = list_files(train_dir), list_files(val_dir)
    check_files(train_dir, train_files, config.batch_size // (8 if config.symmetry_type == "all" else 1), config)
    check_files(val_dir, val_files, config.batch_size, config)
    checkpoint = os.path.join(config.traindir, FILE_NAME)
    resuming = not config.no_resume and os.path.exists(checkpoint)
    state = load_checkpoint(checkpoint, config) if resuming else init_state(config)
    if resuming:
        print(f"resumed from {checkpoint}: step {state.step}, {state.samples} samples", flush=True)
    if config.optimizer == "muon":
        print(muon_line(config), flush=True)
    if config.component_profile:
        [[batch]] = epoch_chunks(train_files, config, state.step, most=1)
        for line in component_lines(state, batch, config):
            print(line, flush=True)
        return state

    os.makedirs(config.traindir, exist_ok=True)
    run_step, evaluate = make_train_step(config), make_eval_step(config)
    flops, samples_from = training_flops(config), state.samples
    save_mark, val_mark = (state.samples + every for every in (config.save_every_samples, config.val_every_samples))
    saved_at = validated_at = None
    times = StepTimes() if config.log_step_time else None
    if times:
        run_step = times.timed_step(run_step)
    totals, window_steps, window_start, warned = {}, 0, time.perf_counter(), config.allow_nonfull_mask
    while state.samples < config.max_training_samples:
        left = -(-(config.max_training_samples - state.samples) // config.batch_size)
        chunks = epoch_chunks(train_files, config, state.step, left)
        for chunk in times.timed_chunks(chunks) if times else chunks:
            if not warned and any(batch["binaryInputNCHW"][:, 0].min() < 1.0 for batch in chunk):
                # The model has no mask: it treats points off a smaller board like points on it.
                print("warning: rows with boards smaller than pos_len; --allow-nonfull-mask silences this", file=sys.stderr)
                warned = True
            state, metrics = run_step(state, chunk)
            now = time.perf_counter()
            totals = add_metrics(totals, metrics)
            window_steps += len(chunk)
            if window_steps >= config.print_every:
                seconds = max(now - window_start, 1e-9)
                print(log_line(state, config, metrics["lr"], totals, window_steps, seconds, flops), flush=True)
                if times:
                    print(times.take_line(state.step, window_steps), flush=True)
                totals, window_steps, window_start = {}, 0, time.perf_counter()
            if config.val_every_samples and state.samples >= val_mark:
                print(validate(state, val_files, config, evaluate), flush=True)
                val_mark, validated_at = _next_mark(val_mark, config.val_every_samples, state.samples), state.samples
            if config.save_every_samples and state.samples >= save_mark:
                save_checkpoint(checkpoint, state, config)
                save_mark, saved_at = _next_mark(save_mark, config.save_every_samples, state.samples), state.samples
    if state.samples > samples_from and validated_at != state.samples:
        print(validate(state, val_files, config, evaluate), flush=True)
    if not config.no_final_save and saved_at != state.samples and (state.samples > samples_from or not resuming):
        save_checkpoint(checkpoint, state, config)
    return state


def _next_mark(mark, every, samples):
    """The first mark beyond `samples`; a chunk of K steps may pass several."""
    return mark + every * ((samples - mark) // every + 1)


def log_line(state, config, lr, totals, steps, seconds, flops):
    rate = steps * config.batch_size / seconds
    tflops = rate * flops / 1e12
    mfu = 100.0 * tflops / config.xla_peak_tflops if config.xla_peak_tflops > 0.0 else 0.0
    norm = f"{float(totals['grad_norm']) / steps:.3f}" if config.uses_norm else "off"
    return (f"step={state.step}, samples={state.samples}, time={seconds:.1f}s, lr={lr:.2e}, wd={config.wd:.4f}, "
            f"{metrics_text(totals, steps)}, "
            f"grad_norm={norm}, sps={rate:.1f}, TFLOPS={tflops:.2f}, MFU={mfu:.2f}%")


class StepTimes:
    """Seconds of the window's steps by what the loop waited for; measuring has a price, no work overlaps any more.

    data: the batch stream, reading and augmenting; host_submit: batches onto the devices, and the call itself; train_wait: from
    there until every output is ready. The specification names no format for the original's STEP_TIME lines: this one is ours.
    """

    def __init__(self):
        self.data = self.host_submit = self.train_wait = 0.0

    def timed_chunks(self, chunks):
        while True:
            started = time.perf_counter()
            chunk = next(chunks, None)
            self.data += time.perf_counter() - started
            if chunk is None:
                return
            yield chunk

    def timed_step(self, run_step):
        def timed(state, batches):
            started = time.perf_counter()

            def submitted(outputs):
                under_way = time.perf_counter()
                jax.block_until_ready(outputs)
                self.host_submit += under_way - started
                self.train_wait += time.perf_counter() - under_way

            return run_step(state, batches, submitted=submitted)

        return timed

    def take_line(self, step, steps):
        """The means over the window's steps, as the line that follows its log line; the next window starts from nothing."""
        data, host_submit, train_wait = (seconds / steps for seconds in (self.data, self.host_submit, self.train_wait))
        self.data = self.host_submit = self.train_wait = 0.0
        return (f"STEP_TIME: step={step}, steps={steps}, data={data:.4f}s, host_submit={host_submit:.4f}s, "
                f"train_wait={train_wait:.4f}s, total={data + host_submit + train_wait:.4f}s")


def main(argv=None):
    """The command line. Returns 0, or 2 with one line on stderr: a bad option, bad data, a checkpoint that does not fit."""
    try:
        config = parse_args(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        train(config)
    except (DataError, CheckpointError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
