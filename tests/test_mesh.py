"""The mesh, its rule table, and where rows and state come to lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kgo_shard import mesh
from kgo_shard.config import Config, ConfigError


def make_config(devices, **options):
    parallel = {"data_parallel": True, "data_parallel_devices": devices} if devices else {}
    return Config(**{"pos_len": 9, "batch_size": 16} | parallel | options)


def buffers(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def test_the_rules_place_state_everywhere_and_rows_in_shares():
    assert mesh.spec_of("state/.net.stem.conv") == PartitionSpec()
    assert mesh.spec_of("batch/['globalInputNC']") == PartitionSpec(None, "data")
    assert mesh.spec_of("schedule/.count") == PartitionSpec()
    assert mesh.spec_of("result/.loss") == PartitionSpec()
    assert mesh.spec_of("local/.gradients") == PartitionSpec("data")


def test_a_leaf_without_a_rule_is_named():
    with pytest.raises(KeyError, match="no placement rule for elsewhere/"):
        mesh.specs({"x": 1}, "elsewhere")


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_the_mesh_has_the_local_devices_in_their_order(devices):
    made = mesh.make_mesh(make_config(devices))
    assert made.axis_names == ("data",) and made.devices.tolist() == jax.local_devices()[:devices]
    assert made.axis_types == (jax.sharding.AxisType.Auto,)


def test_without_data_parallel_there_is_one_device_and_with_it_all_of_them():
    assert mesh.make_mesh(make_config(0)).size == 1
    assert mesh.make_mesh(Config(pos_len=9, batch_size=16, data_parallel=True)).size == len(jax.local_devices()) == 16


def test_too_many_devices_are_refused():
    with pytest.raises(ConfigError, match="data_parallel_devices is 32 but this process has 16"):
        mesh.make_mesh(make_config(32, batch_size=32))


def test_a_batch_that_does_not_divide_is_refused():
    # With a number of devices named the config refuses it; with "all local ones" only the mesh can.
    with pytest.raises(ConfigError, match="batch_size 24 does not divide by the 16 devices"):
        mesh.make_mesh(Config(pos_len=9, batch_size=24, data_parallel=True))


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_rows_lie_in_contiguous_shares_and_steps_whole(devices):
    device_mesh = mesh.make_mesh(make_config(devices))
    batches = [{"x": np.arange(100 * k, 100 * k + 16, dtype=np.float32), "y": np.full((16, 3), k, np.int8)} for k in range(4)]
    placed = mesh.put_batches(device_mesh, batches)
    assert placed["x"].shape == (4, 16) and placed["y"].shape == (4, 16, 3) and placed["y"].dtype == np.int8
    share = 16 // devices
    shards = {shard.device: np.asarray(shard.data) for shard in placed["x"].addressable_shards}
    assert list(shards) == jax.local_devices()[:devices]
    for i, device in enumerate(jax.local_devices()[:devices]):
        expected = np.arange(i * share, (i + 1) * share) + 100 * np.arange(4)[:, None]
        np.testing.assert_array_equal(shards[device], expected, err_msg=f"device {i}")


def test_every_device_holds_the_whole_state():
    device_mesh = mesh.make_mesh(make_config(4))
    placed = mesh.put_state(device_mesh, {"w": np.arange(6.0, dtype=np.float32)})["w"]
    assert placed.sharding.is_fully_replicated and len(placed.addressable_shards) == 4
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(6.0))


@pytest.mark.parametrize("devices", [1, 4])
def test_placed_arrays_share_no_memory_with_their_source(devices):
    device_mesh = mesh.make_mesh(make_config(devices))
    source = jnp.arange(4096.0)
    placed = mesh.put_state(device_mesh, [source])[0]
    again = mesh.put_state(device_mesh, [placed])[0]
    assert [len(buffers(x)) for x in (source, placed, again)] == [1, devices, devices]
    assert not buffers(source) & buffers(placed) and not buffers(placed) & buffers(again)
    # So either may be donated, and the other lives on.
    placed.delete()
    np.testing.assert_array_equal(again, source)


def test_two_places_of_one_tree_get_two_arrays():
    # The moving average starts as the very arrays of the parameters; both are donated later.
    x = jnp.arange(8.0)
    placed = mesh.put_state(mesh.make_mesh(make_config(2)), {"params": x, "ema": x})
    assert not buffers(placed["params"]) & buffers(placed["ema"])


def test_an_unreduced_result_is_refused():
    device_mesh = mesh.make_mesh(make_config(4))
    rows = mesh.put_batches(device_mesh, [{"x": np.arange(1, 17, dtype=np.float32)}])
    unreduced = mesh.shard(lambda rows: jnp.sum(rows["x"]), device_mesh, inputs=("batch",), outputs="result")
    with pytest.raises(ValueError, match="(?s)out_specs.*replicat"):
        jax.jit(unreduced)(rows)
    reduced = mesh.shard(lambda rows: jax.lax.psum(jnp.sum(rows["x"]), "data"), device_mesh, inputs=("batch",), outputs="result")
    assert jax.jit(reduced)(rows) == 136


def test_a_result_of_an_arguments_kind_has_its_structure():
    device_mesh = mesh.make_mesh(make_config(2))
    state = mesh.put_state(device_mesh, {"a": np.ones(3, np.float32), "b": {"c": np.zeros(2, np.float32)}})
    rows = mesh.put_batches(device_mesh, [{"x": np.arange(16, dtype=np.float32)}])

    def body(state, rows):
        return jax.tree.map(lambda x: x + 1, state), jax.lax.pmean(jnp.sum(rows["x"]), "data"), rows["x"][0]

    new, mean, local = jax.jit(mesh.shard(body, device_mesh, inputs=("state", "batch"), outputs=("state", "result", "local")))(state, rows)
    assert jax.tree.structure(new) == jax.tree.structure(state) and mean == 60
    np.testing.assert_array_equal(new["a"], np.full(3, 2))
    np.testing.assert_array_equal(local, np.arange(16))
    assert local.sharding.spec == PartitionSpec("data")
