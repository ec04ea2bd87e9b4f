"""A run handed over in the middle: old stack, then new, then old again, by checkpoint file, equals the uninterrupted one."""

import itertools

import pytest

import kgo_shard
import legacy_pmap

from .test_layouts import differing

CALLS = 2  # by each of the three


@pytest.fixture(scope="module")
def run(tape):
    """run(stacks, folder) -> the last state as host arrays; a checkpoint is written and read wherever the stack changes."""
    configs = {stack: stack.Config(**tape.options) for stack in (legacy_pmap, kgo_shard)}
    steps = {stack: stack.make_train_step(config) for stack, config in configs.items()}
    stream = legacy_pmap.read_batches(tape.files, configs[legacy_pmap], seed=3)
    batches = list(itertools.islice(stream, 3 * CALLS))

    def run(stacks, folder):
        path, batch = tape.checkpoint, iter(batches)
        for part, stack in enumerate(stacks):
            state = stack.load_checkpoint(path, configs[stack])
            for _ in range(CALLS):
                state, _ = steps[stack](state, [next(batch)])
            path = folder / f"{part}.pkl"
            stack.save_checkpoint(path, state, configs[stack])
        return stack.to_host(state)

    return run


def test_old_new_old_is_old_all_the_way(run, tmp_path):
    whole = run([legacy_pmap] * 3, tmp_path)
    handed = run([legacy_pmap, kgo_shard, legacy_pmap], tmp_path)
    assert whole["step"] == handed["step"] == 3 * CALLS
    assert len(whole) > 100 and differing(whole, handed) == []


def test_new_old_new_is_new_all_the_way(run, tmp_path):
    assert differing(run([kgo_shard] * 3, tmp_path), run([kgo_shard, legacy_pmap, kgo_shard], tmp_path)) == []


def test_it_can_fail(run, tmp_path):
    whole = run([kgo_shard] * 3, tmp_path)
    assert differing(whole, run([kgo_shard] * 2, tmp_path)) != []
