"""What `kgo-shard diff` says when it cannot compare; these tests pass without the old stack."""

import importlib.util

import pytest

from kgo_shard.__main__ import main
from kgo_shard.config import ConfigError
from kgo_shard.diff import run
from kgo_shard.diff.faults import FAULTS
from kgo_shard.diff.trace import Tape


def test_a_deleted_old_stack_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert main(["diff", "--exact", "--devices", "2", "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert "legacy_pmap" in error and error.count("\n") == 1


def test_an_unknown_fault_lists_the_known_ones():
    with pytest.raises(ConfigError, match="gremlins.*naive_port"):
        run.diff(Tape({}, [], 1), exact=True, fault="gremlins")


def test_every_fault_names_a_stage_and_its_meaning():
    from kgo_shard.diff.compare import STAGES

    assert len(FAULTS) >= 36
    for name, fault in FAULTS.items():
        assert fault.stage in STAGES and fault.meaning, name


def test_old_stack_is_found_exactly_where_it_is():
    here = importlib.util.find_spec("legacy_pmap") is not None
    if here:
        assert run.old_stack().__name__ == "kgo_shard.diff.legacy_side"
    else:
        with pytest.raises(ConfigError):
            run.old_stack()
