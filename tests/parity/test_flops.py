"""Both stacks count the same FLOPs, each from its own table of shapes."""

import itertools

import legacy_pmap
import pytest
from legacy_pmap import flops as old_flops

import kgo_shard
from kgo_shard import flops as new_flops

SIZES = ("b2c32", "b3c96", "b12c512", "b40c768", "b24c2048")


def config_of(stack, **options):
    return stack.Config(**options)


@pytest.mark.parametrize("size", SIZES)
def test_the_model_s_flops_are_equal(size):
    old, new = (config_of(stack, model_kind=size) for stack in (legacy_pmap, kgo_shard))
    assert old_flops.forward_flops(old) == new_flops.forward_flops(new.model)
    assert old_flops.training_flops(old) == new_flops.training_flops(new.model)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", ["all", "attn", "ffn", "square", "none"])
def test_muons_flops_and_line_are_equal(size, target):
    for split, fused, steps in itertools.product((0, 16, 64, 100, 2048), (False, True), (1, 5)):
        options = dict(model_kind=size, muon_target=target, muon_row_split_size=split, fuse_projections=fused, muon_polar_steps=steps)
        old, new = (config_of(stack, **options) for stack in (legacy_pmap, kgo_shard))
        assert old_flops.muon_flops(old) == new_flops.muon_flops(new), options
        assert old_flops.muon_line(old) == new_flops.muon_line(new), options
