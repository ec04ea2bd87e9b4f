"""The published run profiles: at full size by shapes and lowering, at a reduced size for real, from their own command lines."""

import importlib
import math

import jax
import jax.numpy as jnp
import pytest

import legacy_pmap.config
import legacy_pmap.model
import legacy_pmap.optim
import legacy_pmap.step
from kgo_shard import checkpoint, layout, mesh, optim, state, step
from kgo_shard.config import from_arguments

from .legacy.replay_recording import without_timings
from .profiles import PROFILES

NEW, OLD = (importlib.import_module(f"{package}.train") for package in ("kgo_shard", "legacy_pmap"))
REDUCED = "--pos-len 9 --model-kind b2c32 --batch-size 16 --max-training-samples 64 --warmup-samples 32 --print-every 2 --max-val-batches 2"
REDUCED += " --muon-row-split-size 16"  # cuts the 32 rows of this model as 64 cuts the 1024 or 768 of the full ones
# Parameters of the whole network by hand: L (4 C^2 + 3 C F + 2 C) + 22 * 9 C + 19 C + C + 12 C + 12 + 29 C + 29 + S C + S, S = 842.
PARAMETERS = {"single_chip": (24, 1024, 3072), "eight_chips": (40, 768, 2048)}


def words_of(name: str) -> list[str]:
    return [*PROFILES[name].split(), "--traindir", "unused", "--datadir", "unused"]


def struct(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def row_structs(batch: int) -> dict:
    keys = (layout.PLANES, layout.GLOBALS, layout.POLICY, layout.TARGETS, layout.SCORES, layout.VALUES)
    return {key: jax.ShapeDtypeStruct((1, batch, *layout.row_shapes(19)[key]), jnp.float32) for key in keys}


@pytest.mark.parametrize("name", PROFILES)
def test_the_new_step_lowers_at_full_size(name):
    config = from_arguments(NEW.make_parser("kgo-shard train").parse_args(words_of(name)))
    learned = state.learned_shapes(config)
    layers, channels, ffn = PARAMETERS[name]
    expected = layers * (4 * channels**2 + 3 * channels * ffn + 2 * channels) + channels * (22 * 9 + 19 + 1 + 12 + 29 + 842) + 12 + 29 + 842
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(learned.net)) == expected
    # A Muon leaf has one moment.
    of_muon = sum(math.prod(leaf.shape) for leaf, rule in zip(*map(jax.tree.leaves, (learned.net, optim.rule_labels(learned.net, config))), strict=True) if rule in optim.MUON)
    assert of_muon == layers * 4 * channels**2
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(learned.opt_state.v)) == expected - of_muon + layers * 4
    dtype = jnp.bfloat16 if name == "single_chip" else jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves((learned.net, learned.opt_state))} == {jnp.dtype(dtype)}
    assert (learned.ema is not None) == (name == "eight_chips")
    schedule = optim.Schedule(*[jax.ShapeDtypeStruct((1,), jnp.float32)] * 3)
    device_mesh = mesh.make_mesh(config)
    assert device_mesh.size == (8 if name == "eight_chips" else 1)
    lowered = step.compile_steps(config, device_mesh).lower(learned, row_structs(config.batch_size), schedule)
    after, totals = lowered.out_info
    assert struct(after) == struct(learned)  # the state comes out as it went in: nothing compiles twice
    assert totals.terms.shape == (26,) and totals.norm.shape == totals.steps.shape == totals.finite.shape == ()
    donated = {info.donated for info in jax.tree.leaves(lowered.args_info[0][0])}
    assert donated == {config.donate_train_buffers} == {name == "single_chip"}


@pytest.mark.parametrize("name", PROFILES)
def test_the_old_step_lowers_at_full_size_and_holds_the_same(name):
    old, new = legacy_pmap.config.parse_args(words_of(name)), from_arguments(NEW.make_parser("x").parse_args(words_of(name)))
    params = jax.eval_shape(lambda: legacy_pmap.model.init_params(old))
    ema = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params) if old.ema_decay > 0 else None
    big = params, jax.eval_shape(lambda: legacy_pmap.optim.init_opt_state(params, old)), ema
    learned = state.learned_shapes(new)
    for ours, theirs in zip((learned.net, learned.opt_state.m, learned.opt_state.v), (params, big[1]["m"], big[1]["v"]), strict=True):
        named = legacy_pmap.optim.flatten(theirs)
        assert {n: (x.shape, x.dtype) for n, x in step.convert.to_named(ours).items()} == {n: (x.shape, x.dtype) for n, x in named.items()}
    arguments = (big, (jax.ShapeDtypeStruct((), jnp.float32),) * 2, row_structs(old.batch_size // old.num_devices))
    if old.data_parallel:
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct((old.num_devices, *x.shape), x.dtype), arguments)
    run = legacy_pmap.step._compile(legacy_pmap.step.train_steps, old, (0, 0, 0, None, None, None), (0,) if old.donate_train_buffers else ())
    arguments = (*arguments, *[jax.ShapeDtypeStruct((1,), jnp.float32)] * 3)
    assert "func.func public @main" in run.lower(*arguments).as_text()
    carry, metrics, _ = jax.eval_shape(run, *arguments)  # the original pmap's lowering does not tell its results
    assert struct(tuple(carry[:3])) == struct(arguments[0]) and metrics.shape[-1] == 26


@pytest.mark.long
@pytest.mark.parametrize("name", PROFILES)
def test_both_train_the_profile_at_a_reduced_size(name, tmp_path, rows9, capsys):
    printed, states = {}, {}
    for module in (OLD, NEW):
        folder = tmp_path / module.__name__
        words = [*PROFILES[name].split(), *REDUCED.split(), "--traindir", str(folder), "--datadir", str(rows9)]  # later flags win
        words += ["--checkpoint-format", "legacy"] if module is NEW else []
        assert module.main(words) == 0
        printed[module] = [without_timings(line) for line in capsys.readouterr().out.splitlines()]
        content = checkpoint.read_pickle(folder / checkpoint.FILE_NAME)
        states[module] = {kind: step.convert.flatten(content[kind]) for kind in ("params", "opt_state")} | {"meta": content["meta"]}
    assert printed[OLD] == printed[NEW]
    starts = [line.split(",")[0].split("[")[0].split(":")[0].strip() for line in printed[NEW]]
    assert starts == ["Muon FLOPs per step", "step=2", "step=4", "VAL"]
    assert states[OLD]["meta"] == states[NEW]["meta"] and states[NEW]["meta"]["step"] == 4
    for kind in ("params", "opt_state"):
        old, new = states[OLD][kind], states[NEW][kind]
        assert old.keys() == new.keys() and [n for n in old if old[n].tobytes() != new[n].tobytes() or old[n].dtype != new[n].dtype] == []
