"""The dictionary between the original's names and this package's modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kgo_shard import convert
from kgo_shard.config import Config, ModelConfig
from kgo_shard.convert import ConvertError
from kgo_shard.model import init_net

NAMES = [
    *(
        f"blocks/{i}/{leaf}"
        for i in range(2)
        for leaf in "ffn_w1/w ffn_w2/w ffn_wgate/w k_proj/w norm1/weight norm2/weight out_proj/w q_proj/w v_proj/w".split()
    ),
    "conv_spatial/w",
    "linear_global/w",
    "norm_final/weight",
    "policy_head/linear_board/b",
    "policy_head/linear_board/w",
    "policy_head/linear_pass/b",
    "policy_head/linear_pass/w",
    "value_head/linear_s_simple/b",
    "value_head/linear_s_simple/w",
    "value_head/linear_sv/b",
    "value_head/linear_sv/w",
]


@pytest.fixture(scope="module")
def net():
    config = ModelConfig(num_layers=2, hidden_size=8, num_heads=2, ffn_dim=12, pos_len=3)
    return init_net(jax.random.PRNGKey(0), config, Config(compute_dtype="float32").precision, 0.02)


@pytest.fixture
def named(net):
    return {name: np.asarray(leaf) for name, leaf in convert.to_named(net).items()}


def test_every_leaf_has_one_name_and_every_name_one_leaf(net):
    table = convert.name_table(net.config)
    assert list(table.values()) == NAMES and len(set(NAMES)) == len(NAMES)
    assert set(table) == {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(net)}
    assert list(convert.to_named(net)) == NAMES


def test_names_stand_for_the_originals_roles(net):
    named = convert.to_named(net)
    assert named["conv_spatial/w"] is net.stem.conv and named["linear_global/w"] is net.stem.linear.weight
    for i, block in enumerate(net.blocks):
        for name, leaf in {
            "norm1/weight": block.norm_attention.weight,
            "norm2/weight": block.norm_ffn.weight,
            "q_proj/w": block.attention.qkv[0].weight,
            "k_proj/w": block.attention.qkv[1].weight,
            "v_proj/w": block.attention.qkv[2].weight,
            "out_proj/w": block.attention.out.weight,
            "ffn_w1/w": block.ffn.up_gate[0].weight,  # the one that goes through silu
            "ffn_wgate/w": block.ffn.up_gate[1].weight,
            "ffn_w2/w": block.ffn.down.weight,
        }.items():
            assert named[f"blocks/{i}/{name}"] is leaf, name
    assert named["norm_final/weight"] is net.norm.weight
    assert named["policy_head/linear_board/w"] is net.policy_head.board.weight
    assert named["policy_head/linear_pass/b"] is net.policy_head.pass_move.bias
    assert named["value_head/linear_sv/w"] is net.value_head.spatial_and_value.weight
    assert named["value_head/linear_s_simple/b"] is net.value_head.score.bias


def test_there_and_back_is_the_same_net(net, named):
    back = convert.from_named(net, named)
    assert jax.tree.structure(back) == jax.tree.structure(net)
    for old, new in zip(jax.tree.leaves(net), jax.tree.leaves(back), strict=True):
        assert np.asarray(old).tobytes() == new.tobytes()


def test_names_are_in_the_order_in_which_jax_flattens_the_original(named):
    # The gradient norm adds the leaves in this order.
    leaves = jax.tree.leaves(convert.nest(named))
    assert len(leaves) == len(named) and all(a is b for a, b in zip(leaves, named.values()))


def test_more_than_ten_blocks_keep_their_numbers():
    config = ModelConfig(num_layers=12, hidden_size=8, num_heads=2, ffn_dim=12, pos_len=3)
    assert [name for name in convert.name_table(config).values() if name.endswith("q_proj/w")] == [f"blocks/{i}/q_proj/w" for i in range(12)]


def test_a_missing_leaf_is_named(net, named):
    del named["blocks/1/k_proj/w"]
    with pytest.raises(ConvertError, match="leaf blocks/1/k_proj/w is missing"):
        convert.from_named(net, named)


def test_an_extra_leaf_is_named(net, named):
    with pytest.raises(ConvertError, match="leaf blocks/2/q_proj/w is not part of this model"):
        convert.from_named(net, named | {"blocks/2/q_proj/w": np.zeros((8, 8))})


@pytest.mark.parametrize("shape", [(4, 29, 8), (8, 29), (29, 9), (232,), ()])
def test_a_leaf_of_another_shape_is_named_with_both_shapes(net, named, shape):
    with pytest.raises(ConvertError) as error:
        convert.from_named(net, named | {"value_head/linear_sv/w": np.zeros(shape)})
    assert f"leaf value_head/linear_sv/w has shape {shape}, expected (29, 8)" in str(error.value)


def test_shapes_alone_are_enough_to_build_on(net, named):
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), net)
    assert convert.to_named(convert.from_named(like, named)).keys() == named.keys()


def test_nesting_and_flattening_undo_each_other(named):
    tree = convert.nest(named)
    assert set(tree) == {"blocks", "conv_spatial", "linear_global", "norm_final", "policy_head", "value_head"}
    assert type(tree["blocks"]) is list and len(tree["blocks"]) == 2
    assert set(tree["blocks"][0]) == {"norm1", "norm2", "q_proj", "k_proj", "v_proj", "out_proj", "ffn_w1", "ffn_wgate", "ffn_w2"}
    assert set(tree["policy_head"]) == {"linear_board", "linear_pass"} and set(tree["policy_head"]["linear_board"]) == {"w", "b"}
    flat = convert.flatten(tree)
    assert flat.keys() == named.keys() and all(flat[name] is named[name] for name in named)


def test_the_conversion_works_on_any_net_shaped_tree(net):
    shapes = convert.to_named(jax.tree.map(lambda leaf: leaf.shape[0], net))
    assert shapes["conv_spatial/w"] == 8 and shapes["value_head/linear_sv/b"] == 29
    doubled = convert.to_named(jax.tree.map(lambda leaf: 2 * leaf, net))
    assert all(jnp.array_equal(doubled[name], 2 * leaf) for name, leaf in convert.to_named(net).items())


# Every layout


LAYOUTS = [{}, {"fused": True}, {"stacked": True}, {"stacked": True, "fused": True}, {"stacked": True, "scanned": True}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(layout) or "list")
def test_the_table_is_a_bijection_in_every_layout(layout):
    config = ModelConfig(num_layers=3, hidden_size=8, num_heads=2, ffn_dim=12, pos_len=3, **layout)
    net = init_net(jax.random.PRNGKey(0), config, Config(compute_dtype="float32").precision, 0.02)
    table = convert.name_table(config)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(net)]
    assert sorted(table) == sorted(paths) and len(set(table.values())) == len(table)
    # Distinct numbers in every leaf come back to where they were, by names and through the original's nested tree.
    numbers = iter(range(1000))
    marked = jax.tree.map(lambda leaf: np.full(leaf.shape, next(numbers)), net)
    named = convert.to_named(marked)
    for back in (convert.from_named(net, named), convert.from_named(net, convert.flatten(convert.nest(named)))):
        assert jax.tree.structure(back) == jax.tree.structure(net)
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(marked), strict=True))
    leaves = jax.tree.leaves(convert.nest(named))  # the order of the gradient norm's sum
    assert len(leaves) == len(named) and all(a is b for a, b in zip(leaves, named.values()))


@pytest.mark.parametrize("fused", [False, True])
def test_blocks_of_a_list_are_named_by_number_and_stacked_ones_are_not(fused):
    sizes = dict(num_layers=2, hidden_size=8, num_heads=2, ffn_dim=12, pos_len=3, fused=fused)
    parts = {"norm1/weight", "norm2/weight", "out_proj/w", "ffn_w2/w"}
    parts |= {"qkv_proj/w", "ffn_upgate/w"} if fused else {"q_proj/w", "k_proj/w", "v_proj/w", "ffn_w1/w", "ffn_wgate/w"}
    blocks = [name for name in convert.name_table(ModelConfig(**sizes)).values() if name.startswith("blocks/")]
    assert set(blocks) == {f"blocks/{i}/{part}" for i in (0, 1) for part in parts}
    stacked = [name for name in convert.name_table(ModelConfig(**sizes, stacked=True)).values() if name.startswith("blocks/")]
    assert set(stacked) == {f"blocks/{part}" for part in parts}


def test_another_layout_is_refused_by_name(net, named):
    stacked = ModelConfig(num_layers=2, hidden_size=8, num_heads=2, ffn_dim=12, pos_len=3, stacked=True)
    like = init_net(jax.random.PRNGKey(0), stacked, Config(compute_dtype="float32").precision, 0.02)
    with pytest.raises(ConvertError, match="blocks/.* is not part of this model: was the file written with another model or layout"):
        convert.from_named(like, named)
