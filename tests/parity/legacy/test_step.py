"""The step: K in one call, D devices against D shards, the probe against the step, one trace a shape."""

import jax
import numpy as np
import pytest

import legacy_pmap as stack
from legacy_pmap import optim
from legacy_pmap import step as step_module

from .helpers import assert_same_bits, first_batches, small_config

FOUR = dict(data_parallel=True, data_parallel_devices=4, grad_clip_norm=1.0)
needs_4 = pytest.mark.skipif(jax.local_device_count() < 4, reason="needs 4 devices")
needs_exact = pytest.mark.skipif("fusion" not in __import__("os").environ.get("XLA_FLAGS", ""), reason="needs exact mode")


@pytest.mark.long
@needs_exact
@needs_4
@pytest.mark.parametrize("options", [{}, FOUR])
def test_four_steps_in_one_call_equal_four_calls(options):
    config = small_config(**options)
    step, batches = stack.make_train_step(config), first_batches(config, 4)
    one, many = step(stack.init_state(config), batches)
    other, sums = stack.init_state(config), None
    for batch in batches:
        other, metrics = step(other, [batch])
        sums = {name: np.float32(value) + (sums[name] if sums else np.float32(0)) for name, value in metrics.items()}
    assert_same_bits(stack.to_host(one), stack.to_host(other))
    assert {name: np.float32(value) for name, value in many.items() if name != "lr"} == {n: v for n, v in sums.items() if n != "lr"}
    assert many["lr"] == metrics["lr"]
    assert int(stack.to_host(one)["step"]) == 4 and int(stack.to_host(one)["samples"]) == 64


@pytest.mark.long
@needs_exact
@needs_4
def test_gradient_on_four_devices_is_the_mean_of_four_shards():
    config = small_config(**FOUR)
    shard = small_config(batch_size=4)
    # A batch whose shards differ in their unowned share of the board: most small boards are owned to the last point.
    def spread(batch):
        unowned = np.mean(1 - batch["valueTargetsNCHW"][:, 0] ** 2, axis=(1, 2)) * batch["globalTargetsNC"][:, 27]
        return np.ptp(unowned.reshape(4, 4).mean(axis=1))

    batch = max(first_batches(config, 20), key=spread)
    grads, metrics = stack.make_gradient(config)(stack.init_state(config), batch)
    one, state = stack.make_gradient(shard), stack.init_state(shard)
    parts = [one(state, {key: array[4 * i : 4 * i + 4] for key, array in batch.items()}) for i in range(4)]
    for name, leaf in grads.items():
        mean = sum(part[0][name].astype(np.float64) for part in parts) / 4
        # Other programs, so other matrix kernels: some ulps (6e-8) of the norm. A wrong reduction is off by a factor of 4.
        assert np.linalg.norm(leaf - mean) <= 16 * 2.0**-24 * np.linalg.norm(mean), name
    for name in stack.METRICS[1:]:
        assert metrics[name] == pytest.approx(sum(part[1][name] for part in parts), rel=1e-6)
    assert metrics["loss"] == pytest.approx(sum(part[1]["loss"] for part in parts) / 4, rel=1e-6)
    whole = stack.make_gradient(small_config())(stack.init_state(small_config()), batch)[0]
    apart = np.sqrt(sum(np.sum((whole[name] - grads[name]) ** 2) for name in grads) / sum(np.sum(g**2) for g in whole.values()))
    assert apart > 1e-4  # the replica's own seki weight: not the gradient of the whole batch


@needs_exact
@needs_4
def test_probe_is_the_step():
    config = small_config(**FOUR)
    [batch] = first_batches(config, 1)
    state, stages = stack.make_probe(config)(stack.init_state(config), batch)
    stepped, metrics = stack.make_train_step(config)(stack.init_state(config), [batch])
    assert_same_bits(stack.to_host(stepped), stack.to_host(state))
    assert {name: stages[f"metrics/{name}"] for name in stack.METRICS} == {name: metrics[name] for name in stack.METRICS}
    assert stages["norm"] == metrics["grad_norm"] and stages["learning_rate"] == metrics["lr"]
    assert stages["loss_terms/p0loss"].shape == (4,)
    assert stages["raw_gradient/blocks/0/q_proj/w"].shape == (4, 32, 32) and stages["clip/norm_final/weight"].shape == (32,)
    norm = np.sqrt(sum(np.sum(stages[name].astype(np.float64) ** 2) for name in stages if name.startswith("reduced_gradient/")))
    assert stages["norm"] == pytest.approx(norm, rel=1e-5)
    clipped = np.sqrt(sum(np.sum(stages[name].astype(np.float64) ** 2) for name in stages if name.startswith("clip/")))
    assert clipped == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_one_trace_for_all_calls(monkeypatch, tmp_path, data_parallel):
    traces = []
    body = step_module.step_body
    monkeypatch.setattr(step_module, "step_body", lambda *args, **kw: (traces.append(1), body(*args, **kw))[1])
    config = small_config(**({**FOUR, "data_parallel_devices": min(4, jax.local_device_count())} if data_parallel else {}))
    step, evaluate, batches = stack.make_train_step(config), stack.make_eval_step(config), first_batches(config, 4)
    state, _ = step(stack.init_state(config), batches[:1])
    state, _ = step(state, batches[1:2])
    evaluate(state, batches[0])
    state, _ = step(state, batches[:1])
    stack.save_checkpoint(tmp_path / "c.pkl", state, config)
    step(stack.load_checkpoint(tmp_path / "c.pkl", config), batches[:1])
    assert len(traces) == 1
    step(state, batches)
    assert len(traces) == 2


def test_donated_state_steps_on():
    config = small_config(donate_train_buffers=True)
    kept = small_config()
    batches = first_batches(config, 2)
    a, b, donating, keeping = stack.init_state(config), stack.init_state(kept), stack.make_train_step(config), stack.make_train_step(kept)
    for batch in batches:
        a, _ = donating(a, [batch])
        b, _ = keeping(b, [batch])
    assert_same_bits(stack.to_host(b), stack.to_host(a))


def test_evaluation_leaves_the_state_and_uses_its_own_seki_weight():
    config = small_config()
    state, [batch] = stack.init_state(config), first_batches(config, 1)
    before = stack.to_host(state)
    metrics = stack.make_eval_step(config)(state, batch)
    assert_same_bits(before, stack.to_host(state))
    grads, train = stack.make_gradient(config)(state, batch)
    unowned = np.mean(np.sum(1 - batch["valueTargetsNCHW"][:, 0] ** 2, axis=(1, 2)) / 82 * batch["globalTargetsNC"][:, 27])
    assert train["moving_sum"] == pytest.approx(unowned, rel=1e-6) and train["moving_weight"] == 1.0
    seki_weight = 8 * 0.005 / (0.005 + unowned)
    assert metrics["skloss"] / train["skloss"] == pytest.approx(7 / seki_weight, rel=1e-5)


def test_no_weight_no_gradient_but_decay():
    config = small_config(lr=0.1, wd=0.5, lr_schedule="constant")
    state, [batch] = stack.init_state(config), first_batches(config, 1)
    batch = {**batch, "globalTargetsNC": batch["globalTargetsNC"].copy()}
    batch["globalTargetsNC"][:, 25] = 0.0
    before, after = stack.to_host(state), stack.to_host(stack.make_train_step(config)(state, [batch])[0])
    moved = {name for name in before if name.startswith("params/") and not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("params/") and name.endswith("/w")}
    w = "params/blocks/1/ffn_w2/w"
    np.testing.assert_allclose(after[w], before[w] * np.float32(0.95), rtol=2e-7)


def test_schedule():
    config = small_config(lr=1.0, batch_size=16, warmup_samples=64, max_training_samples=192)
    rates = [optim.learning_rate(step, config) for step in range(6)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and rates[5] == pytest.approx(0.9619397662556434)
    assert optim.learning_rate(99, small_config(lr=0.5, lr_schedule="constant")) == 0.5


def test_clip_rule():
    config = small_config()
    clip = lambda g, c: optim.clip({"w": g}, optim.global_norm({"w": g}, config), c)["w"]
    f = lambda *x: jax.numpy.asarray(x, "float32")
    np.testing.assert_allclose(clip(f(3e-5, 4e-5), 1e-5), [5.882353e-6, 7.843137e-6], rtol=1e-6)
    assert not np.any(clip(f(0.0, 0.0), 1.0))
    assert np.array_equal(clip(f(3.0, 4.0), 10.0), f(3.0, 4.0))


def test_bad_batches_are_refused():
    config = small_config()
    step, state, [batch] = stack.make_train_step(config), stack.init_state(config), first_batches(config, 1)
    with pytest.raises(ValueError, match="at least one batch"):
        step(state, [])
    with pytest.raises(ValueError, match="scoreDistrN"):
        step(state, [{key: array for key, array in batch.items() if key != "scoreDistrN"}])
    with pytest.raises(ValueError, match="batch_size=16"):
        step(state, [{key: array[:8] for key, array in batch.items()}])
