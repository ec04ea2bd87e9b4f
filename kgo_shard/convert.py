"""The one dictionary between the original's parameter names and this package's modules.

An original leaf is named by its path in the nested dicts, as in `blocks/0/q_proj/w`. The order of the table is the
order in which JAX flattens the original's tree, and with it the order of the gradient norm's sum.
"""

import re
from collections.abc import Mapping

import jax
import numpy as np

from .config import ModelConfig

# (original name, path) within a block. In a list of blocks both have the block's number before them, in stacked blocks
# neither. Fused projections have the two fused names in place of five others.
BLOCK_TABLE = (
    ("ffn_upgate/w", ".ffn.up_gate.weight"),
    ("ffn_w1/w", ".ffn.up_gate[0].weight"),
    ("ffn_w2/w", ".ffn.down.weight"),
    ("ffn_wgate/w", ".ffn.up_gate[1].weight"),
    ("k_proj/w", ".attention.qkv[1].weight"),
    ("norm1/weight", ".norm_attention.weight"),
    ("norm2/weight", ".norm_ffn.weight"),
    ("out_proj/w", ".attention.out.weight"),
    ("q_proj/w", ".attention.qkv[0].weight"),
    ("qkv_proj/w", ".attention.qkv.weight"),
    ("v_proj/w", ".attention.qkv[2].weight"),
)
FUSED = {"ffn_upgate/w", "qkv_proj/w"}
SEPARATE = {"ffn_w1/w", "ffn_wgate/w", "k_proj/w", "q_proj/w", "v_proj/w"}
TABLE = (
    ("conv_spatial/w", ".stem.conv"),
    ("linear_global/w", ".stem.linear.weight"),
    ("norm_final/weight", ".norm.weight"),
    ("policy_head/linear_board/b", ".policy_head.board.bias"),
    ("policy_head/linear_board/w", ".policy_head.board.weight"),
    ("policy_head/linear_pass/b", ".policy_head.pass_move.bias"),
    ("policy_head/linear_pass/w", ".policy_head.pass_move.weight"),
    ("value_head/linear_s_simple/b", ".value_head.score.bias"),
    ("value_head/linear_s_simple/w", ".value_head.score.weight"),
    ("value_head/linear_sv/b", ".value_head.spatial_and_value.bias"),
    ("value_head/linear_sv/w", ".value_head.spatial_and_value.weight"),
)


class ConvertError(ValueError):
    """A parameter tree that is not this model's; the message names the leaf."""


def name_table(config: ModelConfig) -> dict[str, str]:
    """Path in Net -> original name, in the original's order."""
    absent = SEPARATE if config.fused else FUSED
    block = [(name, path) for name, path in BLOCK_TABLE if name not in absent]
    places = [("", "")] if config.stacked else [(f"{i}/", f"[{i}]") for i in range(config.num_layers)]
    blocks = [(f"blocks/{number}{name}", f".blocks{index}{path}") for number, index in places for name, path in block]
    return {path: name for name, path in (*blocks, *TABLE)}


def to_named(net) -> dict[str, jax.Array]:
    """The leaves of a net-shaped tree under their original names, in the original's order."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(net)}
    return {name: leaves[path] for path, name in name_table(net.config).items()}


def from_named(net, named: Mapping[str, np.ndarray]):
    """A net like `net` (arrays or shapes) with the given leaves. Raises ConvertError naming a leaf that does not fit."""
    names = name_table(net.config)
    for name in named.keys() - set(names.values()):
        raise ConvertError(f"leaf {name} is not part of this model: was the file written with another model or layout?")

    def take(path, leaf):
        name = names[jax.tree_util.keystr(path)]
        if name not in named:
            raise ConvertError(f"leaf {name} is missing: was the file written with another model or layout?")
        if named[name].shape != leaf.shape:
            raise ConvertError(f"leaf {name} has shape {named[name].shape}, expected {leaf.shape}")
        return named[name]

    return jax.tree_util.tree_map_with_path(take, net)


def nest(named: Mapping[str, np.ndarray]) -> dict:
    """`{"blocks/0/q_proj/w": x, ...}` -> the original's nested dicts; `blocks` is a list unless its parts have no numbers."""
    tree: dict = {}
    for name, leaf in named.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    if "0" in tree.get("blocks", ()):
        tree["blocks"] = [tree["blocks"][str(i)] for i in range(len(tree["blocks"]))]
    return tree


def flatten(tree) -> dict[str, np.ndarray]:
    """The inverse of `nest`: nested dicts and lists -> original names."""
    return {"/".join(_path_words(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _path_words(path) -> list[str]:
    return re.findall(r"[^\[\]']+", jax.tree_util.keystr(path))
