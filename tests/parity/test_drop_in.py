"""One caller, both stacks: the same script, the same numbers, and checkpoint files that either reads."""

import legacy_pmap
import numpy as np
import pytest

import kgo_shard

from . import caller

STACKS = {"old": legacy_pmap, "new": kgo_shard}


@pytest.fixture(scope="module")
def seen(rows9, tmp_path_factory):
    folders = {side: tmp_path_factory.mktemp(side) for side in STACKS}
    return folders, {side: caller.run(stack, rows9, folders[side]) for side, stack in STACKS.items()}


def test_the_caller_sees_the_same_names_and_bits(seen):
    _, sides = seen
    old, new = sides["old"], sides["new"]
    assert old.keys() == new.keys()
    for name, value in old.items():
        if isinstance(value, dict):
            # The old stack's gradient also tells the statistics as they would become.
            assert {key: value[key] for key in new[name]} == new[name], name
        else:
            assert (value.dtype, value.shape, value.tobytes()) == (new[name].dtype, new[name].shape, new[name].tobytes()), name


def test_loading_gives_back_what_was_saved(seen):
    for side, values in seen[1].items():
        for name in [name for name in values if name.startswith("saved/")]:
            assert values[name].tobytes() == values["loaded/" + name.removeprefix("saved/")].tobytes(), (side, name)


def test_training_went_on_after_the_load(seen):
    for values in seen[1].values():
        assert values["end/step"] == 3
        assert not np.array_equal(values["end/params/blocks/0/q_proj/w"], values["loaded/params/blocks/0/q_proj/w"])


@pytest.mark.parametrize("writer, reader", [("old", "new"), ("new", "old")])
def test_each_reads_the_others_checkpoint(seen, writer, reader):
    folders, sides = seen
    config = STACKS[reader].Config(
        pos_len=9, batch_size=32, model_kind="b2c32", ema_decay=0.99, data_parallel=True, data_parallel_devices=8
    )
    loaded = STACKS[reader].to_host(STACKS[reader].load_checkpoint(folders[writer] / "checkpoint_jax.pkl", config))
    for name, value in loaded.items():
        assert value.tobytes() == sides[writer]["saved/" + name].tobytes(), name


def test_the_checkpoint_files_hold_the_same(seen):
    from kgo_shard.checkpoint import read_pickle
    from kgo_shard.convert import flatten

    old, new = (read_pickle(seen[0][side] / "checkpoint_jax.pkl") for side in STACKS)
    assert old["meta"] == new["meta"]
    assert old.keys() == new.keys()
    for part in ("params", "opt_state", "ema_params"):
        a, b = flatten(old[part]), flatten(new[part])
        assert list(a) == list(b)
        assert all(a[name].tobytes() == b[name].tobytes() and a[name].dtype == b[name].dtype for name in a)
