"""The ledger has a row for every piece of state, and says of each what is true."""

import dataclasses
import importlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from kgo_shard import batches, journal, resume
from kgo_shard.__main__ import main
from kgo_shard.config import Config
from kgo_shard.diff import ledger
from kgo_shard.diff.compare import STAGES
from kgo_shard.state import TrainState, init_state, learned_shapes, to_host

train = importlib.import_module("kgo_shard.train")
OPTIONS = [{}, {"ema_decay": 0.9}, {"optimizer": "muon", "scan_blocks": True, "param_dtype": "bf16"}, {"optimizer": "sgd", "fuse_projections": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_leaf_of_the_state_has_exactly_one_row(options):
    config = Config(pos_len=9, model_kind="b2c32", **options)
    state = TrainState(learned_shapes(config), 0, 0)
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        fitting = [row for row in ledger.DEVICE_ROWS if ledger.fnmatchcase(jax.tree_util.keystr(path), row.pattern)]
        assert len(fitting) == 1, path
    counted = sum(int(row[3]) for row in ledger.ledger_rows(config) if row[3])
    assert counted == len(jax.tree.leaves(state))


def test_a_leaf_without_a_row_is_refused_by_name():
    with pytest.raises(KeyError, match="learned.surprise"):
        ledger.device_row(".learned.surprise")


def test_the_fields_of_the_state_are_those_of_the_table():
    fields = {field.name for field in dataclasses.fields(TrainState)} - {"learned"}
    fields |= {f"learned.{field.name}" for field in dataclasses.fields(type(learned_shapes(Config())))}
    patterns = [row.pattern.removeprefix(".") for row in ledger.DEVICE_ROWS]
    assert all(any(pattern.startswith(field) for pattern in patterns) for field in fields)


# What holds no state: arguments, and what is computed anew from them in every round of the loop.
DERIVED = {
    "train": {"config", "log", "show", "name", "data", "train_files", "val_files", "_", "state", "step", "evaluate", "chunks", "chunk", "metrics",
              "done", "keeper", "stop", "stopped", "entered", "command", "memory", "steps_before", "error", "figures", "line", "validate_now", "save_now"},
    "training_chunks": {"files", "config", "current", "chunk"},
    "read_packed_batches": {"files", "config", "seed", "images", "num_read", "largest", "batch", "image"},
}  # fmt: skip


@pytest.mark.parametrize("function", [train.train, train.training_chunks, batches.read_packed_batches], ids=lambda f: f.__name__)
def test_every_variable_of_the_loop_is_in_the_ledger_or_derived(function):
    held = {name for row in ledger.HOST_ROWS for name in row.names}
    comprehended = {"key", "value"}  # variables of the function itself since Python 3.12
    names = (set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)) - comprehended
    assert names - held - DERIVED[function.__name__] == set()
    assert DERIVED[function.__name__] <= names, "a name that is gone"


STATE = SimpleNamespace(step=0, samples=0)
MADE = [journal.Window(0), resume.Marks(1, 2), journal.StepTimes(), batches.Place(), resume.Memory.fresh(STATE, Config())]


@pytest.mark.parametrize("made", MADE, ids=lambda made: type(made).__name__)
def test_every_attribute_of_the_loops_objects_is_in_the_ledger(made):
    owner = f"{type(made).__module__.rpartition('.')[2]}.{type(made).__name__}"
    held = {name for row in ledger.HOST_ROWS if row.owner == owner for name in row.names}
    assert held and set(vars(made)) <= held


def test_what_the_host_is_said_to_save_is_in_the_own_format(tmp_path, rows9):
    config = Config(pos_len=9, batch_size=16)
    files, place = batches.find_files(rows9 / "train"), batches.Place()
    place.begin(files, 1)
    memory = dataclasses.replace(resume.Memory.fresh(STATE, config), place=place, journal={"train_jax.log": 3})
    run = resume.to_json(SimpleNamespace(step=4, samples=64), memory, config, resume.contents(files, rows9 / "train"), rows9 / "train")
    for row in ledger.HOST_ROWS:
        for where in row.saved.split(", "):
            if not where.startswith("no: "):
                part = run
                for key in where.split("/"):
                    part = part[key]  # KeyError: it is not saved


def test_what_is_said_to_be_compared_is_a_stage_and_what_is_said_to_be_saved_is():
    config = Config(pos_len=9, model_kind="b2c32", ema_decay=0.9, compute_dtype="float32", batch_size=8)
    host = to_host(init_state(config))
    stages = {stage for row in ledger.DEVICE_ROWS for stage in row.compared.split(", ")}
    assert {ledger.stage_of(name) for name in host} <= stages <= set(STAGES)
    saved = {row.saved for row in ledger.DEVICE_ROWS}
    for name in host:
        assert any(name.startswith(place) or f"meta/{name}" == place for place in saved), name
    assert all(np.asarray(leaf).size for leaf in host.values())


def test_the_command_prints_it(capsys):
    assert main(["ledger", "--pos-len", "9", "--model-kind", "b2c32", "--param-dtype", "bf16", "--ema-decay", "0.9"]) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "bfloat16", "moving average", "random draws", "place in the files", "window of the log", "next save"):
        assert word in out
    assert main(["ledger", "--model-kind", "b1"]) == 2
