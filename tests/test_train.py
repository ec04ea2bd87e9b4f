"""The host loop: chunks, log lines, validation, saving, resuming; and every way in which a run is refused."""

import importlib
import os
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kgo_shard import checkpoint, journal
from kgo_shard.batches import find_files
from kgo_shard.config import Config, ConfigError
from kgo_shard.journal import LOG, METRICS, Window, validation_line, window_line
from kgo_shard.npz import DataError
from kgo_shard.resume import Marks
from kgo_shard.state import TrainState, init_state
from kgo_shard.train import main, train, training_chunks, validate

train_module = importlib.import_module("kgo_shard.train")  # the package's name `train` is the function

# The same program as test_step.py's, so that the compilation cache serves both.
OPTIONS = dict(
    checkpoint_format="legacy",  # the own format: test_continuation.py and test_store.py
    pos_len=9,
    batch_size=16,
    model_kind="b2c32",
    compute_dtype="float32",
    enable_history_matrices=True,
    lr=1e-3,
    warmup_samples=4 * 16,
    max_training_samples=3 * 16,
    ema_decay=0.9,
    grad_clip_norm=1.0,
    max_val_batches=2,
    print_every=2,
    donate_train_buffers=True,
    data_parallel=True,
    data_parallel_devices=8,
)
NUMBER = r"-?\d+\.\d{4}"
TERMS = rf"p0loss={NUMBER}, vloss={NUMBER}, oloss={NUMBER}, skloss={NUMBER}, pacc1={NUMBER}"
LOG_LINE = re.compile(
    rf"step=(?P<step>\d+), samples=(?P<samples>\d+), time=\d+\.\ds, lr=(?P<lr>\d\.\d\de[+-]\d\d), wd=(?P<wd>\d\.\d{{4}}), "
    rf"loss=(?P<loss>{NUMBER}), {TERMS}, grad_norm=(?P<grad_norm>\d+\.\d{{3}}|off), "
    r"sps=\d+\.\d, TFLOPS=\d+\.\d\d, MFU=\d+\.\d\d%"
)
VAL_LINE = re.compile(rf"  VAL \[(?P<samples>\d+) samples\]: loss=(?P<loss>{NUMBER}), {TERMS}")


def words_of(**options) -> list[str]:
    """The command line of these options."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag.replace("--", "--no-", 1)] if value is False else [flag, str(value)]
    return words


@pytest.fixture(scope="module")
def real_run(rows9, tmp_path_factory):
    """Three steps from a fresh start, then two more after a resume, through the command line."""
    traindir = tmp_path_factory.mktemp("run") / "new" / "traindir"
    runs = []
    for samples in (48, 80):
        with pytest.MonkeyPatch.context() as patch:
            lines = []
            patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
            code = main(words_of(**OPTIONS | {"traindir": traindir, "datadir": rows9, "max_training_samples": samples}))
        runs.append((code, lines, checkpoint.read_pickle(traindir / checkpoint.FILE_NAME)))
    return runs, traindir


def test_a_run_logs_validates_and_saves_as_the_original(real_run):
    (code, lines, content), _ = real_run[0]
    assert code == 0 and len(lines) == 2
    log, val = LOG_LINE.fullmatch(lines[0]), VAL_LINE.fullmatch(lines[1])
    # One line every two steps; the third step's window is not full.
    assert log and (log["step"], log["samples"], log["lr"], log["wd"]) == ("2", "32", "5.00e-04", "0.1000")
    assert 20 < float(log["loss"]) < 100 and float(log["grad_norm"]) > 1
    assert val and val["samples"] == "48"
    assert (content["meta"]["step"], content["meta"]["samples"]) == (3, 48)
    assert set(os.listdir(real_run[1])) == {checkpoint.FILE_NAME, "lock", LOG, METRICS}


def test_a_resumed_run_goes_on_where_it_was(real_run):
    (code, lines, content), traindir = real_run[0][1], real_run[1]
    assert code == 0 and lines[0] == f"resumed from {traindir / checkpoint.FILE_NAME}: step 3, 48 samples"
    log, val = LOG_LINE.fullmatch(lines[1]), VAL_LINE.fullmatch(lines[2])
    assert log and (log["step"], log["samples"], log["lr"]) == ("5", "80", "1.00e-03") and val and val["samples"] == "80"
    assert (content["meta"]["step"], content["meta"]["samples"]) == (5, 80)
    before = real_run[0][0][2]["params"]["conv_spatial"]["w"]
    assert (content["params"]["conv_spatial"]["w"] != before).any()


# The loop, with a step that costs nothing


TERMS_OF_A_STEP = {"loss": 1.0, "p0loss": 2.0, "vloss": 3.0, "oloss": 4.0, "skloss": 5.0, "pacc1": 6.0, "wsum": 2.0}


@pytest.fixture
def recorded(monkeypatch):
    """Replaces the compiled functions: a step only counts, and everything that happens is noted, in order."""
    events = []

    def make_train_step(config):
        def step(state, batches):
            events.append(("step", len(batches), [batch["globalInputNC"][:, 5].copy() for batch in batches]))
            learned = state.learned
            state = TrainState(learned, state.step + len(batches), state.samples + len(batches) * config.batch_size)
            return state, TERMS_OF_A_STEP | {"grad_norm": 7.0, "lr": 0.1}

        return step

    def make_eval_step(config):
        def evaluate(state, batch):
            events.append(("evaluate", state.samples))
            return TERMS_OF_A_STEP

        return evaluate

    def save(self, state, memory):
        events.append(("save", state.samples))
        original(self, state, memory)

    original = train_module.Keeper.save
    monkeypatch.setattr(train_module, "make_train_step", make_train_step)
    monkeypatch.setattr(train_module, "make_eval_step", make_eval_step)
    monkeypatch.setattr(train_module.Keeper, "save", save)
    return events


def small_config(traindir, datadir, **options):
    return Config(**OPTIONS | {"traindir": str(traindir), "datadir": str(datadir)} | options)


def names(events):
    return [event[:2] for event in events]


def test_a_run_ends_with_a_validation_and_a_save(recorded, tmp_path, rows9):
    state = train(small_config(tmp_path / "a", rows9, max_training_samples=40), log=lambda line: None)
    assert names(recorded) == [("step", 1), ("step", 1), ("step", 1), ("evaluate", 48), ("evaluate", 48), ("save", 48)]
    assert (state.step, state.samples) == (3, 48)


def test_validation_and_saving_come_when_their_samples_are_done(recorded, tmp_path, rows9):
    options = dict(max_training_samples=6 * 16, val_every_samples=40, save_every_samples=32, max_val_batches=1)
    train(small_config(tmp_path / "a", rows9, **options), log=lambda line: None)
    happened = [event for event in names(recorded) if event[0] != "step"]
    assert happened == [("save", 32), ("evaluate", 48), ("save", 64), ("evaluate", 80), ("evaluate", 96), ("save", 96)]


def test_no_final_save_leaves_nothing(recorded, tmp_path, rows9):
    train(small_config(tmp_path / "a", rows9, no_final_save=True), log=lambda line: None)
    assert "save" not in [event[0] for event in recorded] and set(os.listdir(tmp_path / "a")) == {"lock", LOG, METRICS}


def test_no_resume_starts_afresh(recorded, tmp_path, rows9):
    lines = []
    train(small_config(tmp_path / "a", rows9), log=lines.append)
    assert train(small_config(tmp_path / "a", rows9, max_training_samples=80), log=lines.append).step == 5
    assert sum(line.startswith("resumed from") for line in lines) == 1
    assert train(small_config(tmp_path / "a", rows9, no_resume=True), log=lines.append).step == 3
    assert sum(line.startswith("resumed from") for line in lines) == 1


def test_a_finished_run_is_left_alone(recorded, tmp_path, rows9):
    train(small_config(tmp_path / "a", rows9), log=lambda line: None)
    before = (tmp_path / "a" / checkpoint.FILE_NAME).read_bytes()
    recorded.clear()
    state = train(small_config(tmp_path / "a", rows9), log=lambda line: None)
    assert recorded == [] and state.step == 3 and (tmp_path / "a" / checkpoint.FILE_NAME).read_bytes() == before


def test_log_lines_come_every_so_many_steps_also_when_calls_take_several(recorded, tmp_path, rows9):
    lines = []
    train(small_config(tmp_path / "a", rows9, max_training_samples=11 * 16, steps_per_jit=2, print_every=3), log=lines.append)
    assert [event[1] for event in recorded if event[0] == "step"] == [2, 2, 2, 2, 2, 1]
    assert [LOG_LINE.fullmatch(line)["step"] for line in lines if line.startswith("step=")] == ["4", "8", "11"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the run moves: a batch takes 0.5 s to read, a call 4 s to submit and 8 s to finish."""
    now = [1000.0]

    def pass_time(seconds):
        now[0] += seconds

    def make_train_step(config):
        def step(state, batches, submitted=None):
            pass_time(4)
            if submitted is not None:
                submitted("outputs")
            state = TrainState(state.learned, state.step + len(batches), state.samples + len(batches) * config.batch_size)
            return state, TERMS_OF_A_STEP | {"grad_norm": 7.0, "lr": 0.1}

        return step

    def read_packed_batches(*arguments, **keywords):
        for batch in original(*arguments, **keywords):
            pass_time(0.5)
            yield batch

    def block_until_ready(outputs):
        assert outputs == "outputs"
        pass_time(8)

    original = train_module.read_packed_batches
    monkeypatch.setattr(journal, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train_module, "make_train_step", make_train_step)
    monkeypatch.setattr(train_module, "make_eval_step", lambda config: lambda state, batch: pass_time(100) or TERMS_OF_A_STEP)
    monkeypatch.setattr(train_module, "read_packed_batches", read_packed_batches)
    monkeypatch.setattr(journal, "jax", SimpleNamespace(block_until_ready=block_until_ready))


def test_step_times_are_means_over_the_windows_steps_also_with_a_short_last_call(clock, tmp_path, rows9):
    lines = []
    # Calls of 2, 2, 2, 2 and 1 steps; a validation after the second one counts nowhere.
    options = dict(max_training_samples=9 * 16, steps_per_jit=2, val_every_samples=4 * 16, no_final_save=True)
    train(small_config(tmp_path / "a", rows9, log_step_time=True, **options | {"print_every": 3}), log=lines.append)
    assert [line for line in lines if line.startswith("STEP_TIME")] == [
        "STEP_TIME: step=4, steps=4, data=0.5000s, host_submit=2.0000s, train_wait=4.0000s, total=6.5000s",
        "STEP_TIME: step=8, steps=4, data=0.5000s, host_submit=2.0000s, train_wait=4.0000s, total=6.5000s",
    ]
    # Each follows the log line of its window.
    assert [line.split(",")[0].split(":")[0] for line in lines] == [
        "step=4", "STEP_TIME", "  VAL [64 samples]", "step=8", "STEP_TIME", "  VAL [128 samples]", "  VAL [144 samples]",
    ]  # fmt: skip
    lines.clear()
    train(small_config(tmp_path / "a", rows9, log_step_time=True, **options | {"print_every": 1}), log=lines.append)
    assert lines[-2] == "STEP_TIME: step=9, steps=1, data=0.5000s, host_submit=4.0000s, train_wait=8.0000s, total=12.5000s"


def test_without_the_option_nothing_is_measured_or_waited_for(clock, tmp_path, rows9, monkeypatch):
    def refuse(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(train_module, "StepTimes", refuse)
    monkeypatch.setattr(journal.jax, "block_until_ready", refuse)
    lines = []
    train(small_config(tmp_path / "a", rows9, print_every=1, no_final_save=True), log=lines.append)
    assert [line[:5] for line in lines] == ["step="] * 3 + ["  VAL"]
    assert "time=4.5s" in lines[1]  # 0.5 to read and 4 to submit: no wait


def test_a_real_steps_times_are_those_of_its_outputs(real_run, rows9, tmp_path):
    """The real step calls the hook with every output, before it returns; the batch's program is the one of real_run."""
    config = small_config(tmp_path, rows9)
    seen = []
    batch = next(train_module.read_packed_batches(find_files(rows9 / "train"), config, 1))
    state, metrics = train_module.make_train_step(config)(init_state(config), [batch], submitted=seen.append)
    ((learned, totals),) = seen
    assert learned is state.learned and float(totals.norm) == metrics["grad_norm"] and float(totals.terms[0]) == metrics["loss"]


def test_rows_of_smaller_boards_are_refused_or_said_once(recorded, tmp_path, rows9, capsys):
    with np.load(rows9 / "train" / "data0.npz") as file:
        rows = {key: file[key][:48] for key in file.files}
    packed = rows["binaryInputNCHWPacked"]
    packed[20:, 0, 0] &= 0x7F  # from the second batch on, the first point is off the board
    for part in ("train", "val"):
        (tmp_path / "data" / part).mkdir(parents=True)
        np.savez(tmp_path / "data" / part / "rows.npz", **rows)
    with pytest.raises(DataError, match=r"val/rows.npz: key binaryInputNCHWPacked row 20 has a board smaller .*\(28 such rows\): give --allow-nonfull-mask"):
        train(small_config(tmp_path / "a", tmp_path / "data"), log=lambda line: None)
    assert recorded == [] and not (tmp_path / "a").exists()
    options = {"allow_nonfull_mask": True, "checkpoint_format": "orbax", "max_training_samples": 32}
    train(small_config(tmp_path / "b", tmp_path / "data", **options), log=lambda line: None)
    train(small_config(tmp_path / "b", tmp_path / "data", **options | {"max_training_samples": 64}, allow_changes="max_training_samples"), log=lambda line: None)
    assert capsys.readouterr().err.count("boards smaller than pos_len") == 1, "also where a run goes on"
    train(small_config(tmp_path / "c", rows9, allow_nonfull_mask=True), log=lambda line: None)
    assert capsys.readouterr().err == ""


# Chunks


class Counter:
    """What training_chunks asks of a state."""

    def __init__(self, step=0, samples=0):
        self.step, self.samples = step, samples


def chunk_stamps(files, config, start=0):
    """The chunks of a run as lists of (steps taken before, first values of the rows)."""
    state = Counter(start, start * config.batch_size)
    found = []
    for chunk in training_chunks(files, config, lambda: state):
        found.append([batch["globalInputNC"][:, 5:].tobytes() for batch in chunk])
        state.step += len(chunk)
        state.samples += len(chunk) * config.batch_size
    return found


@pytest.fixture(scope="module")
def files9(rows9):
    return find_files(rows9 / "train")


def test_a_call_takes_so_many_steps_and_the_last_ones_what_is_left(files9):
    config = Config(pos_len=9, batch_size=16, steps_per_jit=5, max_training_samples=30 * 16 - 7)
    # An epoch is 2 files of 12 batches: 5, 5, 5, 5, 4; then 6 steps are left, rounded up.
    assert [len(chunk) for chunk in chunk_stamps(files9, config)] == [5, 5, 5, 5, 4, 5, 1]


def test_every_epoch_has_the_order_of_the_step_at_which_it_starts(files9):
    config = Config(pos_len=9, batch_size=16, max_training_samples=50 * 16, seed=1)
    stamps = [stamp for chunk in chunk_stamps(files9, config) for stamp in chunk]
    expected = []
    for start in (0, 24, 48):
        order = sorted(files9)
        np.random.default_rng(1 + start).shuffle(order)
        for path in order:
            with np.load(path) as file:
                expected += [file["globalInputNC"][i : i + 16, 5:].tobytes() for i in range(0, 192, 16)]
    assert stamps == expected[:50]
    # Steps per call do not change the rows.
    assert stamps == [stamp for chunk in chunk_stamps(files9, config.replace(steps_per_jit=7)) for stamp in chunk]


def test_a_resumed_run_restarts_the_epoch_with_the_seed_of_its_step(files9):
    # The original does this: an interrupted run sees other batches than one that was not. Kept, and said.
    config = Config(pos_len=9, batch_size=16, max_training_samples=6 * 16, seed=1)
    whole = [stamp for chunk in chunk_stamps(files9, config) for stamp in chunk]
    resumed = [stamp for chunk in chunk_stamps(files9, config, start=3) for stamp in chunk]
    assert len(resumed) == 3 and resumed == [stamp for chunk in chunk_stamps(files9, config.replace(seed=4)) for stamp in chunk][:3]
    assert resumed != whole[3:]


# Marks, windows, figures


def test_marks_are_reached_once_each_and_at_the_end():
    marks = Marks(40, 40)
    assert [samples for samples in range(16, 200, 16) if marks.reached(samples, False)] == [48, 80, 128, 160]
    marks = Marks(40, 140)  # counted from where a run resumes
    assert [samples for samples in range(116, 250, 16) if marks.reached(samples, False)] == [148, 180, 228]
    several = Marks(10, 10)
    assert several.reached(64, False) and not several.reached(69, False) and several.reached(70, False)
    never = Marks(0, 0)
    assert not never.reached(10**9, False) and never.reached(1, True)


def test_a_windows_figures_are_means_over_its_steps_and_over_weight():
    window = Window(10)
    metrics = {"loss": 30.0, "p0loss": 1.0, "vloss": 2.0, "oloss": 3.0, "skloss": 4.0, "pacc1": 5.0, "wsum": 16.0, "grad_norm": 8.0}
    window.add(metrics | {"lr": 1e-4})
    window.add({name: 3 * value for name, value in metrics.items()} | {"lr": 2e-4, "wsum": 48.0})
    config = Config(pos_len=9, batch_size=16, wd=0.25, log_grad_norm=True)
    state = SimpleNamespace(step=14, samples=224)  # 4 steps, in two calls of two
    line = window_line(state, window.figures(state, config))
    assert LOG_LINE.fullmatch(line), line
    # loss 120 / 4 steps; p0loss 4 / 64 weights; norm 32 / 4.
    assert "lr=2.00e-04, wd=0.2500, loss=30.0000, p0loss=0.0625, vloss=0.1250, oloss=0.1875, skloss=0.2500, pacc1=0.3125, grad_norm=8.000" in line
    assert "grad_norm=off" in window_line(state, window.figures(state, config.replace(log_grad_norm=False)))
    assert window_line(state, window.figures(state, config.replace(xla_peak_tflops=0.0))).endswith("MFU=0.00%")


def test_window_sums_are_float32():
    window = Window(0)
    metrics = dict.fromkeys("loss p0loss vloss oloss skloss pacc1 wsum grad_norm lr".split(), 1.0)
    window.add(metrics | {"p0loss": 2.0**24})
    window.add(metrics)
    assert window.sums["p0loss"] == 2.0**24 and window.sums["p0loss"].dtype == np.float32


def test_means_over_steps_are_divided_as_doubles():
    total = np.float32(6144.0225)  # a third of it: 2048.00749 as a double, 2048.00757 as a float32
    window = Window(0)
    window.add(dict.fromkeys("loss p0loss vloss oloss skloss pacc1 wsum grad_norm lr".split(), total))
    state = SimpleNamespace(step=3, samples=48)
    line = window_line(state, window.figures(state, Config(pos_len=9, log_grad_norm=True)))
    assert "loss=2048.0075, " in line and "grad_norm=2048.007, " in line


def test_rows_of_no_weight_show_nan_without_a_warning():
    window = Window(0)
    window.add(dict.fromkeys("loss p0loss vloss oloss skloss pacc1 wsum grad_norm lr".split(), 0.0))
    state = SimpleNamespace(step=1, samples=16)
    assert "loss=0.0000, p0loss=nan, vloss=nan" in window_line(state, window.figures(state, Config(pos_len=9)))


def test_validation_figures_are_means_over_batches_and_over_weight(rows9):
    values = iter([(10.0, 16.0), (20.0, 8.0)])

    def evaluate(state, batch):
        value, weight = next(values)
        return dict.fromkeys("loss p0loss vloss oloss skloss pacc1".split(), value) | {"wsum": weight}

    config = Config(pos_len=9, batch_size=16, max_val_batches=2)
    state = SimpleNamespace(samples=192)
    assert validation_line(state, validate(evaluate, state, find_files(rows9 / "val"), config)) == "  VAL [192 samples]: loss=15.0000, p0loss=1.2500, vloss=1.2500, oloss=1.2500, skloss=1.2500, pacc1=1.2500"


# Refusals: one line that names the thing, exit code 2, nothing written


@pytest.fixture
def data(tmp_path, rows9):
    """A data folder of its own, small: 20 rows to train on, 16 to validate on."""
    for part in ("train", "val"):
        (tmp_path / "data" / part).mkdir(parents=True)
        with np.load(rows9 / part / "data0.npz") as file:
            np.savez(tmp_path / "data" / part / "rows.npz", **{key: file[key][: 20 if part == "train" else 16] for key in file.files})
    return tmp_path / "data"


def rewrite(path, **changes):
    with np.load(path) as file:
        rows = {key: file[key] for key in file.files} | changes
    np.savez(path, **{key: value for key, value in rows.items() if value is not None})


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def bad_value(path):
    with np.load(path) as file:
        targets = file["globalTargetsNC"].copy()
    targets[7, 3] = np.nan
    rewrite(path, globalTargetsNC=targets)


def refused(capsys, **options) -> str:
    """The one line on stderr of a run that ends with exit code 2."""
    try:
        code = main(words_of(**OPTIONS | options))
    except SystemExit as end:  # argparse's way
        code = end.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == "" and len(shown.err.splitlines()) == 1 and shown.err.startswith("error: ")
    return shown.err


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut, "damaged"),
        (lambda path: path.write_text("no npz"), "damaged"),
        (lambda path: rewrite(path, scoreDistrN=None), "scoreDistrN is missing"),
        (bad_value, "globalTargetsNC row 7 is not finite"),
        (lambda path: path.unlink(), "holds no npz files"),
    ],
)
def test_bad_data_is_refused_before_anything_is_written(data, tmp_path, capsys, recorded, part, damage, named):
    damage(data / part / "rows.npz")
    line = refused(capsys, traindir=tmp_path / "run", datadir=data)
    assert named in line and str(data / part) in line
    left = os.listdir(tmp_path / "run") if (tmp_path / "run").exists() else []
    # A training row is read when training comes to its file.
    assert set(left) <= ({"lock", LOG, METRICS} if (part, damage) == ("train", bad_value) else set()) and recorded == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pos_len": 19}, "--pos-len"),
        ({"batch_size": 24}, "no file holds the 24 rows"),
        ({"batch_size": 12}, "batch_size 12 does not divide by the 8 devices"),
        ({"batch_size": 32, "data_parallel_devices": 32}, "no file holds the 32 rows"),
        ({"data_parallel_devices": 16, "batch_size": 17}, "batch_size 17"),
        ({"batchsize": 16}, "--batchsize"),
        ({"model_kind": "b1c1"}, "model_kind = 'b1c1'"),
        ({"lr": "nan"}, "lr = nan"),
        ({"lr": "fast"}, "--lr"),
        ({"optimizer": "lion"}, "optimizer = 'lion'"),
        ({"int8_train": True}, "int8_train = True: INT8 products need"),
        ({"symmetry_type": "all", "batch_size": 20, "data_parallel_devices": 4}, "symmetry_type 'all'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(data, tmp_path, capsys, recorded, options, named):
    line = refused(capsys, traindir=tmp_path / "run", datadir=data, **options)
    assert named in line
    left = os.listdir(tmp_path / "run") if (tmp_path / "run").exists() else []
    assert left in ([], ["lock"]) and recorded == []


def test_more_devices_than_there_are_are_refused(rows9, tmp_path, capsys, recorded):
    assert "this process has 16" in refused(capsys, traindir=tmp_path / "run", datadir=rows9, batch_size=32, data_parallel_devices=32)
    left = os.listdir(tmp_path / "run") if (tmp_path / "run").exists() else []
    assert left in ([], ["lock"]) and recorded == []


@pytest.mark.parametrize("missing", ["traindir", "datadir"])
def test_both_folders_have_to_be_named(tmp_path, capsys, missing):
    folders = {"traindir": tmp_path / "run", "datadir": tmp_path} | {missing: None}
    words = words_of(**OPTIONS | {name: value for name, value in folders.items() if value})
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {missing} is missing: give --{missing} DIR\n"


def test_a_missing_folder_is_named(data, tmp_path, capsys):
    assert "nowhere" in refused(capsys, traindir=tmp_path / "run", datadir=tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_says_what_is_left(data, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(main.__globals__, "train", interrupted)
    assert main(words_of(**OPTIONS, traindir=tmp_path / "run", datadir=data)) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_a_traindir_that_is_a_file_is_refused_before_training(data, tmp_path, capsys, recorded):
    (tmp_path / "run").write_text("mine")
    assert "nothing can be written there" in refused(capsys, traindir=tmp_path / "run", datadir=data)
    assert (tmp_path / "run").read_text() == "mine" and recorded == []


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / checkpoint.FILE_NAME
    config = Config(**OPTIONS)
    checkpoint.save_checkpoint(path, init_state(config), config)
    return path.read_bytes()


class RunsCode:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize(
    ("case", "options", "named"),
    [
        ("truncated", {}, "truncated or damaged"),
        ("evil", {}, "posix.mkdir"),
        ("whole", {"model_kind": "b3c96"}, "model_config"),
        ("optimizer", {}, "optimizer sgd, but the options say adamw"),
        ("leaf", {}, "leaf conv_spatial/w is missing"),
    ],
)
def test_a_bad_checkpoint_is_refused_and_left_as_it_is(data, tmp_path, capsys, recorded, whole_checkpoint, case, options, named):
    content = whole_checkpoint
    if case == "truncated":
        content = content[: len(content) // 2]
    elif case == "evil":
        content = pickle.dumps(RunsCode(tmp_path / "marker"))
    elif case in ("optimizer", "leaf"):
        changed = pickle.loads(content)
        changed["meta"]["optimizer"] = "sgd" if case == "optimizer" else "adamw"
        if case == "leaf":
            del changed["params"]["conv_spatial"]
        content = pickle.dumps(changed)
    run = tmp_path / "run"
    run.mkdir()
    (run / checkpoint.FILE_NAME).write_bytes(content)
    line = refused(capsys, traindir=run, datadir=data, **options)
    assert named in line and str(run) in line
    assert set(os.listdir(run)) == {checkpoint.FILE_NAME, "lock"} and (run / checkpoint.FILE_NAME).read_bytes() == content
    assert not (tmp_path / "marker").exists() and recorded == []


def test_train_itself_raises_what_main_reports(data, tmp_path):
    with pytest.raises(ConfigError, match="traindir is missing"):
        train(Config(**OPTIONS))
    cut(data / "train" / "rows.npz")
    with pytest.raises(DataError, match="damaged"):
        train(small_config(tmp_path / "run", data))


def test_help_ends_well(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and "--traindir" in capsys.readouterr().out
