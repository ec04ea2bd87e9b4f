"""The new side: `kgo_shard`, from packed rows, augmented on the device."""

import jax
import numpy as np

from .. import checkpoint, convert, mesh, state, step
from ..config import Config
from ..mesh import make_mesh
from ..batches import read_packed_batches, read_validation
from ..train import training_chunks
from .trace import Side, Tape


def make_side(tape: Tape, probe_only: bool = False) -> Side:
    config = Config(**tape.options)
    probe, evaluate = step.make_probe(config), step.make_eval_step(config)

    def start():
        return checkpoint.load_checkpoint(tape.checkpoint, config) if tape.checkpoint else state.init_state(config)

    def probed(before, batch):
        after, stages = probe(before, batch)
        return after, name_stages(stages, step.optim.make_schedule(config, before.step, 1).learning_rate[0])

    train, unguarded = (None, None) if probe_only else (step.make_train_step(config), step.make_train_step(config.replace(on_nonfinite="ignore")))

    def stepped(before, batches):
        try:
            return train(before, batches)
        except step.NonfiniteError as error:  # what is not finite is for the comparison to name
            return unguarded(error.state, batches[error.index :])

    return Side(
        name="kgo_shard",
        start=start,
        chunks=lambda current: training_chunks(tape.files, config, current),
        probe=probed,
        step=None if probe_only else stepped,
        to_host=state.to_host,
        evaluate=lambda current, files: evaluate(current, next(read_validation(files, config, current.samples))),
    )


def lower_step(tape: Tape, num_steps: int = 1) -> jax.stages.Lowered:
    """The training step's program for `num_steps` batches, lowered for the tape's devices."""
    config = Config(**tape.options)
    device_mesh = make_mesh(config)
    packed = read_packed_batches(tape.files, config, config.seed)
    rows = mesh.put_batches(device_mesh, [next(packed) for _ in range(num_steps)])
    schedule = mesh.put(device_mesh, step.optim.make_schedule(config, 0, num_steps), "schedule")
    return step.compile_steps(config, device_mesh).lower(state.init_state(config).learned, rows, schedule)


def name_stages(stages: step.Stages, learning_rate) -> dict:
    """A probe's stages as a flat dict under canonical names."""
    trees = {
        "batch": stages.batch_local,
        "loss_terms": stages.terms_local._asdict(),
        "raw_gradient": convert.to_named(stages.gradients_local),
        "reduced_gradient": convert.to_named(stages.gradients),
        "clip": convert.to_named(stages.clipped),
        "metrics": stages.terms._asdict(),
    }
    flat = {f"{stage}/{name}": leaf for stage, tree in trees.items() for name, leaf in tree.items()}
    return flat | {"norm": stages.norm, "learning_rate": np.asarray(learning_rate)}
