"""The two tables of options, row by row: both stacks take the same names, defaults, types and values."""

import dataclasses

import pytest

import kgo_shard
import legacy_pmap

OLD, NEW = ({field.name: field for field in dataclasses.fields(stack.Config)} for stack in (legacy_pmap, kgo_shard))
# legacy_pmap is the harness's float64 reference too, and knows one objective; kgo_shard's stands for both.
APART = {"compute_dtype": {"float64"}, "objective": {"global"}}


def test_both_know_the_same_options_in_the_same_order():
    assert list(OLD) == list(NEW)[: len(OLD)] and len(OLD) > 50
    assert set(NEW) - set(OLD) == {"check_replicas", "checkpoint_format", "keep", "resume_order", "allow_changes", "on_nonfinite", "skip_bad_files", "tensorboard", "shard_state", "master_dtype"}  # kgo_shard's own


@pytest.mark.parametrize("name", OLD)
def test_defaults_types_and_allowed_values_agree(name):
    old, new = OLD[name], NEW[name]
    assert (type(old.default), old.default) == (type(new.default), new.default)
    for rule in ("low", "high", "below"):
        assert old.metadata.get(rule) == new.metadata.get(rule), rule
    choices = [set(row.metadata["choices"] or ()) for row in (old, new)]
    assert choices[0] ^ choices[1] == APART.get(name, set())


def outside(row) -> list:
    """Values that the row's rules refuse."""
    rules, values = row.metadata, []
    if rules.get("low") is not None:
        values.append(rules["low"] - 1)
    if rules.get("high") is not None:
        values.append(rules["high"] + 1)
    if rules.get("below") is not None:
        values.append(rules["below"])
    return values + (["nonsense"] if rules.get("choices") or not isinstance(row.default, str | None) else [])


@pytest.mark.parametrize("name", [name for name, row in NEW.items() if outside(row)])
def test_both_refuse_what_is_not_allowed_by_name(name):
    for value in outside(NEW[name]):
        for stack in (legacy_pmap, kgo_shard):
            with pytest.raises(ValueError, match=name):
                stack.Config(**{name: value})
