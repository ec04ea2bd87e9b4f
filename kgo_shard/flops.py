"""Model FLOPs: the floating-point operations that the mathematics needs, however a program does them."""

from . import layout
from .config import Config, ModelConfig


def forward_flops(model: ModelConfig) -> dict[str, int]:
    """Operations of a sample's forward pass, by part: its matrix products. `attention`, `ffn` and `block` are one block's."""
    area, channels, ffn = model.num_points, model.hidden_size, model.ffn_dim
    parts = {
        "stem": 2 * layout.NUM_PLANES * 9 * channels * area + 2 * layout.NUM_GLOBALS * channels,
        "attention": 8 * area * channels**2 + 4 * area**2 * channels,
        "ffn": 6 * area * channels * ffn,
        "heads": 12 * area * channels + 12 * channels + 58 * area * channels + 2 * channels * model.num_score_buckets,
    }
    parts["block"] = parts["attention"] + parts["ffn"]
    parts["trunk"] = model.num_layers * parts["block"]
    return parts | {"forward": parts["stem"] + parts["trunk"] + parts["heads"]}


def training_flops(model: ModelConfig) -> int:
    """Operations a sample, forward and backward: three times the forward's."""
    return 3 * forward_flops(model)["forward"]


def muon_flops(config: Config) -> int:
    """Operations of the polar iterations of one optimizer step; counted from the configuration, whatever its optimizer is."""
    steps = config.model.num_layers * config.muon_polar_steps
    return steps * sum(count * polar_step_flops(rows, columns) for count, rows, columns in muon_matrices(config))


def polar_step_flops(rows: int, columns: int) -> int:
    """x x^T, A A and B x of one matrix, which is transposed where it is tall."""
    m, n = sorted((rows, columns))
    return 2 * m * m * n + 2 * m * m * m + 2 * m * m * n


def muon_matrices(config: Config) -> list[tuple[int, int, int]]:
    """(count, rows, columns) of the matrices of one block that Muon orthogonalises, as it splits them."""
    channels, ffn = config.model.hidden_size, config.model.ffn_dim
    square = (channels, channels)
    if config.model.fused:
        attention = {"qkv": (3 * channels, channels), "out": square}
        feed_forward = {"up_gate": (2 * ffn, channels), "down": (channels, ffn)}
    else:
        attention = dict.fromkeys(("q", "k", "v", "out"), square)
        feed_forward = {"up": (ffn, channels), "gate": (ffn, channels), "down": (channels, ffn)}
    every = attention | feed_forward
    chosen = {
        "all": every,
        "attn": attention,
        "ffn": feed_forward,
        "square": {name: (rows, columns) for name, (rows, columns) in every.items() if rows == columns},
        "none": {},
    }[config.muon_target]
    matrices = []
    for name, (rows, columns) in chosen.items():
        size, split = rows, config.muon_row_split_size
        if name in ("q", "k", "v", "qkv"):
            size = config.model.head_size
        elif 0 < split < rows and rows % split == 0:
            size = split
        matrices.append((rows // size, size, columns))
    return matrices


def muon_line(config: Config) -> str:
    flops = muon_flops(config)
    share = flops / (config.batch_size * training_flops(config.model))
    return f"Muon FLOPs per step: {flops:.2e} ({100 * share:.1f}% of the model's)"
