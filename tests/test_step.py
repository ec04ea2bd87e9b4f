"""The compiled steps: one step or four, one device or eight, before and after a load; and what they refuse.

Compiling is what costs here, so the module compiles a handful of programs for eight devices and shares them. Its steps take
their state's buffers (donation), so every test begins with a state of its own: fresh, or loaded from a step of the shared run.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kgo_shard import mesh, optim, reduce
from kgo_shard import step as step_module
from kgo_shard.batches import read_batches, read_packed_batches
from kgo_shard.checkpoint import load_checkpoint, save_checkpoint
from kgo_shard.config import Config
from kgo_shard.diff import limits
from kgo_shard.loss import Terms
from kgo_shard.model import make_tables
from kgo_shard.state import TrainState, init_state, to_host
from kgo_shard.step import head_outputs, make_eval_step, make_gradient, make_probe, make_train_step

FLOAT = np.dtype(np.float32)
DEVICES = 8
OPTIONS = dict(
    pos_len=9,
    batch_size=16,
    model_kind="b2c32",
    compute_dtype="float32",
    enable_history_matrices=True,
    lr=1e-3,
    warmup_samples=4 * 16,
    max_training_samples=12 * 16,
    ema_decay=0.9,
    grad_clip_norm=1.0,
    donate_train_buffers=True,
    data_parallel=True,
    data_parallel_devices=DEVICES,
)
CONFIG = Config(**OPTIONS)
ONE_DEVICE = {"data_parallel": False, "data_parallel_devices": 0}


def assert_same_bits(old, new):
    assert old.keys() == new.keys() and old
    for name in old:
        a, b = np.asarray(old[name]), np.asarray(new[name])
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


def flat(gradients):
    """A net-shaped tree as one float64 vector."""
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(gradients)])


# The first of these batches has unowned points on one device and none on the others: their seki weights are 1.36 and 8.
CHOSEN = slice(9, 17)


@pytest.fixture(scope="module")
def batches(rows9):
    stream = read_packed_batches(sorted((rows9 / "train").glob("*.npz")), CONFIG, 5)
    return list(itertools.islice(stream, CHOSEN.start, CHOSEN.stop))


@pytest.fixture(scope="module")
def unturned(batches):
    """A batch as validation reads it: without a symmetry."""
    return {key: value for key, value in batches[7].items() if key != "symmetry"}


@pytest.fixture(scope="module")
def traces():
    """Number of steps a call, for every time that the train step was traced; "evaluate" for the evaluation."""
    return []


@pytest.fixture(scope="module")
def step(traces):
    """The train step that all tests share; it notes in `traces` when it is traced."""
    original = step_module.train_on_batches

    def counted(learned, rows, schedule, config, tables):
        if config == CONFIG:
            traces.append(len(rows["globalInputNC"]))
        return original(learned, rows, schedule, config, tables)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "train_on_batches", counted)
        made = make_train_step(CONFIG)
        # A trace happens at the first call, which may be in any test: the counting stays for the module's lifetime.
        yield made


@pytest.fixture(scope="module")
def evaluate(traces):
    original = step_module.evaluate_batch

    def counted(*arguments):
        traces.append("evaluate")
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "evaluate_batch", counted)
        yield make_eval_step(CONFIG)


class Run(NamedTuple):
    """Six single steps from a fresh start: entry i of `states` and `paths` is after i steps."""

    states: list[dict]  # as to_host gives them
    paths: list  # their checkpoints
    metrics: list[dict]  # of the six steps

    def load(self, i):
        return load_checkpoint(self.paths[i], CONFIG)


@pytest.fixture(scope="module")
def run(step, batches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    found = Run([], [], [])
    state = init_state(CONFIG)
    for i, batch in enumerate([None, *batches[:6]]):
        if batch is not None:
            state, metrics = step(state, [batch])
            found.metrics.append(metrics)
        found.states.append(to_host(state))
        found.paths.append(folder / f"{i}.pkl")
        save_checkpoint(found.paths[i], state, CONFIG)
    return found


# Many steps


def test_four_steps_in_one_call_equal_four_calls_bit_for_bit(step, batches, run):
    state, metrics = step(init_state(CONFIG), batches[:4])
    assert_same_bits(run.states[4], to_host(state))
    summed = {name: np.float32(0) for name in metrics}
    for single in run.metrics[:4]:
        summed = {name: total + np.float32(single[name]) for name, total in summed.items()}
    assert metrics.pop("lr") == run.metrics[3]["lr"]
    assert metrics == {name: float(value) for name, value in summed.items() if name != "lr"}


@pytest.mark.long
def test_an_update_compiled_apart_makes_the_same_steps(batches):
    """--muon-split-jit: two steps in one call, then one; with donation, clipping and a moving average."""
    found = []
    for apart in (False, True):
        config = CONFIG.replace(**ONE_DEVICE, optimizer="muon", muon_target="attn", muon_split_jit=apart)
        assert config.update_apart == apart
        take, state, metrics = make_train_step(config), init_state(config), []
        for call in (batches[:2], batches[2:3]):
            state, of_call = take(state, call)
            metrics.append(of_call)
        found.append((to_host(state), metrics))
    (whole, whole_metrics), (parts, parts_metrics) = found
    assert_same_bits(whole, parts)
    assert whole_metrics == parts_metrics and whole["step"] == 3


def test_metrics_are_floats_under_the_specifications_names(run):
    assert list(run.metrics[0]) == [*Terms._fields, "grad_norm", "lr"]
    assert {type(value) for value in run.metrics[0].values()} == {float}
    assert all(np.isfinite(list(found.values())).all() for found in run.metrics)
    assert run.metrics[0]["wsum"] == 16 and run.metrics[0]["grad_norm"] > 1


def test_counts_advance_by_steps_and_rows(run, step, batches):
    assert [(state["step"], state["samples"]) for state in run.states] == [(i, 16 * i) for i in range(7)]
    state, _ = step(run.load(1), batches[1:5])
    assert (state.step, state.samples) == (5, 80) and type(state.step) is int and type(state.samples) is int
    # The weight of the statistics counts the steps too: 1 + 0.998 + 0.998^2 + ...
    np.testing.assert_allclose(run.states[6]["moving_weight"], sum(0.998**i for i in range(6)), rtol=limits.summation_limit(12, 1, FLOAT))


def test_the_learning_rates_that_are_applied_are_the_schedules(run, step, batches):
    rates = [found["lr"] / 1e-3 for found in run.metrics]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 0.9619], atol=5e-5)
    # Stopped after 3 steps and resumed, the fourth step applies 1.0.
    _, resumed = step(run.load(3), [batches[3]])
    assert resumed["lr"] == run.metrics[3]["lr"]
    # What was applied, not only reported: without decay a first AdamW step moves a bias by nearly the learning rate.
    name = "params/value_head/linear_sv/b"
    moved = np.abs(run.states[1][name] - run.states[0][name])
    assert 0.99 * 0.25e-3 < moved.max() <= 0.25e-3 * (1 + 1e-6)


def test_a_loaded_state_continues_bit_for_bit(run, step, batches):
    state = run.load(2)
    for i in (2, 3, 4):
        state, _ = step(state, [batches[i]])
        assert_same_bits(run.states[i + 1], to_host(state))


def test_the_old_states_buffers_are_given_to_the_new_one(run, step, batches):
    # With a moving average, which starts as the parameters: from a fresh start, and after a load.
    for state in (init_state(CONFIG), run.load(0)):
        after, _ = step(state, [batches[0]])
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.learned))
        assert_same_bits(run.states[1], to_host(after))


def test_each_shape_is_traced_and_compiled_once(step, evaluate, batches, unturned, run, traces, tmp_path):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    jax.jit(lambda x: x * 3 + len(compiled))(jnp.ones(3))
    assert compiled, "compilations are not seen"

    def rounds(state):
        state, _ = step(state, batches[:4])
        state, _ = step(state, batches[4:5])  # a short last chunk
        evaluate(state, unturned)
        return step(state, batches[:4])[0]

    state = rounds(init_state(CONFIG))  # a fresh start: here everything is compiled that has not been
    save_checkpoint(tmp_path / "state.pkl", state, CONFIG)
    loaded = load_checkpoint(tmp_path / "state.pkl", CONFIG)
    compiled.clear()
    rounds(rounds(loaded))
    assert compiled == []
    assert sorted(map(str, traces)) == ["1", "4", "evaluate"]


# Evaluation


def test_evaluation_leaves_the_state_and_the_training_as_they_are(step, evaluate, run, batches, unturned):
    state = run.load(2)
    first, second = evaluate(state, unturned), evaluate(state, unturned)
    assert first == second and list(first) == list(Terms._fields)
    assert_same_bits(run.states[2], to_host(state))
    after, _ = step(state, [batches[2]])
    assert_same_bits(run.states[3], to_host(after))


def test_evaluation_takes_the_live_parameters_and_the_constant_seki_weight(evaluate, run, unturned):
    learned, start = run.load(4).learned, run.load(0)
    # Neither the average nor the statistics have a say.
    other = learned.__class__(learned.net, learned.opt_state, start.learned.ema, start.learned.statistics)
    assert evaluate(TrainState(other, 0, 0), unturned) == evaluate(run.load(4), unturned)
    assert evaluate(run.load(4), unturned) != evaluate(start, unturned)


# Moving average


def test_the_average_is_taken_after_the_update_bit_for_bit(run):
    before, after = run.states[0], run.states[1]
    f, d = np.float32, 0.9
    names = [name.removeprefix("params/") for name in after if name.startswith("params/")]
    for name in names:
        expected = f(d) * before[f"params/{name}"] + f(1 - d) * after[f"params/{name}"]
        assert after[f"ema_params/{name}"].tobytes() == expected.tobytes(), name
    assert any((after[f"ema_params/{name}"] != before[f"params/{name}"]).any() for name in names)


# Devices


def test_every_result_is_the_same_on_every_device(step, batches):
    state, _ = step(init_state(CONFIG), batches[:4])
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.learned):
        shards = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(leaf.addressable_shards) == DEVICES and len(shards) == 1, path


@pytest.fixture(scope="module")
def probed(batches):
    """State and stages of the first step on eight devices."""
    return make_probe(CONFIG)(init_state(CONFIG), batches[0])


def test_the_probe_is_the_step(probed, run, batches):
    state, stages = probed
    assert_same_bits(run.states[1], to_host(state))
    assert {name: float(value) for name, value in stages.terms._asdict().items()} | {"grad_norm": float(stages.norm)} == {
        name: value for name, value in run.metrics[0].items() if name != "lr"
    }


# Outside the step's scan the compiler may arrange a convolution otherwise, and then sums over 81 points of so many rows are
# added in another order: so much of a leaf's or a term's size may differ.
OTHER_ORDER = limits.summation_limit(16 * 81, 1, FLOAT)


def test_the_gradient_is_the_mean_of_what_each_device_would_compute_alone(probed, batches):
    state, stages = probed
    share = 16 // DEVICES
    config = CONFIG.replace(batch_size=share, **ONE_DEVICE)
    alone, start = make_gradient(config), init_state(config)
    local = step_module.convert.to_named(stages.gradients_local)
    for i in range(DEVICES):
        # Rows lie in contiguous shares.
        gradients, metrics = alone(start, {key: value[i * share : (i + 1) * share] for key, value in batches[0].items()})
        assert list(gradients) == list(local) and list(metrics) == list(Terms._fields)
        for name, expected in gradients.items():
            assert type(expected) is np.ndarray and expected.shape == local[name].shape[1:]
            error = limits.norm(local[name][i].astype(np.float64) - expected)
            # A bias under a softmax has no gradient but rounding: against it stands the size of the largest leaf.
            assert error <= OTHER_ORDER * limits.norm(expected) + 1e-6 * OTHER_ORDER * limits.norm(flat(gradients)), (i, name)
        for name, value in metrics.items():
            assert abs(getattr(stages.terms_local, name)[i] - value) <= OTHER_ORDER * abs(value), (i, name)
    for whole, parts in zip(jax.tree.leaves(stages.gradients), jax.tree.leaves(stages.gradients_local), strict=True):
        exact = np.asarray(parts, np.float64)
        limit = limits.summation_limit(DEVICES, 1, FLOAT) * np.abs(exact).mean(0)
        assert (np.abs(whole - exact.mean(0)) <= limit).all()


def test_the_statistics_are_those_of_the_whole_batch(run, batches):
    total = 0.0
    for state, batch in zip(run.states[1:], batches):
        ownership = batch["valueTargetsNCHW"][:, 0].astype(np.float64)
        weight = batch["globalTargetsNC"][:, 27].astype(np.float64)
        total = 0.998 * total + (np.sum(1 - ownership**2, axis=(1, 2)) / 82 * weight).mean()
        assert abs(float(state["moving_sum"]) - total) <= limits.summation_limit(64, total, FLOAT) and total > 0


def test_clipping_follows_the_mean(probed):
    _, stages = probed
    norm = limits.norm(flat(stages.gradients))
    assert abs(float(stages.norm) - norm) <= limits.summation_limit(len(flat(stages.gradients)) + 3, norm, FLOAT) and norm > 1
    factor = np.float32(np.minimum(np.float32(1), np.float32(1) / (stages.norm + np.float32(1e-6))))
    for g, clipped in zip(jax.tree.leaves(stages.gradients), jax.tree.leaves(stages.clipped), strict=True):
        assert (g * factor).tobytes() == np.asarray(clipped).tobytes()


def test_terms_are_summed_over_devices_and_the_loss_is_averaged(probed):
    _, stages = probed
    for name, local in stages.terms_local._asdict().items():
        exact = np.asarray(local, np.float64)
        expected = exact.mean() if name == "loss" else exact.sum()
        assert local.shape == (DEVICES,)
        assert abs(float(getattr(stages.terms, name)) - expected) <= limits.summation_limit(DEVICES + 1, np.abs(exact).sum(), FLOAT), name


@pytest.mark.long
def test_the_global_objective_has_the_single_devices_gradient_and_the_replica_objective_has_not(batches, probed, capsys):
    config = CONFIG.replace(**ONE_DEVICE)
    single, _ = make_gradient(config)(init_state(config), batches[0])
    whole, _ = make_gradient(CONFIG.replace(objective="global"))(init_state(CONFIG), batches[0])
    replica = step_module.convert.to_named(probed[1].gradients)
    reference = flat(single)
    off = {name: limits.norm(flat(g) - reference) / limits.norm(reference) for name, g in (("replica", replica), ("global", whole))}
    with capsys.disabled():
        print(f"\n8 devices against 1, distance of the gradient: replica {off['replica']:.2e}, global {off['global']:.2e}")
    assert off["global"] <= OTHER_ORDER < 1e-4
    assert off["replica"] > 100 * OTHER_ORDER


def test_packed_and_expanded_batches_are_the_same_batch(probed, rows9):
    # Exact, so no program need run: what the step's first stage makes of packed rows is what read_batches yields.
    files = sorted((rows9 / "train").glob("*.npz"))
    expanded = next(itertools.islice(read_batches(files, CONFIG, 5), CHOSEN.start, None))
    _, stages = probed
    assert set(stages.batch_local) == set(expanded)
    for key, value in expanded.items():
        assert np.asarray(stages.batch_local[key]).reshape(value.shape).tobytes() == value.tobytes(), key


def test_head_outputs_have_the_originals_names_and_the_batchs_order(batches):
    fresh = init_state(CONFIG)
    outputs = head_outputs(fresh, batches[0], CONFIG)
    assert {name: value.shape for name, value in outputs.items()} == {
        "policy": (16, 6, 82),
        "value": (16, 3),
        "misc": (16, 10),
        "moremisc": (16, 8),
        "ownership": (16, 1, 9, 9),
        "scoring": (16, 1, 9, 9),
        "futurepos": (16, 2, 9, 9),
        "seki": (16, 4, 9, 9),
        "scorebelief": (16, 282),
    }
    order = np.random.default_rng(0).permutation(16)
    moved = head_outputs(fresh, {key: value[order] for key, value in batches[0].items()}, CONFIG)
    for name, value in outputs.items():
        assert moved[name].tobytes() == value[order].tobytes(), name


# What the type system and the checks refuse


@pytest.mark.parametrize("forgotten", ["mean_gradients", "sum_terms", "mean_statistics"])
def test_a_forgotten_reduction_is_refused(monkeypatch, batches, forgotten):
    monkeypatch.setattr(reduce, forgotten, lambda local: local)
    with pytest.raises((ValueError, TypeError), match="(?s)(varying|replicat|vma)"):
        make_train_step(CONFIG.replace(seed=99))(init_state(CONFIG), [batches[0]])


def reductions_in(jaxpr):
    """Dtypes of everything that is summed over the devices, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("psum"):
            yield from (str(var.aval.dtype) for var in eqn.invars if var.aval.dtype != jnp.int32)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from reductions_in(inner)


def reduced_dtypes(config, batch):
    tables, device_mesh = make_tables(config.model), mesh.make_mesh(config)
    call = mesh.shard(
        lambda *arguments: step_module.train_on_batches(*arguments, config, tables),
        device_mesh,
        inputs=("state", "batch", "schedule"),
        outputs=("state", "result"),
    )
    rows = {key: value[None] for key, value in batch.items()}
    return list(reductions_in(jax.make_jaxpr(call)(init_state(config).learned, rows, optim.make_schedule(config, 0, 1)).jaxpr))


def test_everything_is_reduced_in_float32_also_when_products_are_bfloat16(monkeypatch, batches):
    config = CONFIG.replace(compute_dtype="bfloat16")
    dtypes = reduced_dtypes(config, batches[0])
    # A gradient of each leaf, the vector of terms, the two statistics.
    assert set(dtypes) == {"float32"} and len(dtypes) == len(jax.tree.leaves(init_state(config).learned.net)) + 1 + 2
    # The check can fail: differentiated unvarying, parameters get bfloat16 sums, made behind their casts.
    monkeypatch.setattr(reduce, "to_local", lambda tree: tree)
    monkeypatch.setattr(reduce, "mean_gradients", lambda summed: summed)
    monkeypatch.setattr(step_module, "weigh_seki", lambda statistics, batch, config: (jnp.float32(1), statistics))
    monkeypatch.setattr(reduce, "mean_statistics", lambda statistics: statistics)
    assert "bfloat16" in reduced_dtypes(config, batches[0])


def test_a_batch_of_another_shape_is_refused_by_name(step, evaluate, batches):
    fresh, good = init_state(CONFIG), batches[0]
    cases = [
        ([], "no batches"),
        ([{key: value[:15] for key, value in good.items()}], r"batch 0: .* has shape \(15, .*expected \(16, "),
        ([good, {key: np.concatenate([value, value]) for key, value in good.items()}], r"batch 1: .*\(32, "),
        ([good | {"valueTargetsNCHW": np.zeros((16, 5, 19, 19), np.int8)}], r"valueTargetsNCHW has shape \(16, 5, 19, 19\)"),
        ([good | {"policyTargetsNCMove": good["policyTargetsNCMove"][..., :81]}], "policyTargetsNCMove"),
        ([good | {"globalTargetsNC": good["globalTargetsNC"][:, :40]}], "globalTargetsNC"),
        ([good | {"symmetry": np.zeros(15, np.int32)}], "symmetry"),
        ([{key: value for key, value in good.items() if key != "scoreDistrN"}], "scoreDistrN is missing"),
        ([{key: value for key, value in good.items() if key != "binaryInputNCHWPacked"}], "binaryInputNCHW is missing"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            step(fresh, wrong)
    with pytest.raises(ValueError, match="batch 0: "):
        evaluate(fresh, {key: value[:15] for key, value in good.items()})
