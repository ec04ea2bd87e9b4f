"""A state split over the devices: shares in and out, and the same numbers as where every device holds the whole state."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgo_shard import convert, mesh, optim, reduce, shares
from kgo_shard.batches import find_files, read_packed_batches
from kgo_shard.checkpoint import CheckpointError, from_own, load_checkpoint, save_checkpoint
from kgo_shard.config import Config, ConfigError
from kgo_shard.diff import split_audit
from kgo_shard.diff.split_audit import NORM_SUMS, SplitAudit, audit_split, total_sent
from kgo_shard.diff.trace import Tape
from kgo_shard.mesh import AXIS, make_mesh
from kgo_shard.state import init_state, to_host
from kgo_shard.step import head_outputs, make_eval_step, make_gradient, make_probe, make_train_step
from kgo_shard.store import read
from kgo_shard.train import train

from .test_checkpoint import assert_same_bits
from .test_store import SMALL, free  # noqa: F401

OPTIONS = {
    "pos_len": 9, "model_kind": "b2c32", "batch_size": 48, "compute_dtype": "float32", "ema_decay": 0.9, "lr": 1e-3, "warmup_samples": 0,
    "enable_history_matrices": True, "data_parallel": True,
}  # fmt: skip
MUON = {"optimizer": "muon"}


def config_of(devices: int, **options) -> Config:
    return Config(**OPTIONS | {"data_parallel_devices": devices, "shard_state": "data"} | options)


# Cutting and joining


@settings(deadline=None)  # JAX compiles for each shape
@given(st.integers(1, 16), st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_what_is_cut_is_joined_again(devices, layers, sizes, on_device):
    shape = (layers, *sizes)
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1
    cut = shares.cut(jnp.asarray(whole) if on_device else whole, layers, devices)
    assert cut.shape[:2] == (devices, layers) and cut.shape[2] >= 2
    assert cut.shape[2] == max(2, math.ceil(math.prod(sizes) / devices)), "as even as it can be"
    np.testing.assert_array_equal(shares.join(cut, shape), whole)
    assert (np.sort(np.ravel(cut))[-whole.size :] == whole.ravel()).all() and np.count_nonzero(cut) == whole.size


def test_a_scalar_has_nothing_to_split():
    zero = np.float32(0)
    assert shares.cut(zero, 1, 8) is zero and shares.join(zero, ()) is zero
    assert mesh.specs({"v": zero, "m": np.zeros((4, 1, 2))}, "shares") == {"v": mesh.PartitionSpec(), "m": mesh.PartitionSpec(AXIS)}


@pytest.mark.parametrize("layout", [{}, {"stack_blocks": True, "fuse_projections": True}])
def test_every_leaf_of_the_state_is_split_and_none_is_lost(layout):
    config = config_of(6, **layout)
    state, whole = init_state(config), init_state(config.replace(shard_state="none"))
    for leaf in jax.tree.leaves((state.learned.net, state.learned.opt_state, state.learned.ema)):
        assert leaf.shape[0] == 6 and leaf.sharding.spec == mesh.PartitionSpec(AXIS) and len(leaf.addressable_shards) == 6
        assert leaf.addressable_shards[0].data.shape == (1, *leaf.shape[1:])
    assert_same_bits(to_host(state), to_host(whole))


def bytes_on_first_device(state) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.learned))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_device_holds_its_share_of_the_bytes(optimizer):
    config = config_of(8, model_kind="b3c96", optimizer=optimizer)
    split, whole = (bytes_on_first_device(init_state(config.replace(shard_state=kind))) for kind in ("data", "none"))
    assert 1 / 8 <= split / whole < 0.126


# Dealing


def on_devices(devices, body, x, **options):
    """`body` on each device's share (x's first axis) of a float32 array; its results along a new first axis."""
    device_mesh = make_mesh(config_of(devices, **options))
    call = mesh.shard(lambda shares: body(shares["x"])[None], device_mesh, inputs=("shares",), outputs="local")
    return np.asarray(jax.jit(call)({"x": jnp.asarray(x, jnp.float32)}))


@pytest.mark.parametrize(("devices", "count", "k"), [(4, 6, 2), (4, 4, 1), (3, 7, 3), (8, 2, 1), (1, 3, 3)])
def test_dealt_things_are_whole_each_on_one_device_and_come_back(devices, count, k):
    things = np.arange(count * devices * 2).reshape(count, devices, 2) + 1.0
    x = things.swapaxes(0, 1)[:, :, None]  # (D, N, layers, n): every device's share of every thing
    dealt = on_devices(devices, lambda x: reduce.deal(x[0]), x)
    assert dealt.shape == (devices, k, devices, 1, 2)
    flat = dealt.reshape(devices * k, devices, 2)
    np.testing.assert_array_equal(flat[:count], things)
    assert not flat[count:].any()
    back = on_devices(devices, lambda x: reduce.collect(reduce.deal(x[0]), count), x)
    np.testing.assert_array_equal(back, x)


def test_at_least_two_things_a_device_where_they_are_asked_for():
    assert on_devices(4, lambda x: reduce.deal(x[0], at_least=2), np.ones((4, 3, 1, 5))).shape == (4, 2, 4, 1, 5)


# The same numbers


def steps_of(config: Config, rows9, calls: int):
    """The host states after every call, all metrics, the last gradient, an evaluation, the head outputs."""
    rows = read_packed_batches(find_files(rows9 / "train"), config, config.seed)
    batches = [next(rows) for _ in range(calls * config.steps_per_jit)]
    state, step, seen = init_state(config), make_train_step(config), {}
    for call in range(calls):
        state, metrics = step(state, batches[call * config.steps_per_jit :][: config.steps_per_jit])
        seen |= {f"{call}/{name}": value for name, value in (to_host(state) | metrics).items()}
    gradient, terms = make_gradient(config)(state, batches[0])
    seen |= {f"gradient/{name}": value for name, value in (gradient | terms).items()}
    seen |= {f"evaluation/{name}": value for name, value in make_eval_step(config)(state, batches[0]).items()}
    return seen | {f"heads/{name}": value for name, value in head_outputs(state, batches[0], config).items()}


def check_equal(config: Config, rows9, calls: int = 3):
    whole = steps_of(config.replace(shard_state="none"), rows9, calls)
    assert_same_bits(whole, steps_of(config, rows9, calls))
    assert whole["0/params/norm_final/weight"].tobytes() != whole[f"{calls - 1}/params/norm_final/weight"].tobytes(), "nothing was learnt"


@pytest.mark.parametrize(
    ("devices", "options"), [(8, MUON | {"log_grad_norm": True}), pytest.param(3, {"grad_clip_norm": 0.5}, marks=pytest.mark.long)]
)
def test_every_bit_is_that_of_the_whole_state(devices, options, rows9):
    check_equal(config_of(devices, **options), rows9)


@pytest.mark.long
def test_every_bit_is_that_of_the_whole_state_with_an_objective_of_all_rows(rows9):
    """The original has no such objective; with its own, tests/parity/matrix.py compares the split state with it in other settings."""
    options = MUON | {"muon_target": "attn", "objective": "global", "steps_per_jit": 2, "grad_clip_norm": 0.5}
    check_equal(config_of(2, **options), rows9, calls=2)


@pytest.mark.long
def test_a_probe_shows_whole_gradients(rows9):
    config = config_of(4, grad_clip_norm=0.5)
    batch = next(read_packed_batches(find_files(rows9 / "train"), config, config.seed))
    stages = [make_probe(c)(init_state(c), batch)[1] for c in (config, config.replace(shard_state="none"))]
    for split, whole in zip(jax.tree.leaves(stages[0]), jax.tree.leaves(stages[1]), strict=True):
        assert np.asarray(split).tobytes() == np.asarray(whole).tobytes()


@pytest.mark.long
def test_an_update_of_another_share_would_show(rows9, monkeypatch):
    """The comparison above can fail: one device's share of one leaf is not moved."""
    good = optim.apply_direction

    def faulty(params, direction, schedule, config):
        moved = good(params, direction, schedule, config)
        if not config.splits_state:
            return moved
        stale = jnp.where(jax.lax.axis_index(AXIS) == 2, params.stem.conv, moved.stem.conv)
        return dataclasses.replace(moved, stem=dataclasses.replace(moved.stem, conv=stale))

    monkeypatch.setattr(optim, "apply_direction", faulty)
    with pytest.raises(AssertionError, match="0/params/conv_spatial/w"):
        check_equal(config_of(3, grad_clip_norm=0.5), rows9)


@pytest.mark.long
def test_a_value_that_is_not_finite_on_one_device_stops_all(rows9):
    config = config_of(4, on_nonfinite="skip")
    batch = next(read_packed_batches(find_files(rows9 / "train"), config, config.seed))
    bad = {key: value.copy() for key, value in batch.items()}
    bad["globalInputNC"][-1] = np.nan  # a row of the last device
    state = init_state(config)
    before = to_host(state)
    state, metrics = make_train_step(config)(state, [bad])
    assert metrics["skipped"] == 1 and state.step == 0
    assert_same_bits(before, to_host(state))


# Collectives


def audit(rows9, devices=8, **options) -> SplitAudit:
    options = OPTIONS | {"data_parallel_devices": devices, "shard_state": "data"} | options
    return audit_split(Tape(options, find_files(rows9 / "train"), 1))


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (8, {"compute_dtype": "bfloat16"}),
        (1, MUON | {"log_grad_norm": True}),
        pytest.param(6, MUON | {"log_grad_norm": True, "stack_blocks": True, "objective": "global"}, marks=pytest.mark.long),
        pytest.param(16, MUON | {"muon_target": "attn", "fuse_projections": True, "param_dtype": "bfloat16"}, marks=pytest.mark.long),
    ],
)
def test_every_collective_is_foretold_from_the_shapes(devices, options, rows9):
    found = audit(rows9, devices, **options)
    assert found.explained, found.verdict()
    kinds = {kind: sum(n for c, n in found.found.items() if c.kind == kind) for kind in ("reduce_scatter", "all_gather")}
    leaves = len(jax.tree.leaves(init_state(config_of(devices, **options)).learned.net))
    assert kinds == {"reduce_scatter": leaves, "all_gather": leaves}
    others = found.found.keys() - found.foretold[NORM_SUMS].keys()
    assert not [c for c in others if c.kind == "all_reduce" and c.elements > 26], "no gradient is reduced whole"


@pytest.mark.long
def test_reduce_scatter_and_gather_carry_what_the_all_reduce_did(rows9):
    found = audit(rows9)
    leaves = jax.tree.leaves(shares.whole_shapes(init_state(config_of(8)).learned.net))
    padding = sum(8 * max(2, -(-leaf.size // 8)) - leaf.size for leaf in leaves)
    finite = found.foretold[split_audit.FINITE]
    assert 0 < padding < 100
    assert total_sent(found.found - finite) == total_sent(found.replicated) + 2 * 7 / 8 * 4 * padding
    assert total_sent(audit(rows9, compute_dtype="bfloat16").found) < 0.8 * total_sent(found.replicated), "matrices are gathered in two bytes"


@pytest.mark.long
def test_a_collective_that_nobody_foretold_is_named(rows9, monkeypatch):
    plain = reduce.mean_shares
    monkeypatch.setattr(reduce, "mean_shares", lambda g: plain(jax.tree.map(lambda x: reduce.to_local(jax.lax.pmean(x, AXIS)), g)))
    found = audit(rows9)
    assert not found.explained and "UNEXPLAINED: " in found.verdict()
    assert "all_reduce of 6336 f32" in found.verdict(), found.verdict()


# Checkpoints


@pytest.mark.parametrize("layout", [{}, pytest.param({"stack_blocks": True, "optimizer": "muon"}, marks=pytest.mark.long)])
def test_checkpoints_restore_between_split_and_whole_and_device_counts(free, tmp_path, rows9, layout):  # noqa: F811
    options = SMALL | layout | {"batch_size": 48, "max_training_samples": 48, "save_every_samples": 48, "data_parallel": True}
    saved = train(Config(**options, shard_state="data", data_parallel_devices=8, traindir=tmp_path, datadir=rows9), log=lambda line: None)
    for devices, kind in ((8, "none"), (3, "data"), (16, "data"), (1, "none")):
        config = Config(**options, shard_state=kind, data_parallel_devices=devices)
        loaded = load_checkpoint(tmp_path, config)
        assert_same_bits(to_host(saved), to_host(loaded))
        assert shares.is_split(loaded.learned.net) == (kind == "data")
        save_checkpoint(tmp_path / "legacy.pkl", loaded, config)
        assert_same_bits(to_host(saved), to_host(load_checkpoint(tmp_path / "legacy.pkl", config.replace(shard_state="data"))))
    lines = []
    more = {"max_training_samples": 96, "allow_changes": "max_training_samples"}
    state = train(Config(**options | more, shard_state="none", data_parallel_devices=4, traindir=tmp_path, datadir=rows9), log=lines.append)
    assert "resumed from" in lines[0] and "with shard_state none, before data: last bits" in lines[1]
    assert state.step == 2 and not shares.is_split(state.learned.net)


def test_shares_that_do_not_fit_are_named(free, tmp_path, rows9):  # noqa: F811
    options = SMALL | {"max_training_samples": 16, "data_parallel": True, "data_parallel_devices": 4, "shard_state": "data"}
    config = Config(**options, traindir=tmp_path, datadir=rows9)
    train(config, log=lambda line: None)
    (run,) = tmp_path.glob("checkpoints/*/run.json")
    content = json.loads(run.read_text())
    for devices, says in ((8, "leaf .* has shape .* a share for each of 8 devices"), ("4", "devices is '4'"), (0, "devices is 0")):
        tree, saved = read(run.parent)
        with pytest.raises(CheckpointError, match=says):
            from_own(run.parent, tree, saved | {"devices": devices}, config)
    assert content["devices"] == 4


# Master copies


def test_the_original_gets_the_parameters_that_the_network_computes_with(tmp_path):
    config = config_of(4, param_dtype="bfloat16", master_dtype="float32")
    state = init_state(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.learned.net)} == {jnp.dtype("float32")}
    save_checkpoint(tmp_path / "c.pkl", state, config)
    plain = config.replace(master_dtype="param", shard_state="none")
    loaded = to_host(load_checkpoint(tmp_path / "c.pkl", plain))
    assert {leaf.dtype for name, leaf in loaded.items() if name.startswith("params/")} == {jnp.dtype("bfloat16")}
    assert_same_bits(loaded, to_host(init_state(plain)))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_master_copies_keep_what_bfloat16_swallows(optimizer, rows9):
    """A step of 1e-5 is below half a bfloat16 unit of most weights: without master copies they never move."""
    low = dict.fromkeys(("param_dtype", "opt_state_dtype", "opt_update_dtype", "compute_dtype", "activation_dtype"), "bfloat16")
    moved = {}
    for master in ("param", "float32"):
        config = config_of(2, **low, optimizer=optimizer, lr=1e-5, master_dtype=master)
        rows = read_packed_batches(find_files(rows9 / "train"), config, config.seed)
        state, step = init_state(config), make_train_step(config)
        before = to_host(state)
        for _ in range(4):
            state, _ = step(state, [next(rows)])
        after = to_host(state)
        leaves = [name for name in before if name.startswith("params/") and "conv" in name]
        moved[master] = np.mean(np.concatenate([(before[name] != after[name]).ravel() for name in leaves]))
    assert moved["param"] < 0.7 < 0.99 < moved["float32"]


def test_master_copies_are_moved_in_their_own_dtype():
    """Also where the parameters have it already: a bfloat16 update would leave them with its eight digits."""
    params = init_state(config_of(1, shard_state="none")).learned.net
    schedule = optim.Schedule(*(np.float32(x) for x in (1, 1e-3, 0.1)))
    for master, same in (("param", True), ("float32", False)):
        config = config_of(1, shard_state="none", master_dtype=master, opt_update_dtype="bfloat16")
        moved = optim.apply_direction(params, jax.tree.map(jnp.ones_like, params), schedule, config).stem.conv
        assert moved.dtype == jnp.float32 and np.array_equal(moved, moved.astype(jnp.bfloat16).astype(jnp.float32)) == same


def test_the_split_is_refused_beside_calls_of_their_own():
    for options in ({"component_profile": True}, {"muon_split_jit": True, "optimizer": "muon"}):
        with pytest.raises(ConfigError, match=f"shard_state data does not go with {next(iter(options))}"):
            Config(**options, shard_state="data")


def test_names_are_kept():
    config = config_of(4)
    assert list(convert.to_named(init_state(config).learned.net)) == list(convert.name_table(config.model).values())
