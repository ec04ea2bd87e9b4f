"""TrainState: the same numbers on any number of devices, under the original's names on the host."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kgo_shard.config import Config
from kgo_shard.state import init_state, learned_shapes, to_host

OPTIONS = dict(pos_len=9, batch_size=16, model_kind="b2c32", compute_dtype="float32", ema_decay=0.9)


def make_config(devices=1, **options):
    parallel = {"data_parallel": True, "data_parallel_devices": devices} if devices > 1 else {}
    return Config(**OPTIONS | parallel | options)


def digest(flat):
    hashed = hashlib.sha256()
    for name in sorted(flat):
        leaf = np.asarray(flat[name])
        hashed.update(f"{name} {leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
    return hashed.hexdigest()


@pytest.fixture(scope="module")
def state():
    return init_state(make_config(2))


def test_the_host_state_has_the_originals_names(state):
    flat = to_host(state)
    leaves = [name.removeprefix("params/") for name in flat if name.startswith("params/")]
    assert len(leaves) == 2 * 9 + 11 and "blocks/0/q_proj/w" in leaves and "value_head/linear_s_simple/b" in leaves
    trees = ("params", "opt_state/m", "opt_state/v", "ema_params")
    assert set(flat) == {f"{tree}/{leaf}" for tree in trees for leaf in leaves} | {"moving_sum", "moving_weight", "step", "samples"}
    assert all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in flat.values())
    assert {name: flat[name].dtype for name in ("moving_sum", "moving_weight", "step", "samples")} == {
        "moving_sum": np.float32,
        "moving_weight": np.float32,
        "step": np.int64,
        "samples": np.int64,
    }


def test_a_fresh_state_starts_at_zero_with_the_average_at_the_parameters(state):
    flat = to_host(state)
    assert flat["step"] == flat["samples"] == flat["moving_sum"] == flat["moving_weight"] == 0
    for name, leaf in flat.items():
        if name.startswith("opt_state/"):
            assert not leaf.any(), name
        if name.startswith("params/"):
            assert leaf.tobytes() == flat[name.replace("params/", "ema_params/", 1)].tobytes(), name


def test_without_an_average_there_is_none():
    flat = to_host(init_state(make_config(ema_decay=0.0)))
    assert not any(name.startswith("ema_params") for name in flat) and "params/conv_spatial/w" in flat


def test_initial_numbers_are_the_same_on_any_number_of_devices(state):
    digests = {devices: digest(to_host(init_state(make_config(devices)))) for devices in (1, 2, 4)}
    assert len(set(digests.values())) == 1
    assert digest(to_host(state)) == digests[1]
    assert digest(to_host(init_state(make_config(seed=1)))) != digests[1], "the digest does not see the numbers"


def test_every_leaf_lies_whole_on_every_device_of_the_mesh(state):
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.learned):
        assert [shard.device for shard in leaf.addressable_shards] == jax.local_devices()[:2], path
        assert leaf.sharding.is_fully_replicated and not leaf.weak_type, path


@pytest.mark.parametrize("devices", [1, 2])
def test_no_two_leaves_share_a_buffer(devices):
    # The average starts as the parameters and the moments are both zeros: donated, a shared buffer would be given away twice.
    leaves = jax.tree.leaves(init_state(make_config(devices)).learned)
    buffers = [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]
    assert len(buffers) == devices * len(leaves) == len(set(buffers))


def test_dtypes_are_where_the_options_put_them():
    config = make_config(param_dtype="bfloat16", opt_state_dtype="bfloat16")
    shapes = learned_shapes(config)
    for tree, dtype in ((shapes.net, jnp.bfloat16), (shapes.opt_state, jnp.bfloat16), (shapes.ema, jnp.float32), (shapes.statistics, jnp.float32)):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(dtype)}


def test_shapes_are_those_of_the_real_state(state):
    shapes = learned_shapes(make_config(2))
    assert jax.tree.structure(shapes) == jax.tree.structure(state.learned)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state.learned), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)


def test_counts_go_beyond_a_devices_integers(state):
    far = type(state)(state.learned, step=2**33, samples=2**40)
    flat = to_host(far)
    assert (int(flat["step"]), int(flat["samples"])) == (2**33, 2**40)
