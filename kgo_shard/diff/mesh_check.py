"""The smallest check before any training: a linear model with two weights, whose gradient is known, on a mesh.

Every number in it is a small multiple of a power of two, and the devices share 32 rows, so that each product, sum and quotient
is exact in float32 whatever the order: what comes out is the right number or a wrong one, never a nearly right one.
Only elementwise products and sums are used, so no accelerator's matrix precision enters either.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from kgo_shard.diff import limits

ROWS = 32
TRUE_WEIGHTS = (2.0, -1.0)
TRUE_OFFSET = 0.25
REFERENCE_GRADIENT = (-2.966796875, -3.041015625)
AXIS = "data"

# What the masked part counts: the first eight rows and every third after them. 16 rows are valid, a power of two, so that the
# division by their number is exact; every way of dealing 32 rows to devices gives some device more of them than another.
NUM_VALID = 16


class Expectation(NamedTuple):
    """One row of the check."""

    name: str
    expected: tuple[float, ...]
    got: tuple[float, ...]
    limit: float  # of the largest difference between the two
    passed: bool


class MeshCheck(NamedTuple):
    devices: int
    device_kind: str
    rows: tuple[Expectation, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    def verdict(self) -> str:
        """One sentence."""
        failed = [row.name for row in self.rows if not row.passed]
        if failed:
            return f"FAILED: {len(failed)} of {len(self.rows)} expectations on {self.devices} devices, first: {failed[0]}"
        return f"PASSED: {len(self.rows)} expectations on {self.devices} devices ({self.device_kind})"


def check_mesh(devices: int) -> MeshCheck:
    """Checks what gradients are under `jax.pmap` and `jax.shard_map` on the first `devices` devices.

    ValueError: `devices` does not divide 32, or there are not so many.
    """
    if devices < 1 or ROWS % devices:
        raise ValueError(f"check-mesh deals {ROWS} rows to the devices: {devices} devices do not divide {ROWS} rows")
    available = jax.devices()
    if len(available) < devices:
        raise ValueError(
            f"{devices} devices were asked for, there are {len(available)} ({available[0].device_kind}): for logical CPU devices "
            f'call jax.config.update("jax_num_cpu_devices", {devices}) before JAX starts, or set '
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        )
    chosen = available[:devices]
    mesh = Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,))
    x, y = rows()
    valid = valid_rows()
    everything = np.ones(ROWS, np.float32)
    reference = formula_gradient(x, y, everything)
    masked = formula_gradient(x, y, valid)
    shards = [formula_gradient(*shard) for shard in zip(*(np.split(part, devices) for part in (x, y, valid)))]
    mean_of_means = np.mean(shards, axis=0)
    # A local mean is one division; then come the sum of the devices and its division: each rounds once at most.
    rounding = limits.summation_limit(devices + 2, float(np.abs(shards).sum() / devices), np.dtype(np.float32))

    by_pmap = pmap_gradients(chosen, x, y, everything)
    by_shard_map = shard_map_gradients(mesh, x, y, everything)
    masked_gradients = shard_map_gradients(mesh, x, y, valid)
    naive = naive_gradient(mesh, x, y)
    found = [
        expect("reference gradient by the formula in float64", REFERENCE_GRADIENT, reference),
        expect("valid rows", (NUM_VALID,), (valid.sum(),)),
    ]
    for name, got in (("pmap", by_pmap), ("shard_map", by_shard_map)):
        found += [
            expect(f"{name}: averaged gradient", REFERENCE_GRADIENT, got.averaged),
            expect(f"{name}: largest error of the averaged gradient", (0.0,), (np.abs(got.averaged - REFERENCE_GRADIENT).max(),)),
            expect(f"{name}: summed / reference gradient", (devices, devices), got.summed / np.array(REFERENCE_GRADIENT)),
        ]
    found += [
        expect(
            "naive port: pmean(grad) of replicated weights / reference, devices times too large",
            (devices, devices),
            naive / np.array(REFERENCE_GRADIENT),
        ),
        expect(
            "unequal valid rows: mean of the devices' means, not what one device computes",
            mean_of_means,
            masked_gradients.averaged,
            rounding,
        ),
        expect("unequal valid rows: sum of rows' gradients / all valid rows", masked, masked_gradients.per_valid_row),
    ]
    if devices > 1:
        # Otherwise the two rows above would show the same thing, and prove nothing.
        far = bool(np.abs(masked_gradients.averaged - masked).max() > rounding)
        found.append(expect("unequal valid rows: the mean of means is wrong (1: yes)", (1.0,), (float(far),)))
    return MeshCheck(devices, chosen[0].device_kind, tuple(found))


def mesh_table(check: MeshCheck) -> Table:
    """The check as a table for the terminal."""
    table = Table(title=f"check-mesh: {check.devices} devices ({check.device_kind})")
    for column in ("", "expected", "got", "verdict"):
        table.add_column(column, overflow="fold")
    for name, expected, got, verdict in mesh_rows(check):
        table.add_row(name, expected, got, verdict, style=None if verdict == "passed" else "bold red")
    return table


def mesh_rows(check: MeshCheck) -> list[tuple[str, str, str, str]]:
    """The check as rows of text, for a report."""
    return [
        (row.name, show(row.expected), show(row.got), "passed" if row.passed else "FAILED") for row in check.rows
    ]


def show(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:.10g}" for number in numbers)


def expect(name: str, expected, got, limit: float = 0.0) -> Expectation:
    """`got` must be `expected`, exactly or within a derived limit. NaN never passes."""
    expected, got = np.asarray(expected, np.float64), np.asarray(got, np.float64)
    passed = expected.shape == got.shape and bool((np.abs(got - expected) <= limit).all())
    return Expectation(name, tuple(expected.tolist()), tuple(got.tolist()), limit, passed)


# The problem and its answer by the formula


def rows() -> tuple[np.ndarray, np.ndarray]:
    """x (32, 2) and y (32,), float32."""
    x = (np.arange(2 * ROWS, dtype=np.float32) / ROWS).reshape(ROWS, 2)
    return x, x @ np.array(TRUE_WEIGHTS, np.float32) + np.float32(TRUE_OFFSET)


def valid_rows() -> np.ndarray:
    """(32,) float32 of ones and zeros."""
    index = np.arange(ROWS)
    return ((index < 8) | (index % 3 == 0)).astype(np.float32)


def formula_gradient(x: np.ndarray, y: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """(2,) float64: gradient at zero weights of the mean over the valid rows of (x @ w - y)^2; zero without valid rows."""
    x, y, valid = (np.asarray(part, np.float64) for part in (x, y, valid))
    return (-2 * y * valid) @ x / max(valid.sum(), 1)


# The same on devices


class Gradients(NamedTuple):
    """(2,) float64 each."""

    averaged: np.ndarray  # mean over the devices of each device's mean over its valid rows
    summed: np.ndarray  # sum over the devices of the same
    per_valid_row: np.ndarray  # sum of all rows' gradients by the number of all valid rows


def sum_loss(weights: jax.Array, x: jax.Array, y: jax.Array, valid: jax.Array) -> jax.Array:
    predicted = jnp.sum(x * weights[None, :], axis=-1)
    return jnp.sum(valid * (predicted - y) ** 2)


def mean_loss(weights: jax.Array, x: jax.Array, y: jax.Array, valid: jax.Array) -> jax.Array:
    return sum_loss(weights, x, y, valid) / jnp.maximum(jnp.sum(valid), 1)


def reduced_gradients(weights: jax.Array, x: jax.Array, y: jax.Array, valid: jax.Array) -> Gradients:
    """One device's part; `weights` must count as this device's own, so that `grad` does not sum over the axis by itself."""
    mean_local = jax.grad(mean_loss)(weights, x, y, valid)
    sum_local = jax.grad(sum_loss)(weights, x, y, valid)
    return Gradients(
        jax.lax.pmean(mean_local, AXIS),
        jax.lax.psum(mean_local, AXIS),
        jax.lax.psum(sum_local, AXIS) / jax.lax.psum(jnp.sum(valid), AXIS),
    )


def pmap_gradients(devices: list, x: np.ndarray, y: np.ndarray, valid: np.ndarray) -> Gradients:
    weights = np.zeros((len(devices), 2), np.float32)
    sharded = [part.reshape(len(devices), -1, *part.shape[1:]) for part in (x, y, valid)]
    stacked = jax.pmap(reduced_gradients, axis_name=AXIS, devices=devices)(weights, *sharded)
    # The whole array comes to the host: `stacked[0]` would be another program on the devices.
    return Gradients(*(np.asarray(part, np.float64)[0] for part in stacked))


def shard_map_gradients(mesh: Mesh, x: np.ndarray, y: np.ndarray, valid: np.ndarray) -> Gradients:
    def body(weights, x, y, valid):
        return reduced_gradients(as_varying(weights), x, y, valid)

    return Gradients(*on_mesh(mesh, body, x, y, valid))


def naive_gradient(mesh: Mesh, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The pmap body moved unchanged: `grad` of a replicated value has summed already, and `pmean` of equal sums is the sum."""

    def body(weights, x, y, valid):
        return jax.lax.pmean(jax.grad(mean_loss)(weights, x, y, valid), AXIS)

    return on_mesh(mesh, body, x, y, np.ones(ROWS, np.float32))


def on_mesh(mesh: Mesh, body, x: np.ndarray, y: np.ndarray, valid: np.ndarray):
    """Runs body(weights, x, y, valid) with replicated zero weights and rows split over the mesh; float64 host arrays."""
    split, replicated = PartitionSpec(AXIS), PartitionSpec()
    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(replicated, split, split, split), out_specs=replicated, check_vma=True)
    )
    weights = jax.device_put(np.zeros(2, np.float32), NamedSharding(mesh, replicated))
    shards = (jax.device_put(part, NamedSharding(mesh, split)) for part in (x, y, valid))
    return jax.tree.map(partial(np.asarray, dtype=np.float64), step(weights, *shards))


def as_varying(x: jax.Array) -> jax.Array:
    """Casts a replicated value to one that may differ between devices. JAX 0.7.2 has only `pvary`, 0.10 only `pcast`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, AXIS, to="varying")
    return jax.lax.pvary(x, AXIS)
