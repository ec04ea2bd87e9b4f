"""A part of the long matrix with fewer steps, and the committed results of the whole one."""

import json
from pathlib import Path

import pytest

from . import matrix

RESULTS = Path(__file__).parent / "results"


# One device under plain jit, and many with several steps a call; 8 devices with one step are in test_stages.py.
@pytest.mark.parametrize("setting", ["onex4xnoclip", "16x4xclip"])
def test_old_equals_new_in_every_bit(setting):
    comparison = matrix.compare_setting(setting, steps=5)
    assert comparison.equal, comparison.verdict()
    assert comparison.steps == 5


@pytest.mark.parametrize("version", ["0.7.2", "0.10.2"])
def test_the_committed_settings_were_equal(version):
    """The long matrix is not complete yet: the README says which settings have run. Those that have must be equal."""
    results = json.loads((RESULTS / f"matrix_jax_{version}.json").read_text())
    assert results["environment"]["JAX"] == version
    assert results["steps"] == 40
    assert {"onex1xclip", "onex4xnoclip", "1x1xclip", "2x1xclip"} <= set(results["settings"]) <= set(matrix.SETTINGS)
    assert {name: entry["verdict"] for name, entry in results["settings"].items() if not entry["equal"]} == {}
