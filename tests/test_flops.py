"""FLOPs of the model and of Muon, by numbers worked out by hand for b2c32: 2 blocks, C 32, H 2, D 16, F 64."""

import itertools
from collections import Counter

import jax
import pytest

from kgo_shard import muon, optim
from kgo_shard.config import Config
from kgo_shard.flops import forward_flops, muon_flops, muon_line, muon_matrices, training_flops
from kgo_shard.state import learned_shapes


def small(**options):
    return Config(pos_len=9, model_kind="b2c32", **options)


def test_the_parts_are_the_specifications_and_sum_to_its_whole():
    layers, c, f, a = 2, 32, 64, 81
    s = (a + 60) * 2
    parts = forward_flops(small().model)
    blocks = layers * (8 * a * c**2 + 4 * a**2 * c + 6 * a * c * f)
    forward = blocks + 2 * 22 * 9 * c * a + 2 * 19 * c + (12 * a * c + 12 * c) + 58 * a * c + 2 * c * s
    assert parts["stem"] + layers * (parts["attention"] + parts["ffn"]) + parts["heads"] == parts["forward"] == forward
    assert (parts["block"], parts["trunk"]) == (parts["attention"] + parts["ffn"], blocks)
    # The convolution is 396 * 32 * 81, the linear of the globals 38 * 32.
    assert (parts["stem"], parts["attention"], parts["ffn"]) == (1026432 + 1216, 663552 + 839808, 995328)
    assert training_flops(small().model) == 3 * forward


# FLOPs of one polar step on one matrix: 2 m m n + 2 m m m + 2 m m n.
HEAD = 16384 + 8192 + 16384  # 16 x 32: one head of q, k or v
SQUARE = 3 * 65536  # 32 x 32: out
UP = 131072 + 65536 + 131072  # 64 x 32, and its transpose
UP_GATE = 262144 + 65536 + 262144  # 128 x 32: the fused one
DOWN_CHUNK = 32768 + 8192 + 32768  # 16 x 64: half of down


@pytest.mark.parametrize(
    ("target", "fused", "split", "one_block"),
    [
        ("all", False, 0, 6 * HEAD + SQUARE + 3 * UP),
        ("attn", False, 0, 6 * HEAD + SQUARE),
        ("ffn", False, 0, 3 * UP),
        ("square", False, 0, 6 * HEAD + SQUARE),
        ("none", False, 0, 0),
        # Heads stay whole; out becomes 2 of 16 x 32, up and gate 4 each, down 2 of 16 x 64.
        ("all", False, 16, (6 + 2 + 8) * HEAD + 2 * DOWN_CHUNK),
        ("attn", False, 16, (6 + 2) * HEAD),
        ("ffn", False, 16, 8 * HEAD + 2 * DOWN_CHUNK),
        ("square", False, 16, (6 + 2) * HEAD),
        ("none", False, 16, 0),
        # 96 x 32 is 6 heads and not square; 128 x 32 is one matrix, or 8 chunks.
        ("all", True, 0, 6 * HEAD + SQUARE + UP_GATE + UP),
        ("attn", True, 0, 6 * HEAD + SQUARE),
        ("ffn", True, 0, UP_GATE + UP),
        ("square", True, 0, SQUARE),
        ("none", True, 0, 0),
        ("all", True, 16, (6 + 2 + 8) * HEAD + 2 * DOWN_CHUNK),
        ("attn", True, 16, (6 + 2) * HEAD),
        ("ffn", True, 16, 8 * HEAD + 2 * DOWN_CHUNK),
        ("square", True, 16, 2 * HEAD),
        # Not taller than the chunk, or not a multiple of it: whole.
        ("attn", False, 32, 6 * HEAD + SQUARE),
        ("all", False, 24, 6 * HEAD + SQUARE + 3 * UP),
    ],
)
def test_muons_flops_are_those_of_its_matrices(target, fused, split, one_block):
    config = small(muon_target=target, fuse_projections=fused, muon_row_split_size=split, muon_polar_steps=3)
    assert muon_flops(config) == 2 * 3 * one_block


@pytest.mark.parametrize("fused", [False, True])
def test_the_counted_matrices_are_those_that_the_update_cuts(fused):
    """The table in flops.py against the labels and the cuts of the update itself."""
    for target, size in itertools.product(("all", "attn", "ffn", "square", "none"), (0, 16, 24, 32)):
        config = Config(optimizer="muon", model_kind="b2c32", muon_target=target, muon_row_split_size=size, fuse_projections=fused)
        net = learned_shapes(config).net
        found: Counter = Counter()
        for leaf, rule in zip(jax.tree.leaves(net), jax.tree.leaves(optim.rule_labels(net, config)), strict=True):
            if rule in optim.MUON:
                *pieces, rows, columns = jax.eval_shape(lambda m, rule=rule: muon.split(m, rule, config), leaf).shape
                found[rows, columns] += pieces[0] if pieces else 1
        counted: Counter = Counter()
        for count, rows, columns in muon_matrices(config):
            counted[rows, columns] += 2 * count  # of both blocks
        assert found == counted and (target == "none") == (not found), (target, size)


def test_the_whole_count_by_hand():
    assert muon_flops(small()) == 14254080  # 5 polar steps, 2 blocks, 1425408 a block


def test_separate_projections_win():
    config = small(muon_target="square", fuse_projections=True, separate_projections=True)
    assert muon_flops(config) == muon_flops(small(muon_target="square"))


def test_the_line_gives_the_share_of_a_whole_steps_model_flops():
    config = small(batch_size=32)
    share = 100 * 14254080 / (32 * training_flops(config.model))
    assert muon_line(config) == f"Muon FLOPs per step: 1.43e+07 ({share:.1f}% of the model's)" and 1 < share < 10
    assert muon_line(small(muon_target="none")) == "Muon FLOPs per step: 0.00e+00 (0.0% of the model's)"
