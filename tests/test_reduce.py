"""Collectives: gradients of the right size, terms summed, the loss averaged; and what goes wrong without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kgo_shard import mesh, reduce
from kgo_shard.config import Config
from kgo_shard.loss import MovingStatistics, Terms


def make_mesh(devices):
    return mesh.make_mesh(Config(pos_len=9, batch_size=16, data_parallel=True, data_parallel_devices=devices))


def on_devices(devices, body, rows, state=None, outputs="result"):
    """`body(state, rows)` with x = `rows` split over the devices."""
    device_mesh = make_mesh(devices)
    placed = mesh.put_batches(device_mesh, [{"x": np.asarray(rows, np.float32)}])
    state = mesh.put_state(device_mesh, state if state is not None else {"w": np.float32(1)})
    call = mesh.shard(lambda state, rows: body(state, rows["x"][0]), device_mesh, inputs=("state", "batch"), outputs=outputs)
    return jax.jit(call)(state, placed)


def loss_local(w, x):
    return jnp.mean(w * x)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_gradient_of_the_mean_has_its_size_on_any_number_of_devices(devices):
    def body(state, x):
        return reduce.mean_gradients(jax.grad(loss_local)(reduce.to_local(state["w"]), x))

    assert on_devices(devices, body, np.arange(1, 9)) == 4.5


@pytest.mark.parametrize(("devices", "wrong"), [(1, 4.5), (2, 9.0), (4, 18.0)])
def test_without_to_local_it_is_so_many_times_too_large_as_there_are_devices(devices, wrong):
    # pmap's body moved unchanged: autodiff has summed already, and the mean of equal sums is the sum.
    def naive(state, x):
        return jax.lax.pmean(jax.grad(loss_local)(state["w"], x), mesh.AXIS)

    assert on_devices(devices, naive, np.arange(1, 9)) == wrong


def test_a_gradient_that_is_not_reduced_is_refused():
    def body(state, x):
        return jax.grad(loss_local)(reduce.to_local(state["w"]), x)

    with pytest.raises(ValueError, match="(?s)out_specs.*replicat"):
        on_devices(4, body, np.arange(1, 9))


def test_a_sum_over_the_devices_is_accepted_and_right():
    assert on_devices(4, lambda state, x: jax.lax.psum(jnp.sum(x), mesh.AXIS), np.arange(1, 9)) == 36
    with pytest.raises(ValueError, match="(?s)out_specs.*replicat"):  # unchecked it would be the first device's 3
        on_devices(4, lambda state, x: jnp.sum(x), np.arange(1, 9))


def test_to_local_changes_types_only():
    state = {"w": np.arange(3, dtype=np.float32), "low": np.ones(2, jnp.bfloat16), "none": None}

    def body(state, x):
        local = reduce.to_local(state)
        assert jax.tree.structure(local) == jax.tree.structure(state)
        return jax.tree.map(lambda leaf: leaf[None], local)

    found = on_devices(2, body, np.arange(8), state, outputs="local")
    np.testing.assert_array_equal(found["w"], [np.arange(3)] * 2)
    assert found["low"].dtype == jnp.bfloat16 and found["none"] is None


def test_terms_are_summed_and_the_loss_is_averaged():
    def body(state, x):
        # Device i has the terms 0 + i, 1 + i, 2 + i, ...
        return reduce.sum_terms(Terms(*(jnp.float32(n) + x[0] for n in range(26))))

    terms = on_devices(4, body, [0, 1, 2, 3])
    assert float(terms.loss) == 1.5
    assert [float(value) for value in terms[1:]] == [4 * n + 6 for n in range(1, 26)]


def test_terms_take_one_collective():
    def body(state, x):
        return reduce.sum_terms(Terms(*([x[0]] * 26)))

    device_mesh = make_mesh(4)
    call = mesh.shard(lambda state, rows: body(state, rows["x"][0]), device_mesh, inputs=("state", "batch"), outputs="result")
    jaxpr = jax.make_jaxpr(call)({"w": np.float32(1)}, {"x": np.zeros((1, 8), np.float32)})
    assert str(jaxpr).count("psum") == 1


def test_statistics_and_the_unowned_share_are_averaged():
    def body(state, x):
        return reduce.mean_statistics(MovingStatistics(x[0], 2 * x[0])), reduce.mean_unowned(x[0])

    statistics, unowned = on_devices(4, body, [1, 2, 3, 10], outputs=("result", "result"))
    assert (statistics.sum, statistics.weight, unowned) == (4, 8, 4)


def test_gradients_are_reduced_in_their_own_dtype():
    def body(state, x):
        return reduce.mean_gradients({"wide": x[0], "low": x[0].astype(jnp.bfloat16)})

    found = on_devices(2, body, [1, 1 + 2**-7])
    assert found["wide"].dtype == jnp.float32 and found["wide"] == 1 + 2**-8
    assert found["low"].dtype == jnp.bfloat16 and found["low"] == 1  # 1 + 2^-8 has no bfloat16; ties go to even
