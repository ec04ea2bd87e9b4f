"""The mesh check passes on every mesh that divides the rows, and fails as soon as one thing in it is wrong."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from kgo_shard.diff import mesh_check
from kgo_shard.diff.mesh_check import Gradients, check_mesh


def failed(check):
    return [row.name for row in check.rows if not row.passed]


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_passes_and_shows_the_factor(devices):
    check = check_mesh(devices)
    assert check.passed and check.exit_code == 0, failed(check)
    by_name = {row.name: row for row in check.rows}
    for side in ("pmap", "shard_map"):
        assert by_name[f"{side}: averaged gradient"].got == (-2.966796875, -3.041015625)
        assert by_name[f"{side}: largest error of the averaged gradient"].got == (0.0,)
        assert by_name[f"{side}: summed / reference gradient"].got == (devices, devices)
    assert next(row for row in check.rows if row.name.startswith("naive port")).got == (devices, devices)
    assert check.verdict().startswith("PASSED")


def test_expected_numbers_follow_from_the_formula():
    x, y = mesh_check.rows()
    assert x.dtype == y.dtype == np.float32 and x[-1].tolist() == [62 / 32, 63 / 32]
    mean = [np.mean([-2 * (2 * a - b + 0.25) * z for a, b, z in zip(*x.T.tolist(), column.tolist())]) for column in x.T]
    assert mean == list(mesh_check.REFERENCE_GRADIENT)
    assert mesh_check.valid_rows().sum() == mesh_check.NUM_VALID


def test_wrong_expectation_fails(monkeypatch):
    monkeypatch.setattr(mesh_check, "REFERENCE_GRADIENT", (-2.966796875, np.nextafter(np.float32(-3.041015625), np.float32(0))))
    check = check_mesh(4)
    assert check.exit_code == 1 and "reference gradient by the formula in float64" in failed(check)
    assert check.verdict().startswith("FAILED")


def test_unreduced_gradient_fails(monkeypatch):
    """What one device computes by itself is returned as if it were the mean."""

    def unreduced(devices, x, y, valid):
        first = slice(len(x) // len(devices))
        return Gradients(*[mesh_check.formula_gradient(x[first], y[first], valid[first])] * 3)

    monkeypatch.setattr(mesh_check, "pmap_gradients", unreduced)
    names = failed(check_mesh(4))
    assert names and all(name.startswith("pmap:") for name in names)


def test_weights_not_cast_to_varying_fail(monkeypatch):
    monkeypatch.setattr(mesh_check, "as_varying", lambda x: x)
    names = failed(check_mesh(8))
    assert "shard_map: averaged gradient" in names and "pmap: averaged gradient" not in names
    assert check_mesh(1).passed  # on one device nothing can go wrong, which is why one device proves nothing


def test_naive_port_that_happens_to_be_right_fails(monkeypatch):
    """If JAX's rule changed, this package's whole advice would have to change: the check must say so."""
    monkeypatch.setattr(mesh_check, "naive_gradient", lambda mesh, x, y: np.array(mesh_check.REFERENCE_GRADIENT))
    assert failed(check_mesh(4)) == [
        "naive port: pmean(grad) of replicated weights / reference, devices times too large"
    ]


def test_equal_counts_would_prove_nothing_and_fail(monkeypatch):
    monkeypatch.setattr(mesh_check, "valid_rows", lambda: np.tile(np.float32([1, 0]), 16))
    assert failed(check_mesh(8)) == ["unequal valid rows: the mean of means is wrong (1: yes)"]


def test_nan_never_passes():
    assert not mesh_check.expect("", (1.0,), (np.nan,), 10.0).passed
    assert not mesh_check.expect("", (1.0,), (1.0, 1.0)).passed


@pytest.mark.parametrize("devices", [3, 0, -1, 12, 64])
def test_devices_that_do_not_divide_the_rows_are_refused(devices):
    with pytest.raises(ValueError, match=f"{devices} devices do not divide 32 rows"):
        check_mesh(devices)


def test_too_few_devices_say_how_to_get_more(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(mesh_check.jax, "devices", lambda: one)
    with pytest.raises(ValueError, match=r'4 devices were asked for, there are 1 .*jax_num_cpu_devices", 4'):
        check_mesh(4)


def test_table_shows_every_row():
    check = check_mesh(2)
    console = Console(file=io.StringIO(), width=160)
    console.print(mesh_check.mesh_table(check))
    text = console.file.getvalue()
    assert all(row.name in text for row in check.rows) and "-2.966796875, -3.041015625" in text and "passed" in text
    assert len(mesh_check.mesh_rows(check)) == len(check.rows)
