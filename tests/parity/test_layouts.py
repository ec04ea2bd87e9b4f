"""Names, labels, starts and checkpoints of both stacks in every layout of the parameters, leaf by leaf."""

import itertools
import pickle

import jax
import numpy as np
import pytest

import kgo_shard
import legacy_pmap
from kgo_shard import convert, muon, optim
from legacy_pmap.optim import is_decayed, is_muon, split_matrices

LAYOUTS = {
    "list": {},
    "fused": {"fuse_projections": True},
    "stacked": {"stack_blocks": True},
    "stacked and fused": {"stack_blocks": True, "fuse_projections": True},
    "scanned": {"scan_blocks": True},
}
TARGETS = ("all", "attn", "ffn", "square", "none")


def options_of(layout: str, **options) -> dict:
    return {"pos_len": 9, "model_kind": "b2c32", "batch_size": 8, "compute_dtype": "float32", **LAYOUTS[layout], **options}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decay_muon_and_split_of_every_leaf(layout, target):
    options = options_of(layout, optimizer="muon", muon_target=target, muon_row_split_size=16)
    old, new = legacy_pmap.Config(**options), kgo_shard.Config(**options)
    net = kgo_shard.init_state(new).learned.net
    rules, decays = convert.to_named(optim.rule_labels(net, new)), convert.to_named(optim.decay_labels(net))
    print(f"\n{layout} blocks, --muon-target {target}")
    counted = 0
    for name, leaf in convert.to_named(net).items():
        words = tuple(name.split("/"))
        print(f"  {name:32} {str(leaf.shape):16} {'decayed' if decays[name] else '':8} {rules[name]}")
        assert decays[name] == is_decayed(words), name
        assert (rules[name] in optim.MUON) == is_muon(words, leaf.shape, old), name
        if rules[name] in optim.MUON:
            pieces = muon.split(leaf, rules[name], new)
            assert np.array_equal(pieces, split_matrices(leaf, words[-2], old)), name
            assert pieces.shape == split_matrices(leaf, words[-2], old).shape, name
            counted += 1
    assert (counted > 0) == (target != "none")


def host_states(options: dict) -> tuple[dict, dict]:
    """A fresh state of both stacks as host arrays."""
    old, new = legacy_pmap.Config(**options), kgo_shard.Config(**options)
    return legacy_pmap.to_host(legacy_pmap.init_state(old)), kgo_shard.to_host(kgo_shard.init_state(new))


def differing(old: dict, new: dict) -> list[str]:
    names = old.keys() | new.keys()
    equal = {n for n in old.keys() & new.keys() if old[n].dtype == new[n].dtype and old[n].shape == new[n].shape and old[n].tobytes() == new[n].tobytes()}
    return sorted(names - equal)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_gives_the_same_start(layout):
    for optimizer, dtype in itertools.product(("adamw", "muon", "sgd", "none"), ("float32", "bfloat16")):
        old, new = host_states(options_of(layout, optimizer=optimizer, param_dtype=dtype, opt_state_dtype=dtype, ema_decay=0.9))
        assert len(old) > 50 and differing(old, new) == []
    other = host_states(options_of(layout, seed=5))[1]
    assert "params/conv_spatial/w" in differing(old, other)  # the comparison can fail


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_go_both_ways_and_come_back_identical(layout, optimizer, tmp_path):
    """Random leaves of every kind: old file -> new state -> new file -> old state, and the two files hold the same."""
    options = options_of(layout, optimizer=optimizer, ema_decay=0.9, param_dtype="bf16", opt_state_dtype="bf16")
    old, new = legacy_pmap.Config(**options), kgo_shard.Config(**options)
    rng = np.random.default_rng(0)
    content = legacy_pmap.checkpoint.read_checkpoint(save(legacy_pmap, tmp_path / "fresh.pkl", legacy_pmap.init_state(old), old))
    for kind in ("params", "opt_state", "ema_params"):
        content[kind] = jax.tree.map(lambda leaf: rng.normal(size=np.shape(leaf)).astype(leaf.dtype) if np.ndim(leaf) else leaf, content[kind])
    first = tmp_path / "first.pkl"
    first.write_bytes(pickle.dumps(content))
    second = save(kgo_shard, tmp_path / "second.pkl", kgo_shard.load_checkpoint(first, new), new)
    third = save(legacy_pmap, tmp_path / "third.pkl", legacy_pmap.load_checkpoint(second, old), old)
    files = [legacy_pmap.checkpoint.read_checkpoint(path) for path in (first, second, third)]
    for file in files[1:]:
        assert jax.tree.structure(file) == jax.tree.structure(files[0])
        for kind in ("params", "opt_state", "ema_params"):
            assert differing(convert.flatten(files[0][kind]), convert.flatten(file[kind])) == []
        assert {name: value for name, value in file["meta"].items() if value != files[0]["meta"][name]} == {}


def save(stack, path, state, config):
    stack.save_checkpoint(path, state, config)
    return path


def test_another_layout_is_refused_by_both(tmp_path):
    cases = (("list", "stacked", "stack_blocks"), ("scanned", "list", "stack_blocks"), ("fused", "list", "fuse_projections"))
    for saved, wanted, named in cases:
        for writer, reader in itertools.product((legacy_pmap, kgo_shard), repeat=2):
            config = writer.Config(**options_of(saved))
            path = save(writer, tmp_path / "x.pkl", writer.init_state(config), config)
            with pytest.raises(ValueError, match=named):
                reader.load_checkpoint(path, reader.Config(**options_of(wanted)))


RESUMED = [
    ("scanned", {"optimizer": "muon", "muon_row_split_size": 16, "ema_decay": 0.9, "donate_train_buffers": True, "activation_dtype": "bf16"}),
    ("stacked and fused", {"optimizer": "muon", "muon_target": "attn", "param_dtype": "bf16", "opt_state_dtype": "bf16", "steps_per_jit": 2}),
]


@pytest.mark.long
@pytest.mark.parametrize("stack", [legacy_pmap, kgo_shard], ids=lambda stack: stack.__name__)
@pytest.mark.parametrize(("layout", "options"), RESUMED, ids=[layout for layout, _ in RESUMED])
def test_a_resumed_run_equals_the_uninterrupted_one(stack, layout, options, rows9, tmp_path):
    """The same batches: the original's trainer restarts its epoch on resume, its state does not."""
    config = stack.Config(**options_of(layout, max_training_samples=64, warmup_samples=16, **options))
    step, count = stack.make_train_step(config), options.get("steps_per_jit", 1)
    stream = stack.read_batches(sorted((rows9 / "train").glob("*.npz")), config, seed=3)
    calls = [list(itertools.islice(stream, count)) for _ in range(3)]

    def run(state, calls):
        for call in calls:
            state, metrics = step(state, call)
        return state, metrics

    whole, last = run(stack.init_state(config), calls)
    half, _ = run(stack.init_state(config), calls[:2])
    path = save(stack, tmp_path / "half.pkl", half, config)
    resumed, metrics = run(stack.load_checkpoint(path, config), calls[2:])
    assert differing(stack.to_host(whole), stack.to_host(resumed)) == [] and metrics == last
    other, _ = run(stack.load_checkpoint(path, config), calls[:1])
    assert differing(stack.to_host(whole), stack.to_host(other)) != []
