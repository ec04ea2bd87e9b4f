"""What a run tells: the log in its folder, figures for programs, event files, and the line of a run that somebody watches."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import time

import numpy as np
import pytest

from kgo_shard.config import Config, ConfigError
from kgo_shard.journal import EVENTS, LOG, METRICS, Journal, JournalError
from kgo_shard.loss import Terms
from kgo_shard.plot import read_run
from kgo_shard.state import TrainState
from kgo_shard.store import FOLDER, complete
from kgo_shard.train import main, train

from .test_continuation import logged, stopped_run
from .test_store import SMALL, free  # noqa: F401
from .test_train import LOG_LINE, VAL_LINE, words_of

OPTIONS = SMALL | {"print_every": 1}
def run(folder, data, **options) -> list[str]:
    lines = []
    train(Config(**OPTIONS | options, traindir=folder, datadir=data), log=lines.append)
    return lines


@pytest.fixture
def journal(tmp_path):
    with contextlib.closing(Journal(Config(traindir=tmp_path), lambda line: None)) as journal:
        yield journal


STATE = TrainState(None, 3, 48)


def test_the_log_in_the_folder_is_what_was_printed(free, tmp_path, rows9):  # noqa: F811
    lines = run(tmp_path, rows9, val_every_samples=32)
    assert (tmp_path / LOG).read_text().splitlines() == lines
    assert [bool(LOG_LINE.fullmatch(line)) for line in lines] == [not VAL_LINE.fullmatch(line) for line in lines] and len(lines) > 3
    more = run(tmp_path, rows9, val_every_samples=32, max_training_samples=96, allow_changes="max_training_samples")
    assert more[0].startswith("resumed from") and (tmp_path / LOG).read_text().splitlines() == lines + more


def test_the_figures_are_those_of_the_lines_in_full(free, tmp_path, rows9):  # noqa: F811
    lines = run(tmp_path, rows9, log_grad_norm=True)
    found = logged(tmp_path)
    assert [entry["kind"] for entry in found] == ["train" if line.startswith("step=") else "validation" for line in lines]
    for line, entry in zip(lines, found):
        assert f"loss={entry['loss']:.4f}, p0loss={entry['p0loss']:.4f}" in line
    assert [entry["step"] for entry in found if entry["kind"] == "train"] == [1, 2, 3, 4] and found[0]["skipped"] == 0


@pytest.mark.long
def test_a_stopped_and_resumed_run_leaves_the_same_figures_once(tmp_path, rows9):
    """All terms of real steps, bit for bit: SIGTERM in the middle of a window, between two saves."""
    options = {"max_training_samples": 20 * 16, "save_every_samples": 0, "val_every_samples": 5 * 16}
    whole = stopped_run(tmp_path / "whole", rows9, -1, **options)
    stopped_run(tmp_path / "cut", rows9, 9, **options)
    lines = stopped_run(tmp_path / "cut", rows9, -1, **options)
    assert len(whole) > 5 and lines[0].startswith("resumed from")
    assert logged(tmp_path / "whole") == logged(tmp_path / "cut")
    window = next(entry for entry in logged(tmp_path / "whole") if entry["kind"] == "train")
    assert set(window) >= set(Terms._fields) | {"lr", "wd", "grad_norm", "steps", "samples"}


def test_what_came_after_the_last_save_of_a_killed_run_is_told_once(free, tmp_path, rows9, monkeypatch):  # noqa: F811
    """Killed after step 3, saved after step 2."""
    run(tmp_path, rows9, max_training_samples=32, no_final_save=True, save_every_samples=32)
    with open(tmp_path / LOG, "a") as log, open(tmp_path / METRICS, "a") as metrics:
        log.write("step=3, lost\nstep=4, torn")
        metrics.write('{"kind": "train", "step": 3}\n{"kind": "tra')
    run(tmp_path, rows9, max_training_samples=64, allow_changes="max_training_samples")
    assert [entry["step"] for entry in logged(tmp_path) if entry["kind"] == "train"] == [1, 2, 3, 4]
    assert "lost" not in (tmp_path / LOG).read_text() and "torn" not in (tmp_path / LOG).read_text()


def test_a_run_that_begins_with_nothing_keeps_former_logs_under_another_name(free, tmp_path, rows9):  # noqa: F811
    first = run(tmp_path, rows9)
    second = run(tmp_path, rows9, no_resume=True)
    assert (tmp_path / f"{LOG}.before1").read_text().splitlines() == first
    assert (tmp_path / LOG).read_text().splitlines() == second
    run(tmp_path, rows9, no_resume=True)
    assert (tmp_path / f"{METRICS}.before2").exists()


def test_the_log_of_the_original_is_added_to_when_its_run_goes_on_here(free, tmp_path, rows9):  # noqa: F811
    options = {"checkpoint_format": "legacy", "max_training_samples": 32}
    run(tmp_path, rows9, **options)
    before = (tmp_path / LOG).read_text()
    run(tmp_path, rows9, max_training_samples=64)
    assert (tmp_path / LOG).read_text().startswith(before) and (tmp_path / LOG).read_text().count("step=") >= 4


def test_numbers_that_are_none_become_null(journal, tmp_path):
    journal.open(48, None)
    journal.figures("train", STATE, {"loss": float("nan"), "lr": float("inf"), "grad_norm": None, "sps": 2.5})
    [line] = (tmp_path / METRICS).read_text().splitlines()
    assert json.loads(line) == {"kind": "train", "step": 3, "samples": 48, "loss": None, "lr": None, "grad_norm": None, "sps": 2.5}


def test_a_log_that_is_shorter_than_the_checkpoint_remembers_is_added_to(journal, tmp_path):
    (tmp_path / LOG).write_text("short\n")
    (tmp_path / METRICS).write_text('{"cut": 1}\n{"to": 2}\n')
    journal.open(48, {LOG: 1000, METRICS: 11})
    journal.line("more")
    assert (tmp_path / LOG).read_text() == "short\nmore\n" and (tmp_path / METRICS).read_text() == '{"cut": 1}\n'
    assert journal.positions() == {LOG: 11, METRICS: 11}


def test_lines_from_before_the_files_are_open_are_in_them(journal, tmp_path):
    journal.line("resumed")
    assert not (tmp_path / LOG).exists()
    journal.open(48, None)
    journal.line("step")
    assert (tmp_path / LOG).read_text() == "resumed\nstep\n"


def test_a_log_that_cannot_be_written_is_named(journal, tmp_path):
    (tmp_path / LOG).mkdir()
    with pytest.raises(JournalError, match=f"{LOG}: cannot be written"):  # a folder of this name
        journal.open(48, None)


@pytest.mark.parametrize("name", [LOG, METRICS])
def test_a_full_disk_ends_the_run_in_one_line_when_what_it_did_is_saved(free, tmp_path, rows9, capsys, name):  # noqa: F811
    tmp_path.joinpath("run").mkdir()
    (tmp_path / "run" / name).symlink_to("/dev/full")
    assert main(words_of(**OPTIONS | {"save_every_samples": 0}, traindir=tmp_path / "run", datadir=rows9)) == 2
    err = capsys.readouterr().err
    assert f"{name}: cannot be written (No space left on device): make room" in err and err.count("\n") == 1
    assert [path.name for path in complete(tmp_path / "run" / FOLDER)] == ["00000001"]
    (tmp_path / "run" / name).unlink()
    assert main(words_of(**OPTIONS | {"save_every_samples": 0}, traindir=tmp_path / "run", datadir=rows9)) == 0


def test_half_a_line_is_taken_back(journal, tmp_path, monkeypatch):
    journal.open(48, None)
    journal.line("whole")

    class Short:
        """A file on a disk that has room for three bytes."""

        def __init__(self, file):
            self.file = file

        def write(self, content):
            return self.file.write(content[:3])

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setitem(journal.files, LOG, Short(journal.files[LOG]))
    with pytest.raises(JournalError, match="No space left"):
        journal.line("half of this")
    assert (tmp_path / LOG).read_text() == "whole\n" and journal.positions()[LOG] == 6


def test_names_that_are_not_unicode_are_written_as_they_are(journal, tmp_path):
    journal.open(48, None)
    journal.line(os.fsdecode(b"skipped: z\xff.npz"))
    assert (tmp_path / LOG).read_bytes() == b"skipped: z\xff.npz\n"


@pytest.mark.long
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path, rows9):
    """`kgo-shard train ... | head -1`."""
    words = words_of(**OPTIONS | {"max_training_samples": 4 * 16, "save_every_samples": 0}, traindir=tmp_path, datadir=rows9)
    command = [sys.executable, "-m", "kgo_shard", "train", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=300) == 0 and process.stderr.read() == ""
    process.stderr.close()
    assert (tmp_path / LOG).read_text().count("step=") == 4


def test_plot_reads_what_a_run_leaves(free, tmp_path, rows9):  # noqa: F811
    run(tmp_path, rows9)
    read = read_run(tmp_path)
    assert read.path.name == METRICS
    samples, losses = read.curve("train", "loss")
    assert samples.tolist() == [16, 32, 48, 64] and (losses == 1).all()
    assert len(read.curve("validation", "p0loss")[0]) == 1
    (tmp_path / METRICS).unlink()
    np.testing.assert_array_equal(read_run(tmp_path).curve("train", "loss")[1], losses)


def test_event_files_hold_every_figure_and_forget_what_was_not_saved(free, tmp_path, rows9, monkeypatch):  # noqa: F811
    """Also where a run starts again within the second that tensorboardX names a file by."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    run(tmp_path, rows9, tensorboard=True, max_training_samples=32)
    run(tmp_path, rows9, tensorboard=True, max_training_samples=64, allow_changes="max_training_samples")
    values, starts = [], []
    for path in sorted((tmp_path / EVENTS).iterdir()):  # as TensorBoard reads them
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")  # then its checksum, the event, the event's checksum
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            values += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            if event.session_log.status == SessionLog.START:
                starts.append(event.step)
    assert [(step, value) for tag, step, value in values if tag == "train/loss"] == [(16, 1), (32, 1), (48, 1), (64, 1)]
    assert {tag for tag, *_ in values} >= {"train/lr", "train/sps", "validation/p0loss"} and starts == [33]


def test_without_its_package_tensorboard_is_refused_by_name(free, tmp_path, rows9, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'kgo-shard\[tensorboard\]'"):
        run(tmp_path, rows9, tensorboard=True)


@pytest.mark.long
def test_in_a_terminal_the_lines_scroll_above_one_that_shows_how_far_it_is(tmp_path, rows9):
    words = words_of(**SMALL | {"max_training_samples": 640, "print_every": 20, "save_every_samples": 0}, traindir=tmp_path, datadir=rows9)
    main_end, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "kgo_shard", "train", *words]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(main_end, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    assert process.wait() == 0
    os.close(main_end)
    text = shown.decode().replace("\r", "")
    assert "step 40" in text or "step 39" in text
    assert "100%" in text and "loss " in text
    for line in (tmp_path / LOG).read_text().splitlines():
        assert line in text, "whole, although it is wider than the terminal"
