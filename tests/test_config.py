"""The option table: the original's names and defaults, and everything that it refuses."""

import argparse
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kgo_shard import config as config_module
from kgo_shard.config import MODEL_SIZES, Config, ConfigError, add_options, from_arguments
from kgo_shard.train import make_parser

# Written by hand from section 6 of the specification: a new option, or another default, has to be entered here too.
ORIGINAL = {
    "traindir": None,
    "datadir": None,
    "pos_len": 19,
    "batch_size": 16,
    "model_kind": "b12c2048",
    "lr": 2e-4,
    "wd": 0.1,
    "optimizer": "adamw",
    "muon_lr_multiplier": 0.2,
    "muon_momentum": 0.95,
    "muon_row_split_size": 0,
    "muon_target": "all",
    "muon_polar_steps": 5,
    "muon_group_blocks": True,
    "muon_split_jit": False,
    "loss_profile": "full",
    "grad_clip_norm": 0.0,
    "lr_schedule": "cosine",
    "max_training_samples": 32768,
    "warmup_samples": 4096,
    "print_every": 20,
    "steps_per_jit": 1,
    "save_every_samples": 0,
    "val_every_samples": 0,
    "max_val_batches": 16,
    "symmetry_type": "xyt",
    "enable_history_matrices": False,
    "allow_nonfull_mask": False,
    "no_resume": False,
    "no_final_save": False,
    "fuse_projections": False,
    "separate_projections": False,
    "attention_impl": "manual",
    "activation_dtype": "float32",
    "param_dtype": "float32",
    "opt_state_dtype": "float32",
    "opt_update_dtype": "float32",
    "rope_dtype": "float32",
    "ffn_mul_dtype": "float32",
    "attention_logits_dtype": "float32",
    "int8_train": False,
    "int8_target": "ffn",
    "int8_fwd_bits": 8,
    "int8_bwd_bits": 8,
    "ema_decay": 0.0,
    "log_grad_norm": False,
    "log_step_time": False,
    "component_profile": False,
    "component_profile_repeats": 3,
    "component_profile_grad": False,
    "donate_train_buffers": False,
    "data_parallel": False,
    "stack_blocks": False,
    "scan_blocks": False,
    "remat_blocks": False,
    "seed": 1234,
    "init_std": 0.02,
    "score_mode": "simple",
    "xla_peak_tflops": 918.0,
}
BEYOND_THE_ORIGINAL = {
    "compute_dtype": "bfloat16", "objective": "replica", "data_parallel_devices": 0, "check_replicas": 0,
    "checkpoint_format": "orbax", "keep": 3, "resume_order": "exact", "allow_changes": "", "on_nonfinite": "stop",
    "skip_bad_files": False, "tensorboard": False, "shard_state": "none", "master_dtype": "param",
}  # fmt: skip


def test_every_option_of_the_original_has_its_default():
    config = Config()
    assert {name: getattr(config, name) for name in ORIGINAL} == ORIGINAL
    # 1 == True == 1.0: the types count too.
    assert {name: type(getattr(config, name)) for name in ORIGINAL} == {name: type(value) for name, value in ORIGINAL.items()}


def test_no_option_appears_without_this_list():
    assert {row.name: row.default for row in dataclasses.fields(Config)} == ORIGINAL | BEYOND_THE_ORIGINAL


def test_model_sizes_are_the_originals():
    assert MODEL_SIZES["b2c32"] == (2, 32, 2, 64)
    assert MODEL_SIZES["b3c96"] == (3, 96, 3, 256)
    assert MODEL_SIZES["b12c192"] == (12, 192, 3, 512)
    assert MODEL_SIZES["b12c384"] == (12, 384, 6, 1024)
    assert MODEL_SIZES["b12c512"] == (12, 512, 8, 1536) and MODEL_SIZES["b24c512"] == (24, 512, 8, 1536)
    assert MODEL_SIZES["b12c768"] == (12, 768, 12, 2048) and MODEL_SIZES["b40c768"] == (40, 768, 12, 2048)
    assert MODEL_SIZES["b12c1024"] == (12, 1024, 16, 3072) and MODEL_SIZES["b24c1024"] == (24, 1024, 16, 3072)
    assert MODEL_SIZES["b12c1536"] == (12, 1536, 24, 4096) and MODEL_SIZES["b16c1536"] == (16, 1536, 24, 4096)
    assert MODEL_SIZES["b12c1792"] == (12, 1792, 28, 5120)
    for layers in (8, 10, 12, 14, 16, 18, 20, 22, 24):
        assert MODEL_SIZES[f"b{layers}c2048"] == (layers, 2048, 32, 6144)
    assert len(MODEL_SIZES) == 22
    assert all(channels // heads % 4 == 0 for _, channels, heads, _ in MODEL_SIZES.values()), "rotary needs a head size divisible by 4"


def test_model_config_has_the_checkpoints_keys():
    model = Config(model_kind="b3c96", pos_len=9).model
    assert model.to_meta() == {"version": 15, "num_layers": 3, "hidden_size": 96, "num_heads": 3, "ffn_dim": 256, "num_scorebeliefs": 8}
    assert (model.head_size, model.num_points, model.num_score_buckets) == (32, 81, 282)


def test_an_unknown_option_is_named_with_a_close_one():
    with pytest.raises(ConfigError, match=r"unknown option batchsize: did you mean batch_size\?"):
        Config(batchsize=16)
    with pytest.raises(ConfigError, match="unknown option zzz$"):
        Config(zzz=1)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("pos_len", 1, "at least 2"),
        ("pos_len", 9.0, "expected int"),
        ("pos_len", "9", "expected int"),
        ("batch_size", 0, "at least 1"),
        ("batch_size", -16, "at least 1"),
        ("batch_size", True, "expected int"),
        ("batch_size", None, "expected int"),
        ("model_kind", "b12c2049", "b12c2048"),
        ("lr", -1e-4, "at least 0"),
        ("lr", float("nan"), "finite"),
        ("lr", float("inf"), "finite"),
        ("lr", "1e-4", "expected float"),
        ("wd", np.float64("nan"), "finite"),
        ("optimizer", "adam", "adamw, muon, sgd, none"),
        ("muon_momentum", 1.0, "below 1"),
        ("muon_target", "heads", "all, attn, ffn, square, none"),
        ("muon_polar_steps", 0, "at least 1"),
        ("muon_polar_steps", 6, "at most 5"),
        ("muon_group_blocks", 1, "expected bool"),
        ("grad_clip_norm", -1.0, "at least 0"),
        ("lr_schedule", "linear", "cosine, constant"),
        ("steps_per_jit", 0, "at least 1"),
        ("print_every", 0, "at least 1"),
        ("symmetry_type", "y", "xyt"),
        ("activation_dtype", "float16", "float32, fp32, bfloat16, bf16"),
        ("compute_dtype", "fp16", "float32, fp32, bfloat16, bf16"),
        ("ema_decay", 1.0, "below 1"),
        ("ema_decay", -0.1, "at least 0"),
        ("ema_decay", float("nan"), "finite"),
        ("score_mode", "mix", "simple"),
        ("seed", -1, "at least 0"),
        ("objective", "local", "replica, global"),
        ("data_parallel", "yes", "expected bool"),
        ("traindir", 3, "expected str"),
        ("datadir", b"data", "expected str"),
    ],
)
def test_a_bad_value_is_refused_with_its_option_and_what_is_allowed(name, value, allowed):
    with pytest.raises(ConfigError, match=allowed) as error:
        Config(**{name: value})
    assert name in str(error.value) and str(value) in str(error.value)
    assert "\n" not in str(error.value)


def test_values_of_the_same_meaning_are_accepted(tmp_path):
    config = Config(lr=1, batch_size=np.int64(32), ema_decay=np.float32(0.5), data_parallel=np.bool_(True), traindir=tmp_path)
    assert (config.lr, config.batch_size, config.ema_decay, config.data_parallel) == (1.0, 32, 0.5, True)
    assert type(config.lr) is float and type(config.batch_size) is int and type(config.data_parallel) is bool
    assert config.traindir == str(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"symmetry_type": "all", "batch_size": 12}, "batch_size 12 must divide by 8"),
        ({"data_parallel_devices": 4}, "data_parallel is off"),
        ({"data_parallel": True, "data_parallel_devices": 3}, "batch_size 16 does not divide by the 3 devices"),
        ({"data_parallel": True, "component_profile": True}, "data_parallel does not go with component_profile"),
        ({"data_parallel": True, "muon_split_jit": True}, "data_parallel does not go with muon_split_jit: train on one device"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Config(**options)


def test_separate_projections_win_over_fused_ones():
    config = Config(fuse_projections=True, separate_projections=True)
    assert not config.model.fused


def test_a_scan_over_blocks_stacks_them():
    # As recorded: the meta of a run with --scan-blocks alone says stack_blocks too.
    assert Config(scan_blocks=True).model.stacked and not Config().model.stacked
    assert Config(scan_blocks=True).model.scanned and not Config(stack_blocks=True).model.scanned


def test_a_config_is_frozen_and_its_copies_are_checked():
    config = Config(pos_len=9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.pos_len = 19
    changed = config.replace(batch_size=32)
    assert (changed.pos_len, changed.batch_size, config.batch_size) == (9, 32, 16)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        config.replace(batch_size=0)
    assert config == Config(pos_len=9) and hash(config) == hash(Config(pos_len=9)) and config != changed


def test_every_dtype_option_reaches_its_place():
    names = ("compute", "activation", "param", "opt_state", "opt_update", "rope", "ffn_mul", "attention_logits")
    base = Config(compute_dtype="float32").precision
    assert [getattr(base, name) for name in names] == [jnp.float32] * 8
    for name in names:
        precision = Config(**{"compute_dtype": "fp32", f"{name}_dtype": "bf16"}).precision
        assert {other: getattr(precision, other) for other in names} == {other: jnp.bfloat16 if other == name else jnp.float32 for other in names}


def test_the_gradient_norm_is_computed_where_it_is_logged_or_clipped():
    assert not Config().needs_grad_norm
    assert Config(log_grad_norm=True).needs_grad_norm and Config(grad_clip_norm=0.5).needs_grad_norm


# Flag, its words on the command line, and the option's value then.
FLAGS = [
    ("--traindir", "run", "run"),
    ("--datadir", "data", "data"),
    ("--pos-len", "9", 9),
    ("--batch-size", "64", 64),
    ("--model-kind", "b2c32", "b2c32"),
    ("--lr", "1e-3", 1e-3),
    ("--wd", "0", 0.0),
    ("--optimizer", "muon", "muon"),
    ("--muon-lr-multiplier", "0.3", 0.3),
    ("--muon-momentum", "0.9", 0.9),
    ("--muon-row-split-size", "64", 64),
    ("--muon-target", "ffn", "ffn"),
    ("--muon-polar-steps", "3", 3),
    ("--muon-group-blocks", None, True),
    ("--no-muon-group-blocks", None, False),
    ("--muon-split-jit", None, True),
    ("--loss-profile", "policy_only", "policy_only"),
    ("--grad-clip-norm", "1.5", 1.5),
    ("--lr-schedule", "constant", "constant"),
    ("--max-training-samples", "1000", 1000),
    ("--warmup-samples", "10", 10),
    ("--print-every", "1", 1),
    ("--steps-per-jit", "4", 4),
    ("--save-every-samples", "64", 64),
    ("--val-every-samples", "32", 32),
    ("--max-val-batches", "0", 0),
    ("--symmetry-type", "x+y", "x+y"),
    ("--enable-history-matrices", None, True),
    ("--allow-nonfull-mask", None, True),
    ("--no-resume", None, True),
    ("--no-final-save", None, True),
    ("--fuse-projections", None, True),
    ("--separate-projections", None, True),
    ("--attention-impl", "xla", "xla"),
    ("--activation-dtype", "bf16", "bf16"),
    ("--param-dtype", "bf16", "bf16"),
    ("--opt-state-dtype", "bf16", "bf16"),
    ("--opt-update-dtype", "bf16", "bf16"),
    ("--rope-dtype", "bf16", "bf16"),
    ("--ffn-mul-dtype", "bf16", "bf16"),
    ("--attention-logits-dtype", "bf16", "bf16"),
    ("--int8-train", None, True),
    ("--int8-target", "ffn", "ffn"),
    ("--int8-fwd-bits", "4", 4),
    ("--int8-bwd-bits", "4", 4),
    ("--ema-decay", "0.999", 0.999),
    ("--log-grad-norm", None, True),
    ("--log-step-time", None, True),
    ("--component-profile", None, True),
    ("--component-profile-repeats", "5", 5),
    ("--component-profile-grad", None, True),
    ("--donate-train-buffers", None, True),
    ("--data-parallel", None, True),
    ("--stack-blocks", None, True),
    ("--scan-blocks", None, True),
    ("--remat-blocks", None, True),
    ("--seed", "7", 7),
    ("--init-std", "0.01", 0.01),
    ("--score-mode", "simple", "simple"),
    ("--xla-peak-tflops", "100", 100.0),
    ("--compute-dtype", "float32", "float32"),
    ("--objective", "global", "global"),
    ("--data-parallel-devices", "4", 4),
    ("--check-replicas", "50", 50),
    ("--checkpoint-format", "legacy", "legacy"),
    ("--keep", "2", 2),
    ("--resume-order", "legacy", "legacy"),
    ("--allow-changes", "lr,seed", "lr,seed"),
    ("--on-nonfinite", "ignore", "ignore"),
    ("--skip-bad-files", None, True),
    ("--tensorboard", None, True),
    ("--shard-state", "data", "data"),
    ("--master-dtype", "float32", "float32"),
]


def option_of(flag):
    return flag.removeprefix("--no-muon").removeprefix("--").replace("-", "_") if flag != "--no-muon-group-blocks" else "muon_group_blocks"


def test_the_flag_table_is_complete():
    assert {option_of(flag) for flag, *_ in FLAGS} == ORIGINAL.keys() | BEYOND_THE_ORIGINAL.keys()


@pytest.mark.parametrize(("flag", "word", "value"), FLAGS)
def test_every_option_has_its_flag(flag, word, value):
    arguments = make_parser("train").parse_args([flag] if word is None else [flag, word])
    assert vars(arguments) == {option_of(flag): value}
    assert type(vars(arguments)[option_of(flag)]) is type(value)


def test_flags_that_are_not_given_leave_the_defaults():
    assert from_arguments(make_parser("train").parse_args([])) == Config()
    config = from_arguments(make_parser("train").parse_args(["--pos-len", "9", "--no-muon-group-blocks"]), batch_size=64)
    assert config == Config(pos_len=9, muon_group_blocks=False, batch_size=64)


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        make_parser("train").parse_args(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for flag, *_ in FLAGS:
        assert flag in shown, flag


@pytest.mark.parametrize(("words", "named"), [(["--batchsize", "3"], "--batchsize"), (["--lr", "fast"], "fast"), (["--seed"], "--seed")])
def test_a_bad_command_line_is_one_line_that_names_the_word(words, named, capsys):
    with pytest.raises(SystemExit) as end:
        make_parser("train").parse_args(words)
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and named in lines[0]


def test_options_can_be_left_out_of_a_command():
    parser = argparse.ArgumentParser()
    add_options(parser, leave_out=("data_parallel", "data_parallel_devices"))
    flags = {word for action in parser._actions for word in action.option_strings}
    assert "--data-parallel" not in flags and "--data-parallel-devices" not in flags and "--lr" in flags


def test_the_table_documents_every_option():
    for row in dataclasses.fields(config_module.Config):
        assert row.metadata["help"].strip(), row.name
