"""A user's script. It names no stack: the same lines run with `import legacy_pmap as stack` and `import kgo_shard as stack`."""


def run(stack, rows, folder):
    """Start, steps, evaluation, save, load, continue; everything that a caller can see comes back as a flat dict."""
    config = stack.Config(
        pos_len=9, batch_size=32, model_kind="b2c32", compute_dtype="float32", max_training_samples=1280, warmup_samples=256,
        enable_history_matrices=True, ema_decay=0.99, grad_clip_norm=1.0, log_grad_norm=True, data_parallel=True,
        data_parallel_devices=8,
    )  # fmt: skip
    batches = stack.read_batches(sorted((rows / "train").glob("*.npz")), config, seed=7)
    state = stack.init_state(config)
    step, evaluate, gradient = stack.make_train_step(config), stack.make_eval_step(config), stack.make_gradient(config)

    seen = {"batch/" + key: value for key, value in next(batches).items()}
    state, seen["first step"] = step(state, [next(batches)])
    validation = next(stack.read_batches(sorted((rows / "val").glob("*.npz")), config, seed=8))
    seen["evaluation"] = evaluate(state, validation)
    gradients, seen["gradient metrics"] = gradient(state, validation)
    seen |= {"gradient/" + name: value for name, value in gradients.items()}
    state, seen["second step"] = step(state, [next(batches)])
    seen |= {"saved/" + name: value for name, value in stack.to_host(state).items()}

    stack.save_checkpoint(folder / "checkpoint_jax.pkl", state, config)
    state = stack.load_checkpoint(folder / "checkpoint_jax.pkl", config)
    seen |= {"loaded/" + name: value for name, value in stack.to_host(state).items()}
    state, seen["third step"] = step(state, [next(batches)])
    return seen | {"end/" + name: value for name, value in stack.to_host(state).items()}
