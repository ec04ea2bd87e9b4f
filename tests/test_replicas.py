"""Replicas that differ in one bit are found, on demand, while training and before a checkpoint is written."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kgo_shard import checkpoint, keeper
from kgo_shard.config import Config
from kgo_shard.journal import SHOWN_TERMS
from kgo_shard.mesh import make_mesh
from kgo_shard.replicas import ReplicaError, check_replicas, digests
from kgo_shard.state import init_state

train = importlib.import_module("kgo_shard.train")
CONFIG = Config(pos_len=9, batch_size=8, model_kind="b2c32", data_parallel=True, data_parallel_devices=4)


def with_flipped_bit(leaf, device: int):
    """The same array, but for its first element's last bit on one device."""
    copies = [np.array(shard.data) for shard in leaf.addressable_shards]
    copies[device].reshape(-1).view(np.uint8)[0] ^= 1
    sharding = NamedSharding(make_mesh(CONFIG), PartitionSpec())
    placed = [jax.device_put(copy, shard.device) for copy, shard in zip(copies, leaf.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, placed)


def with_bad_replica(state):
    norm = state.learned.net.norm
    bad = dataclasses.replace(norm, weight=with_flipped_bit(norm.weight, 2))
    return dataclasses.replace(state, learned=dataclasses.replace(state.learned, net=dataclasses.replace(state.learned.net, norm=bad)))


@pytest.fixture(scope="module")
def state():
    return init_state(CONFIG)


def test_every_leaf_of_a_fresh_state_is_checked_and_equal(state):
    assert check_replicas(state) == len(jax.tree.leaves(state.learned)) > 80
    assert len(digests(state.learned.net.norm.weight)) == 4


def test_one_bit_on_one_device_is_named(state):
    with pytest.raises(ReplicaError, match=r"leaf \.learned\.net\.norm\.weight: .*2.* holds other bits than .*0"):
        check_replicas(with_bad_replica(state))


def test_split_arrays_are_no_replicas():
    rows = jax.device_put(np.arange(8.0), NamedSharding(make_mesh(CONFIG), PartitionSpec("data")))
    assert check_replicas({"rows": rows}) == 0


@pytest.mark.parametrize(("every", "checked_at"), [(0, []), (1, [1, 2, 3, 3]), (2, [2, 3])])
def test_the_trainer_checks_every_n_steps_and_before_each_save(every, checked_at, state, rows9, tmp_path, monkeypatch):
    """With a step that costs nothing: three of them, one save at the end."""
    seen = []

    def step(current, batches):
        terms = dict.fromkeys((*SHOWN_TERMS, "loss", "wsum", "grad_norm"), 1.0)
        return dataclasses.replace(current, step=current.step + 1, samples=current.samples + 8), terms | {"lr": 0.1}

    monkeypatch.setattr(train, "make_train_step", lambda config: step)
    monkeypatch.setattr(train, "make_eval_step", lambda config: lambda current, batch: dict.fromkeys((*SHOWN_TERMS, "loss", "wsum"), 1.0))
    for module in (train, keeper):  # every so many steps, and before a save
        monkeypatch.setattr(module, "check_replicas", lambda current: seen.append(current.step))
    config = CONFIG.replace(traindir=tmp_path / "run", datadir=rows9, max_training_samples=24, check_replicas=every, max_val_batches=1)
    train.train(config, log=lambda line: None)
    assert seen == checked_at


def test_a_bad_replica_ends_the_run_before_the_save(state, rows9, tmp_path, monkeypatch, capsys):
    def step(current, batches):
        terms = dict.fromkeys((*SHOWN_TERMS, "loss", "wsum", "grad_norm"), 1.0)
        return dataclasses.replace(with_bad_replica(current), step=1, samples=8), terms | {"lr": 0.1}

    monkeypatch.setattr(train, "make_train_step", lambda config: step)
    words = f"--traindir {tmp_path / 'run'} --datadir {rows9} --pos-len 9 --batch-size 8 --model-kind b2c32 --max-training-samples 8"
    words += " --data-parallel --data-parallel-devices 4 --check-replicas 100"
    monkeypatch.setattr(train, "make_eval_step", lambda config: lambda current, batch: dict.fromkeys((*SHOWN_TERMS, "loss", "wsum"), 1.0))
    assert train.main(words.split()) == 1
    error = capsys.readouterr().err
    assert ".learned.net.norm.weight" in error and error.count("\n") == 1
    assert not (tmp_path / "run" / checkpoint.FILE_NAME).exists()
