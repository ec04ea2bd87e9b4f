"""Model FLOPs: what the mathematics needs (spec, section 6), and what Muon's polar iterations add."""


def forward_flops(config):
    """{part: FLOPs of one sample's forward pass}; attention, ffn and block are one block's."""
    sizes, area = config.model_config, config.board_area
    layers, width, ffn = sizes["num_layers"], sizes["hidden_size"], sizes["ffn_dim"]
    stem = 2 * 22 * 9 * width * area + 2 * 19 * width
    attention = 8 * area * width**2 + 4 * area**2 * width
    feed_forward = 6 * area * width * ffn
    block = attention + feed_forward
    heads = (12 * area * width + 12 * width) + 58 * area * width + 2 * width * config.score_buckets
    return {"stem": stem, "attention": attention, "ffn": feed_forward, "block": block, "trunk": layers * block, "heads": heads,
            "forward": stem + layers * block + heads}


def training_flops(config):
    """FLOPs of one sample, forward and backward: three times the forward's."""
    return 3 * forward_flops(config)["forward"]


def muon_flops(config):
    """FLOPs of one optimizer step's polar iterations, from the shapes alone: the configured optimizer does not matter.

    A step on a matrix with sides m <= n: x x^T, A A, and B x.
    """
    total = 0
    for rows, columns in _muon_matrices(config):
        m, n = min(rows, columns), max(rows, columns)
        total += 2 * m * m * n + 2 * m * m * m + 2 * m * m * n
    return config.muon_polar_steps * config.model_config["num_layers"] * total


def _muon_matrices(config):
    """Shapes of the matrices of one block that Muon orthogonalises, after splitting (spec, section 5)."""
    sizes, target, chunk = config.model_config, config.muon_target, config.muon_row_split_size
    width, ffn, depth = sizes["hidden_size"], sizes["ffn_dim"], sizes["hidden_size"] // sizes["num_heads"]
    # leaf: (target it belongs to, rows, columns)
    leaves = {"out_proj": ("attn", width, width), "ffn_w2": ("ffn", width, ffn)}
    if config.fuse_projections:
        leaves.update(qkv_proj=("attn", 3 * width, width), ffn_upgate=("ffn", 2 * ffn, width))
    else:
        leaves.update({f"{name}_proj": ("attn", width, width) for name in "qkv"})
        leaves.update({name: ("ffn", ffn, width) for name in ("ffn_w1", "ffn_wgate")})
    for name, (kind, rows, columns) in leaves.items():
        if target in ("all", kind) or (target == "square" and rows == columns):
            if name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
                height = depth
            else:
                height = chunk if 0 < chunk < rows and rows % chunk == 0 else rows
            yield from [(height, columns)] * (rows // height)


def muon_line(config):
    flops = muon_flops(config)
    share = flops / (config.batch_size * training_flops(config))
    return f"Muon FLOPs per step: {flops:.2e} ({100 * share:.1f}% of the model's)"
