"""A part of the long matrix with fewer steps, and the committed results of the whole one."""

import itertools
import json
from pathlib import Path

import pytest

from kgo_shard.config import Config

from . import matrix

RESULTS = Path(__file__).parent / "results"

# One device under plain jit, many with several steps a call, and settings that together touch every option.
SHORT = (("onex4xnoclip", 5),)
LONG = (
    ("muon-fused-updatebf16-3-1", 2),
    ("16x4xclip", 5),
    ("muon-scanned-float32-4-4", 4),
    ("muon-stacked-computebf16-one-1", 2),
    ("sgd-list-float32-8-1", 2),
    ("split-muon-stacked-6", 4),
)
SUBSET = SHORT + LONG


@pytest.mark.parametrize(("setting", "steps"), [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_old_equals_new_in_every_bit(setting, steps):
    comparison = matrix.compare_setting(setting, steps)
    assert comparison.equal, comparison.verdict()
    assert comparison.steps == steps and comparison.has_reference == matrix.is_bounded(setting)


def values_met(settings) -> dict[str, set]:
    met: dict[str, set] = {}
    for setting in settings:
        options = matrix.options_of(setting)
        for name, value in options.items():
            if not name.startswith("muon_") or options.get("optimizer") == "muon":
                met.setdefault(name, set()).add(value)
    return met


def test_every_pair_of_the_factors_is_in_the_matrix():
    factors = list(matrix.FACTORS.values())
    for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2):
        for pair in itertools.product(first, second):
            assert any((row[i], row[j]) == pair for row in matrix.PAIRS.values()), pair
    assert len(set(matrix.SETTINGS)) == len(matrix.SETTINGS)


# Not of the step's arithmetic: folders, the loop's marks and lines (tests/parity/test_train.py), the profile, and refusals.
ELSEWHERE = {
    "traindir", "datadir", "model_kind", "score_mode", "pos_len", "print_every", "save_every_samples", "val_every_samples",
    "max_val_batches", "allow_nonfull_mask", "no_resume", "no_final_save", "separate_projections", "int8_train", "int8_target",
    "int8_fwd_bits", "int8_bwd_bits", "log_step_time", "component_profile", "component_profile_repeats", "component_profile_grad",
    "xla_peak_tflops", "objective", "check_replicas", "checkpoint_format", "keep", "resume_order", "allow_changes",
    "on_nonfinite", "skip_bad_files", "tensorboard", "master_dtype",
}  # fmt: skip


def test_the_matrix_meets_every_option_with_more_than_one_value():
    met = values_met(matrix.SETTINGS)
    for name, row in Config.__dataclass_fields__.items():
        if name not in ELSEWHERE:
            assert len(met.get(name, set()) | {row.default}) > 1, name
            choices = set(row.metadata["choices"]) - {"fp32", "bfloat16", "float32", "bf16"}
            assert choices <= met.get(name, set()) | {row.default}, name
    for name in (name for name in Config.__dataclass_fields__ if name.endswith("_dtype") and name not in ELSEWHERE):
        assert {value.replace("bfloat16", "bf16") for value in met[name]} | {"float32"} == {"bf16", "float32"}, name


def test_the_subset_touches_every_option_too():
    whole, part = values_met(matrix.SETTINGS), values_met(setting for setting, _ in SUBSET)
    choice = {name for name, row in Config.__dataclass_fields__.items() if isinstance(row.default, bool) or name.endswith("_dtype")}
    choice |= {"optimizer", "attention_impl", "grad_clip_norm", "ema_decay", "lr_schedule", "muon_row_split_size", "muon_target"}
    few = {name: (part[name], whole[name]) for name in choice & whole.keys() if len(part[name]) < 2 <= len(whole[name])}
    assert few == {}


@pytest.mark.parametrize("version", ["0.7.2", "0.10.2"])
def test_the_committed_results_are_of_the_whole_matrix_and_equal(version):
    """On 0.7.2 without the split state, of which `nox -s jax072` compares a setting."""
    results = json.loads((RESULTS / f"matrix_jax_{version}.json").read_text())
    assert results["environment"]["JAX"] == version
    assert set(results["settings"]) == set(matrix.SETTINGS) - (set(matrix.SPLIT) if version == "0.7.2" else set())
    for setting, entry in results["settings"].items():
        assert entry["passed"] and entry["steps"] == 40 and entry["leaves"] > 600 and entry["date"] and entry["commit"], (setting, entry)
        assert "with changes" not in entry["commit"], setting
        assert entry["compared"] == "all stages" or (version == "0.7.2" and setting not in matrix.GRID and entry["compared"] == "states"), setting
        assert entry["demanded"] == ("three-way bound" if matrix.is_bounded(setting) else "every bit"), setting
        assert entry["verdict"].startswith("WITHIN LIMITS:" if matrix.is_bounded(setting) else "EQUAL:"), setting


def test_where_equal_bits_are_not_demanded():
    """Two settings, the only ones on one device without pmap whose parameters are bfloat16, and one with such parameters in shares."""
    bounded = [setting for setting in matrix.SETTINGS if matrix.is_bounded(setting)]
    assert bounded == ["none-scanned-updatebf16-one-4", "sgd-fused-allbf16-one-1", "split-muon-allbf16-4"]


def test_the_state_is_split_in_its_settings_and_in_no_other():
    kinds = {setting: Config(**matrix.options_of(setting)).shard_state for setting in matrix.SETTINGS}
    assert {setting for setting, kind in kinds.items() if kind == "data"} == set(matrix.SPLIT)
    assert {Config(**matrix.options_of(setting)).data_parallel_devices for setting in matrix.SPLIT} == {1, 2, 3, 4, 6, 8, 16}
