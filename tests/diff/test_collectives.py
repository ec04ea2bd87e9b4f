"""The counter of collectives, on programs small enough to know what they hold."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kgo_shard.diff.collectives import Audit, Collective, compiled_collectives, lowered_collectives

AXIS = "data"


def lower(body, *arrays, devices=4):
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    sharded = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(), check_vma=True)
    return jax.jit(sharded).lower(*arrays)


def both(program) -> list:
    return [lowered_collectives(program.as_text()), compiled_collectives(program.compile().as_text())]


def test_sums_are_counted_with_dtype_elements_and_devices():
    def body(x, y):
        return jax.lax.psum((jnp.sum(x), y), AXIS)

    program = lower(body, jnp.ones((8, 3)), jnp.ones((4, 5), jnp.int32))
    expected = {Collective("all_reduce", "f32", 1, 4): 1}
    for found in both(program):
        assert {c: n for c, n in found.items() if c.dtype == "f32"} == expected
        assert sum(found.values()) == 2 and {c.elements for c in found} == {1, 5}


def test_gathers_and_scatters_are_told_apart():
    def body(x):
        gathered = jax.lax.all_gather(x, AXIS)
        scattered = jax.lax.psum_scatter(gathered.reshape(-1), AXIS, tiled=True)
        return jax.lax.psum(jnp.sum(scattered), AXIS)

    kinds = {c.kind for c in lowered_collectives(lower(body, jnp.ones((8, 2))).as_text())}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}


def test_the_dtype_of_a_reduction_shows():
    def low(x):
        return jax.lax.psum(jnp.sum(x.astype(jnp.bfloat16)), AXIS)

    def full(x):
        return jax.lax.psum(jnp.sum(x), AXIS)

    programs = [lower(body, jnp.ones((8, 3))) for body in (full, low)]
    audit = Audit(*(lowered_collectives(program.as_text()) for program in programs))
    assert not audit.equal and "bf16" in audit.verdict() and "DIFFERENT" in audit.verdict()
    assert Audit(audit.old, audit.old).equal


def test_a_missing_and_a_doubled_collective_are_named():
    one = Collective("all_reduce", "f32", 6, 8)
    assert Audit(Counter({one: 2}), Counter({one: 1})).verdict() == "DIFFERENT: only the old has 1 all_reduce of 6 f32; only the new has none"
    assert "DIFFERENT" in Audit(Counter(), Counter()).verdict() and not Audit(Counter(), Counter()).equal


@pytest.mark.parametrize("text", ["", "module @jit {}"])
def test_a_program_without_collectives_holds_none(text):
    assert not lowered_collectives(text) and not compiled_collectives(text)
