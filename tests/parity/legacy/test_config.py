"""Options: defaults of the specification, refusals that name the option."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import legacy_pmap as stack
from legacy_pmap.config import parse_args


def test_defaults_are_the_originals():
    config = stack.Config()
    expected = dict(pos_len=19, batch_size=16, model_kind="b12c2048", lr=2e-4, wd=0.1, optimizer="adamw", muon_group_blocks=True,
                    max_training_samples=32768, warmup_samples=4096, print_every=20, steps_per_jit=1, max_val_batches=16,
                    symmetry_type="xyt", seed=1234, init_std=0.02, xla_peak_tflops=918.0, compute_dtype="bfloat16",
                    objective="replica", traindir=None, datadir=None, ema_decay=0.0)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("options, words", [
    (dict(bach_size=3), ["bach_size", "batch_size"]),
    (dict(batch_size=0), ["batch_size", "0", "at least 1"]),
    (dict(batch_size=2.5), ["batch_size", "2.5", "integer"]),
    (dict(batch_size=True), ["batch_size", "True"]),
    (dict(lr=float("nan")), ["lr", "nan"]),
    (dict(lr="1"), ["lr", "'1'"]),
    (dict(data_parallel=1), ["data_parallel", "1"]),
    (dict(model_kind="b1c1"), ["model_kind", "b1c1", "b2c32"]),
    (dict(symmetry_type="y"), ["symmetry_type", "'y'", "x+y"]),
    (dict(symmetry_type="all", batch_size=12), ["batch_size", "12", "all"]),
    (dict(ema_decay=1.0), ["ema_decay", "1.0"]),
    (dict(muon_polar_steps=6), ["muon_polar_steps", "6"]),
    (dict(activation_dtype="float16"), ["activation_dtype", "float16", "bf16"]),
    (dict(objective="global"), ["objective", "global", "replica"]),
    (dict(compute_dtype="float64"), ["compute_dtype", "float64", "jax_enable_x64"]),
    (dict(data_parallel_devices=2), ["data_parallel_devices", "data_parallel"]),
    (dict(data_parallel=True, muon_split_jit=True), ["data_parallel", "muon_split_jit", "drop one"]),
    (dict(data_parallel=True, component_profile=True), ["data_parallel", "component_profile", "drop one"]),
    (dict(data_parallel=True, data_parallel_devices=1000), ["data_parallel_devices", "1000"]),
])
def test_bad_options_are_refused_by_name(options, words):
    with pytest.raises(ValueError) as error:
        stack.Config(**options)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_separate_projections_wins():
    for yes in (True, np.True_):
        assert not stack.Config(fuse_projections=yes, separate_projections=yes).fuse_projections


def test_a_scan_over_blocks_stacks_them():
    assert stack.Config(scan_blocks=True).stack_blocks and stack.Config(scan_blocks=np.True_).stack_blocks
    assert not stack.Config(scan_blocks=False).stack_blocks


def test_batch_must_divide_by_devices():
    with pytest.raises(ValueError) as error:
        stack.Config(batch_size=16, data_parallel=True, data_parallel_devices=min(3, jax.local_device_count()) or 1)
        stack.Config(batch_size=jax.local_device_count() + 1, data_parallel=True)
    assert "batch_size" in str(error.value) and "divide" in str(error.value)


def test_every_option_has_a_flag():
    argv = ["--traindir", "t", "--datadir", "d"]
    config = parse_args(argv)
    assert config == stack.Config(traindir="t", datadir="d")
    flags = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(config)}
    text = subprocess.run([sys.executable, "-m", "legacy_pmap", "--help"], capture_output=True, text=True, check=True,
                          env={**os.environ, "COLUMNS": "200"}).stdout
    assert flags <= set(text.replace(",", " ").replace("]", " ").replace("[", " ").split())
    assert not parse_args([*argv, "--no-muon-group-blocks"]).muon_group_blocks


def test_main_reports_bad_options(capsys):
    assert stack.main(["--traindir", "t", "--datadir", "d", "--batch-size", "0"]) == 2
    assert "batch_size=0" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--muon-polar-steps", "x"], ["--optimizer"], ["--muon-targ", "attn"]])
def test_a_bad_command_line_is_one_line(capsys, words):
    with pytest.raises(SystemExit) as ended:
        stack.main(["--traindir", "t", "--datadir", "d", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and words[0] in error
