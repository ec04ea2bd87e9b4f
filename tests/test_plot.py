"""`kgo-shard plot`: what is read from a run, what is drawn of it, and what is refused."""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest

from kgo_shard import __main__ as command
from kgo_shard import plot as plotting
from kgo_shard.config import Config
from kgo_shard.journal import Window, validation_line, window_line
from kgo_shard.loss import Terms
from kgo_shard.plot import FIGURES, PANELS, PlotError, draw, plot, read_run, run_colors, tell_apart
from kgo_shard.train import validate

BATCH = 16
NO_MARKER = ("", "None", "none", None)
PNG = b"\x89PNG\r\n\x1a\n"


def train_entry(step, **changes):
    """A training line of a journal; every figure is another one, and none is like that of another step."""
    figures = {name: float(f"{step}.{index:02}") for index, name in enumerate(dict.fromkeys((*Terms._fields, *FIGURES)))}
    return {"kind": "train", "step": step, "samples": step * BATCH, "steps": 20, "seconds": 8.1, "wd": 0.1, "skipped": 0} | figures | changes


def validation_entry(step, **changes):
    return {"kind": "validation", "step": step, "samples": step * BATCH} | {name: step + 0.5 for name in Terms._fields} | changes


def write_journal(folder, *entries, torn=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + torn)
    return folder


def refusal(*paths, out=None) -> str:
    with pytest.raises(PlotError) as error:
        plot(paths, out)
    assert "\n" not in str(error.value)
    return str(error.value)


def by_title(figure):
    return dict(zip(FIGURES, figure.axes))


def lines_of(axes):
    """(training lines, validation markers) of a panel."""
    training = [line for line in axes.lines if line.get_linestyle() != "None"]
    return training, [line for line in axes.lines if line.get_linestyle() == "None"]


# Reading a journal


def test_a_journals_figures_are_read_under_their_names(tmp_path):
    entries = [train_entry(20), train_entry(40), validation_entry(40)]
    run = read_run(write_journal(tmp_path / "run", *entries))
    assert run.name == "run"
    for name in FIGURES:
        samples, values = run.curve("train", name)
        np.testing.assert_array_equal(samples, [320, 640])
        np.testing.assert_array_equal(values, [entries[0][name], entries[1][name]])
    assert [len(values) for values in run.curve("validation", "p0loss")] == [1, 1]
    assert np.isnan(run.curve("validation", "lr")[1]).all(), "a validation has no learning rate"


def test_null_and_what_is_not_finite_are_gaps(tmp_path):
    run = read_run(write_journal(tmp_path, train_entry(20, loss=None, grad_norm=None), train_entry(40, loss=math.inf), train_entry(60)))
    assert np.isnan(run.curve("train", "loss")[1]).tolist() == [True, True, False]
    assert np.isnan(run.curve("train", "grad_norm")[1]).tolist() == [True, False, False]


def test_a_torn_last_line_is_not_read(tmp_path):
    whole = json.dumps(train_entry(40))
    for length in range(0, len(whole), 7):
        run = read_run(write_journal(tmp_path, train_entry(20), torn=whole[:length]))
        assert len(run.records["train"]) == 1
    assert len(read_run(write_journal(tmp_path, train_entry(20), torn=whole)).records["train"]) == 2, "only its end is missing"


BROKEN = ("{", "{}", "[1]", "\x00", '{"kind": "train"}', "[" * 100_000)
NO_FIGURES = ('{"kind": "train", "samples": %s}' % samples for samples in ("-1", "1.5", "true", '1, "loss": "low"'))


@pytest.mark.parametrize("damage", [pytest.param(line, id=str(number)) for number, line in enumerate((*BROKEN, *NO_FIGURES))])
def test_a_broken_line_is_named_by_file_and_number(tmp_path, damage):
    write_journal(tmp_path, train_entry(20))
    path = tmp_path / "metrics.jsonl"
    for after in ("\n", "\n" + json.dumps(train_entry(40)) + "\n"):
        path.write_text(json.dumps(train_entry(20)) + "\n" + damage + after)
        message = refusal(tmp_path)
        assert message.startswith(f"{path}: line 2 is broken") and "take it out" in message


def test_lines_of_other_kinds_and_empty_ones_are_passed_over(tmp_path):
    run = read_run(write_journal(tmp_path, {"kind": "resumed", "step": 20}, train_entry(40), torn="\n\n"))
    assert len(run.records["train"]) == 1


# Reading a printed log


def printed_log(step, norm=True, **sums) -> str:
    """The line that the trainer itself prints, of a window of 10 steps."""
    config = Config(pos_len=9, batch_size=BATCH, model_kind="b2c32", log_grad_norm=norm)
    window = Window(step - 10)
    window.add({"lr": 1.25e-4, "grad_norm": 30.0, "loss": 500.0, "wsum": 4.0} | {name: 4.0 for name in Terms._fields[1:-1]} | sums)

    state = SimpleNamespace(step=step, samples=step * BATCH)
    return window_line(state, window.figures(state, config))


def test_the_trainers_own_log_lines_are_read(tmp_path):
    path = tmp_path / "train_jax.log"
    path.write_text(f"warming up\n{printed_log(10, p0loss=10.0)}\nSTEP_TIME: step=10, steps=4, data=0.0012s\n{printed_log(20, norm=False)}\n")
    run = read_run(tmp_path)
    read = {name: run.curve("train", name)[1].tolist() for name in FIGURES}
    np.testing.assert_array_equal(run.curve("train", "loss")[0], [160, 320])
    assert read["loss"] == [50, 50] and read["p0loss"] == [2.5, 1] and read["lr"] == [1.25e-4] * 2
    assert read["grad_norm"][0] == 3 and math.isnan(read["grad_norm"][1])
    assert all(rate > 0 for rate in read["sps"]) and run.name == tmp_path.name


def test_the_trainers_own_validation_line_is_read(tmp_path, rows9):
    config = Config(pos_len=9, batch_size=32, model_kind="b2c32", max_val_batches=1)
    sums = {name: np.float32(index) for index, name in enumerate(Terms._fields, start=1)}
    state = SimpleNamespace(samples=320)
    figures = validate(lambda state, batch: sums, state, [rows9 / "val" / "data0.npz"], config)
    path = tmp_path / "anything.txt"
    path.write_text(validation_line(state, figures))
    run = read_run(path)
    assert run.name == "anything.txt" and not run.records["train"]
    samples, losses = run.curve("validation", "loss")
    assert samples.tolist() == [320] and losses.tolist() == [1]
    assert run.curve("validation", "pacc1")[1].tolist() == [round(float(sums["pacc1"] / sums["wsum"]), 4)]


def test_numbers_that_are_none_in_a_printed_log_are_gaps(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(printed_log(10, loss=math.nan, wsum=0.0) + "\n")
    run = read_run(path)
    assert len(run.records["train"]) == 1
    assert np.isnan([run.curve("train", name)[1][0] for name in ("loss", "p0loss", "pacc1")]).all() and run.curve("train", "lr")[1][0] > 0


def test_half_a_log_line_is_never_read_as_a_whole_one(tmp_path):
    path = tmp_path / "run.log"
    line, check = printed_log(20), "  VAL [320 samples]: loss=50.5000, p0loss=4.0000, vloss=1.0000, oloss=1.0000, skloss=0.1000, pacc1=0.1000"
    for whole in (line, check):
        for length in range(0, len(whole), 3):
            path.write_text(f"{printed_log(10)}\n{whole[:length]}")
            assert [len(kept) for kept in read_run(path).records.values()] == [1, 0], whole[:length]
    path.write_text(f"{printed_log(10)}\n{line[:100]}{line}\n{check}\n")  # written on by the next process
    assert [len(kept) for kept in read_run(path).records.values()] == [2, 1]


def test_whatever_stands_before_a_log_line_is_passed_over(tmp_path):
    path = tmp_path / "run.log"
    path.write_bytes(b"\xff\xfe broken bytes\r\n[12:00:01] worker 0: " + printed_log(10).encode() + b"\r\n")
    assert len(read_run(path).records["train"]) == 1


def test_the_journal_wins_over_the_printed_log(tmp_path):
    (tmp_path / "train_jax.log").write_text(printed_log(10))
    assert read_run(tmp_path).curve("train", "loss")[1].tolist() == [50]
    write_journal(tmp_path, train_entry(20))
    assert read_run(tmp_path).path.name == "metrics.jsonl"


def test_what_a_resumed_run_trained_again_is_drawn_once(tmp_path):
    first = [train_entry(20), validation_entry(20), train_entry(40), validation_entry(40), train_entry(60), validation_entry(60)]
    again = [train_entry(40, loss=7.0), train_entry(60, loss=6.0), validation_entry(60, loss=5.0)]
    run = read_run(write_journal(tmp_path, *first, *again))
    samples, losses = run.curve("train", "loss")
    assert samples.tolist() == [320, 640, 960] and losses.tolist()[1:] == [7, 6]
    samples, losses = run.curve("validation", "loss")
    assert samples.tolist() == [320, 960] and losses.tolist()[-1] == 5


def test_a_validation_keeps_the_window_before_it(tmp_path):
    run = read_run(write_journal(tmp_path, train_entry(20), validation_entry(20), train_entry(40), validation_entry(40)))
    assert [len(kept) for kept in run.records.values()] == [2, 2]


# Drawing


@pytest.fixture
def make_run(tmp_path):
    def make(name, steps=(20, 40, 60), validations=(40, 60), **changes):
        entries = [train_entry(step, **changes) for step in steps] + [validation_entry(step) for step in validations]
        return read_run(write_journal(tmp_path / name, *entries))

    return make


def test_every_panel_shows_every_runs_windows_as_a_line_and_validations_as_markers(make_run):
    runs = [make_run("one"), make_run("two", steps=(20, 40)), make_run("three", validations=())]
    figure = draw(runs)
    assert len(figure.axes) == len(PANELS) == 9
    for name, axes in by_title(figure).items():
        training, checks = lines_of(axes)
        for run, line in zip(runs, training, strict=True):
            samples, values = run.curve("train", name)
            np.testing.assert_array_equal(line.get_xydata(), np.stack([samples, values], axis=1))
        validated = [] if name in ("lr", "grad_norm", "sps") else runs[:2]
        for run, line in zip(validated, checks, strict=True):
            np.testing.assert_array_equal(line.get_xydata(), np.stack(run.curve("validation", name), axis=1))
            assert line.get_marker() not in NO_MARKER
            assert line.get_color() == training[runs.index(run)].get_color()
        assert len({line.get_color() for line in training}) == len(runs)
        assert axes.get_ylabel().startswith(name if name not in ("lr", "grad_norm", "sps") else axes.get_title(loc="left"))
        assert "(" in axes.get_ylabel(), "a unit"
    assert [axes.get_xlabel() for axes in figure.axes] == [""] * 6 + ["training samples"] * 3
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two", "three", "training windows", "validation"]


@pytest.mark.parametrize("count", [1, 5, 12, 40])
def test_no_two_runs_have_one_colour(count):
    assert len(set(run_colors(count))) == count


def test_runs_of_many_colours_have_dashes_too(make_run):
    run = make_run("one")
    assert {line.get_linestyle() for line in lines_of(draw([run] * 5).axes[0])[0]} == {"-"}
    axes = draw([run] * 12).axes[0]
    dashes = [line.get_linestyle() for line in lines_of(axes)[0]]
    assert len(dashes) == 12 and all(one != other for one, other in zip(dashes, dashes[1:]))


def test_a_figure_that_no_run_logs_leaves_a_panel_that_says_so(make_run):
    panels = by_title(draw([make_run("one", grad_norm=None)]))
    assert not panels["grad_norm"].lines and "not logged" in [text.get_text() for text in panels["grad_norm"].texts]
    assert not panels["loss"].texts and panels["loss"].lines
    assert len(lines_of(by_title(draw([make_run("one", grad_norm=None), make_run("two")]))["grad_norm"])[0]) == 1


def test_a_single_window_can_be_seen(make_run):
    (line,), _ = lines_of(draw([make_run("one", steps=(20,))]).axes[0])
    assert line.get_marker() not in NO_MARKER
    (line,), _ = lines_of(draw([make_run("one")]).axes[0])
    assert line.get_marker() in NO_MARKER


def test_an_axis_is_logarithmic_only_where_curves_lie_far_apart(make_run, tmp_path):
    near = draw([make_run("one", lr=1e-4), make_run("two", lr=2e-4)])
    assert {axes.get_yscale() for axes in near.axes} == {"linear"}
    far = by_title(draw([make_run("one", lr=1e-4, pacc1=0.01, sps=10.0), make_run("two", lr=1e-6, pacc1=0.9, sps=1000.0)]))
    assert {name for name, axes in far.items() if axes.get_yscale() == "log"} == {"lr", "sps"}
    # A learning rate that begins and ends near zero: its peak decides, and its ends do not take the axis.
    entries = [train_entry(step, lr=lr) for step, lr in ((20, 1e-12), (40, 1e-4), (60, 1e-12), (80, 0.0))]
    cosine = read_run(write_journal(tmp_path / "cosine", *entries))
    assert by_title(draw([cosine, make_run("half", lr=5e-5)]))["lr"].get_yscale() == "linear"
    axes = by_title(draw([cosine, make_run("low", lr=1e-6)]))["lr"]
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log" and 1e-9 < low < 1e-6 and high > 1e-4
    zero = by_title(draw([make_run("one", sps=10.0), make_run("two", sps=0.0)]))
    assert zero["sps"].get_yscale() == "linear"


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, monkeypatch):
    runs = [read_run(write_journal(tmp_path / above / "run", train_entry(20))) for above in ("a", "b")]
    runs.append(read_run(write_journal(tmp_path / "c", train_entry(20)) / "metrics.jsonl"))
    tell_apart(runs)
    assert [run.name for run in runs] == ["a/run", "b/run", "c"]
    same = [read_run(tmp_path / "c"), read_run(tmp_path / "c")]
    tell_apart(same)  # no more to tell: it ends
    assert same[0].name == same[1].name
    drawn = []
    monkeypatch.setattr(plotting, "draw", lambda runs: drawn.extend(run.name for run in runs) or draw(runs))
    plot([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "both.png")
    assert drawn == ["a/run", "b/run"]


# The command


def test_one_run_is_drawn_into_its_folder_and_several_here(tmp_path, capsys, monkeypatch):
    one, two = (write_journal(tmp_path / name, train_entry(20), validation_entry(20)) for name in ("one", "two"))
    assert command.main(["plot", str(one)]) == 0
    assert capsys.readouterr().out.split() == [str(one / "plot.png")] and (one / "plot.png").read_bytes().startswith(PNG)
    monkeypatch.chdir(tmp_path)
    assert command.main(["plot", "one", "two/metrics.jsonl"]) == 0
    assert capsys.readouterr().out.split() == ["plot.png"] and (tmp_path / "plot.png").read_bytes().startswith(PNG)
    assert sorted(os.listdir(one)) == ["metrics.jsonl", "plot.png"] and sorted(os.listdir(two)) == ["metrics.jsonl"]


def test_names_that_matplotlib_would_read_as_something_else_are_names(tmp_path):
    names = ["_hidden", "a$b$c", "训练", "x" * 200]
    target = plot([write_journal(tmp_path / name, train_entry(20)) for name in names], tmp_path / "new" / "names.png")
    assert target.read_bytes().startswith(PNG) and os.listdir(tmp_path / "new") == ["names.png"]
    legend = draw([read_run(tmp_path / name) for name in names]).legends[0]
    shown = [text.get_text() for text in legend.get_texts()]
    assert not any(text.get_parse_math() for text in legend.get_texts())
    assert shown[:3] == names[:3] and 20 < len(shown[3]) < 60 and len(legend.get_lines()) == len(shown)


def test_runs_that_cannot_be_read_are_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.txt").write_text("Dear diary\n")
    write_journal(tmp_path / "young")
    write_journal(tmp_path / "torn", torn='{"kind"')
    good = write_journal(tmp_path / "good", train_entry(20))
    out = tmp_path / "picture.png"
    assert f"{tmp_path / 'nowhere'}: no such file or folder" in refusal(good, tmp_path / "nowhere", out=out)
    assert f"{tmp_path / 'empty'}: holds neither metrics.jsonl nor train_jax.log" in refusal(tmp_path / "empty", out=out)
    for name, source in (("other.txt", "other.txt"), ("young", "young/metrics.jsonl"), ("torn", "torn/metrics.jsonl")):
        assert f"{tmp_path / source}: holds no figures" in refusal(good, tmp_path / name, out=out)
    assert not out.exists()


def test_a_picture_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    run = write_journal(tmp_path / "run", train_entry(20))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("mine")
    assert f"--out {tmp_path / 'folder.png'}: is a folder" in refusal(run, out=tmp_path / "folder.png")
    assert "ends in .png" in refusal(run, out=tmp_path / "file")
    assert f"{tmp_path / 'file' / 'a.png'}: cannot be written" in refusal(run, out=tmp_path / "file" / "a.png")

    def full(*_):
        raise OSError(28, "No space left on device")

    old = plot([run], tmp_path / "old.png").read_bytes()
    monkeypatch.setattr(os, "replace", full)
    assert "No space left on device" in refusal(run, out=tmp_path / "old.png")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.png", "old.png", "run"] and (tmp_path / "old.png").read_bytes() == old


def test_a_refusal_is_exit_code_2_and_one_line(tmp_path, capsys):
    assert command.main(["plot", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"error: {tmp_path}: holds neither") and shown.err.count("\n") == 1
