"""`kgo-shard record` and `replay`: a recorded run is met again by either side, and what was changed in it is named."""

import json
import shutil
import sys

import numpy as np
import pytest

from kgo_shard.config import ConfigError
from kgo_shard.diff import recording, replay, run
from kgo_shard.diff.recording import RecordingError

from . import compact
from .test_command import kgo_shard
from .test_compact_recordings import write_checkpoint


@pytest.fixture
def folder(tape, old_trace, tmp_path):
    """What `record --side old` leaves behind."""
    recording.write_tape(tmp_path / "run", tape)
    recording.write_trace(tmp_path / "run", old_trace, recording.facts_here("legacy_pmap"))
    return tmp_path / "run"


@pytest.fixture
def quick(monkeypatch, new_trace):
    """The new side's trace of the tape, without running it once more."""
    monkeypatch.setattr(run, "record_shown", lambda side, tape, progress: new_trace)


def replay_new(folder):
    return replay.replay(folder, replay.read_tape(folder), replay.Player("new"))


def test_the_new_side_meets_what_the_old_one_left(folder, quick):
    found = replay_new(folder)
    assert found.bits and found.comparison.equal and found.comparison.steps == 3
    assert (found.recorded["side"], found.replayed["side"]) == ("legacy_pmap", "kgo_shard")


def test_a_changed_leaf_of_the_recording_is_named(folder, quick, old_trace):
    changed = [dict(step) for step in old_trace]
    changed[2]["ema/norm_final/weight"] = np.nextafter(changed[2]["ema/norm_final/weight"], np.float32(2))
    recording.write_trace(folder, changed, recording.facts_here("legacy_pmap"))
    bad = replay_new(folder).comparison.first_bad
    assert (bad.step, bad.name) == (2, "ema/norm_final/weight")


def test_another_jax_is_judged_by_the_bound(folder, quick, monkeypatch, old_trace):
    """The float64 run itself is shown elsewhere (test_command.py): here it is the recorded run, copied."""
    facts = json.loads((folder / "facts.json").read_text())
    (folder / "facts.json").write_text(json.dumps(facts | {"JAX": "0.4.35"}))
    copied = [{name: np.array(leaf) for name, leaf in step.items()} for step in old_trace]
    monkeypatch.setattr(run, "measure_bound", lambda tape, old, progress: run.Bound(copied, (), np.dtype(np.float32)))
    found = replay_new(folder)
    assert not found.bits and found.comparison.has_reference and found.comparison.equal


def test_files_that_moved_are_asked_for(folder, quick, tape, tmp_path):
    content = json.loads((folder / "tape.json").read_text())
    content["files"] = [path.replace("selfplay9", "nowhere") for path in content["files"]]
    (folder / "tape.json").write_text(json.dumps(content))
    with pytest.raises(RecordingError, match="nowhere.*--datadir"):
        replay.read_tape(folder)
    assert replay.read_tape(folder, tape.files[0].parents[1]).files == [*tape.files]


def test_nothing_is_overwritten(folder, tape):
    before = (folder / "trace.npz").read_bytes()
    with pytest.raises(RecordingError, match="not an empty folder"):
        replay.record(folder, tape, replay.Player("new"))
    assert (folder / "trace.npz").read_bytes() == before


def test_what_cannot_be_played_is_said(folder, tape, tmp_path):
    with pytest.raises(ConfigError, match="--python runs the old side only"):
        replay.replay(folder, tape, replay.Player("new", python=sys.executable))
    with pytest.raises(ConfigError, match="no_such_python: cannot be started"):
        replay.replay(folder, tape, replay.Player("old", python=str(tmp_path / "no_such_python")))
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'no JAX here' >&2\nexit 3\n")
    failing.chmod(0o755)
    with pytest.raises(ConfigError, match="exit code 3: no JAX here"):
        replay.replay(folder, tape, replay.Player("old", python=str(failing)))


# Recordings of the original


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A case's folder as the original's recordings have it, with its data in a folder above."""
    recorded, above = compact.load(compact.CASES[0]), tmp_path_factory.mktemp("original")
    (above / "data" / "train").mkdir(parents=True)
    shutil.copy(compact.ROWS, above / "data" / "train")
    case = above / "traces" / "adamw_f32" / "exact"
    case.mkdir(parents=True)
    (case / "case.json").write_text(json.dumps(recorded.case | {"datadir": "data", "jax": "0.4.35"}))
    write_checkpoint(case / "step_0000.pkl", recorded)
    steps = {"step": int(recorded.last["step"]), "samples": int(recorded.last["samples"])}
    statistics = {name: float(recorded.last[name]) for name in ("moving_sum", "moving_weight")}
    write_checkpoint(case / "step_0006.pkl", recorded._replace(first=recorded.last, meta=recorded.meta | steps | statistics))
    return case


@pytest.mark.long
def test_the_originals_recording_is_a_tape(original, tmp_path):
    result = kgo_shard("replay", original, "--exact", "--side", "new", "--report", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    leaves = report["sections"][0]["data"]["leaves"]
    assert {leaf["step"] for leaf in leaves} == {0, 6} and "the original, JAX 0.4.35" in report["environment"]["recorded"]
    assert {leaf["stage"] for leaf in leaves} == {"parameters", "moments", "ema", "moving_statistics", "counts"}


@pytest.mark.long
def test_a_recording_of_another_run_is_different(original, tmp_path):
    """Half the step: then neither the replay nor its float64 run is what was recorded."""
    case = shutil.copytree(original.parents[2], tmp_path / "copy") / "traces" / "adamw_f32" / "exact"
    content = json.loads((case / "case.json").read_text())
    (case / "case.json").write_text(json.dumps(content | {"flags": [*content["flags"], "--lr", "0.001"]}))
    result = kgo_shard("replay", case, "--exact", "--side", "new")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "first at step 6, stage moments" in " ".join(result.stdout.split()) and "too far for rounding" in result.stdout, result.stdout


def test_a_broken_case_is_named(original, tmp_path):
    case = tmp_path / "case.json"
    for text in ("{", "[]", '{"flags": []}'):
        case.write_text(text)
        with pytest.raises(RecordingError, match="case.json: not a recorded case"):
            replay.read_tape(tmp_path)
    case.write_text((original / "case.json").read_text())
    with pytest.raises(RecordingError, match="no folder above has its data"):
        replay.read_tape(tmp_path)
    with pytest.raises(RecordingError, match="step_0000.pkl and a later one are needed"):
        replay.read_tape(tmp_path, compact.ROWS.parents[1])


@pytest.mark.long
def test_record_here_and_replay_under_another_interpreter(tmp_path):
    """The other interpreter is this one in a process of its own; nox's session `across` takes JAX 0.4.35."""
    assert kgo_shard("record", tmp_path / "run", "--exact", "--steps", 2, "--side", "new").returncode == 0
    result = kgo_shard("replay", tmp_path / "run", "--exact", "--python", sys.executable)
    assert result.returncode == 0 and "EQUAL" in result.stdout, result.stdout + result.stderr
