"""The `kgo-shard` command: what it starts, and its exit codes."""

import os
import subprocess
import sys

import jax
import pytest

from kgo_shard import __main__ as command
from kgo_shard.config import Config, ConfigError
from kgo_shard.diff import mesh_check
from kgo_shard.diff.recording import exact_flags


@pytest.fixture(scope="module", autouse=True)
def jax_runs():
    """Before any command: one that comes first would give the whole test process its own number of devices."""
    assert jax.local_device_count() == 16


def run(capsys, *words):
    """(exit code, stdout, lines on stderr) of `kgo-shard WORDS`."""
    try:
        code = command.main([str(word) for word in words])
    except SystemExit as end:  # argparse's way
        code = end.code
    shown = capsys.readouterr()
    return code, shown.out, shown.err.splitlines()


# check-mesh


def test_check_mesh_passes_on_this_machine(capsys):
    code, out, err = run(capsys, "check-mesh", "--devices", 4)
    assert code == 0 and "PASSED" in out and "4 devices" in out and err == []


def test_check_mesh_fails_with_exit_code_1_where_an_expectation_fails(capsys, monkeypatch):
    monkeypatch.setattr(mesh_check, "REFERENCE_GRADIENT", (-2.966796875, -3.0))
    code, out, err = run(capsys, "check-mesh", "--devices", 2)
    assert code == 1 and "FAILED" in out


@pytest.mark.parametrize(("devices", "named"), [(0, "--devices 0"), (-1, "--devices -1"), (64, "--devices 64"), (3, "3 devices do not divide 32")])
def test_check_mesh_cannot_be_tried_on_such_devices(capsys, devices, named):
    code, _, err = run(capsys, "check-mesh", "--devices", devices)
    assert code == 2 and len(err) == 1 and named in err[0]


# train


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--muon-targ", "attn"], "unrecognized arguments: --muon-targ attn: did you mean --muon-target?"),
        (["--allow-changes", "wdd"], "allow_changes names wdd, which is no option: did you mean wd?"),
        (["--shard-state", "data"], "shard_state is data but data_parallel is off"),
        (["--checkpoint-format", "legacy", "--master-dtype", "float32"], "checkpoint_format legacy has no room for master_dtype float32"),
        (["--int8-train"], "int8_train = True: INT8 products need the original's optional quantisation package"),
        (["--component-profile", "--data-parallel"], "data_parallel does not go with component_profile"),
        (["--component-profile", "--component-profile-repeats", "0"], "component_profile_repeats = 0: must be at least 1"),
    ],
)
def test_train_with_bad_options_is_exit_code_2_and_one_line(capsys, tmp_path, words, named):
    code, out, err = run(capsys, "train", "--traindir", tmp_path / "run", "--datadir", tmp_path, *words)
    assert code == 2 and out == "" and len(err) == 1 and named in err[0]
    assert list(tmp_path.iterdir()) == []


# diff


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--batch-size", "30"], "batch_size 30 does not divide by the 8 devices"),
        (["--model-kind", "b1c1"], "model_kind = 'b1c1'"),
        (["--optimizer", "lion"], "optimizer = 'lion'"),
        (["--steps", "0"], "--steps 0"),
        (["--steps", "few"], "--steps"),
        (["--devices", "0"], "--devices 0"),
        (["--devices", "99"], "--devices 99"),
        (["--devices", "100000"], "--devices 100000: must be from 1 to 512"),
        (["--shard-stat", "data"], "--shard-stat data: did you mean --shard-state?"),
        (["--datadir", "/nowhere"], "/nowhere/train: no such folder"),
        (["--fault", "gremlin"], "--fault gremlin: choose from"),
        (["--batchsize", "32"], "--batchsize"),
        (["--data-parallel-devices", "2"], "--data-parallel-devices"),  # --devices says it
    ],
)
def test_diff_with_bad_options_is_exit_code_2_and_one_line(capsys, words, named):
    code, _, err = run(capsys, "diff", *words)
    assert code == 2 and len(err) == 1 and named in err[0], err


def test_diff_of_an_empty_folder_is_refused(capsys, tmp_path):
    (tmp_path / "train").mkdir()
    code, _, err = run(capsys, "diff", "--datadir", tmp_path)
    assert code == 2 and len(err) == 1 and "holds no npz files" in err[0]


def test_without_a_data_folder_diff_takes_the_shipped_rows_and_a_model_that_fits(rows9):
    arguments = command.make_parser().parse_args(["diff", "--devices", "4", "--lr", "0.1", "--wd", "0.5"])
    tape = command.make_tape(arguments)
    config = Config(**tape.options)
    assert (config.pos_len, config.model_kind, config.batch_size, config.compute_dtype) == (9, "b2c32", 32, "float32")
    assert (config.lr, config.wd, config.data_parallel_devices, config.log_grad_norm) == (0.1, 0.5, 4, True)
    assert [path.name for path in tape.files] == ["data0.npz", "data1.npz"] and tape.files[0].samefile(rows9 / "train" / "data0.npz")
    assert tape.steps == 5 and tape.checkpoint is None


def test_with_a_data_folder_diff_has_the_originals_defaults(rows19):
    arguments = command.make_parser().parse_args(["diff", "--devices", "1", "--datadir", str(rows19), "--steps", "2", "--checkpoint", "a.pkl"])
    tape = command.make_tape(arguments)
    config = Config(**tape.options)
    assert (config.pos_len, config.model_kind, config.batch_size) == (19, "b12c2048", 16) and not config.data_parallel
    assert tape.steps == 2 and str(tape.checkpoint) == "a.pkl"


# train, demo, help


def test_train_is_handed_over_with_its_words(capsys, tmp_path):
    code, out, err = run(capsys, "train", "--traindir", tmp_path / "run", "--datadir", tmp_path / "nowhere")
    assert code == 2 and out == "" and len(err) == 1 and str(tmp_path / "nowhere") in err[0]
    code, out, _ = run(capsys, "train", "--help")
    assert code == 0 and "--no-muon-group-blocks" in out


def test_without_a_command_there_is_one_line(capsys):
    code, out, err = run(capsys)
    assert code == 2 and out == "" and len(err) == 1 and "COMMAND" in err[0]
    code, _, err = run(capsys, "dance")
    assert code == 2 and len(err) == 1 and "dance" in err[0]


def test_help_names_the_commands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(name in out for name in ("train", "check-mesh", "diff", "demo"))


def test_exact_mode_restarts_the_same_command_with_the_compilers_flags(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_disable_hlo_passes=dot-merger")
    assert not command.is_exact()
    command.restart_exact(["diff", "--exact"])
    ((program, argv, environment),) = started
    assert program == sys.executable and argv == [sys.executable, "-m", "kgo_shard", "diff", "--exact"]
    flags = environment["XLA_FLAGS"].split()
    # What else was asked of the compiler stays; no flag is there twice.
    assert flags == ["--xla_force_host_platform_device_count=8", *exact_flags()]
    assert exact_flags()[:2] == ("--xla_disable_hlo_passes=fusion", "--xla_cpu_max_isa=SSE4_2")
    assert len(exact_flags()) == (3 if jax.__version_info__ >= (0, 10) else 2)
    monkeypatch.setenv("XLA_FLAGS", environment["XLA_FLAGS"])
    assert command.is_exact()


def test_the_tests_themselves_run_in_exact_mode():
    assert command.is_exact()


def test_devices_are_there_or_refused():
    command.start_devices(16)
    assert jax.local_device_count() == 16
    with pytest.raises(ConfigError, match="--devices 17: this process has 16"):
        command.start_devices(17)


@pytest.mark.parametrize("flag", ["--report", "--json"])
def test_a_report_that_cannot_be_written_is_refused_at_once(capsys, tmp_path, flag, monkeypatch):
    monkeypatch.setattr(command, "run_faults", lambda *_: pytest.fail("it has begun"))
    (tmp_path / "file").write_text("mine")
    code, _, err = run(capsys, "faults", flag, tmp_path / "file" / "below")
    assert code == 2 and len(err) == 1 and f"{flag} {tmp_path / 'file' / 'below'}: cannot be written" in err[0]
    if flag == "--json":
        assert "is a folder" in run(capsys, "faults", flag, tmp_path)[2][0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_command_says_so(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_check_mesh", interrupted)
    assert run(capsys, "check-mesh") == (130, "", ["interrupted"])


def test_no_import_starts_jax():
    """The commands ask for their devices after their imports: an array made at import would leave them one device."""
    code = (
        "import importlib, pkgutil, jax, kgo_shard\n"
        "for module in pkgutil.walk_packages(kgo_shard.__path__, 'kgo_shard.'):\n"
        "    if not module.name.endswith(('legacy_side', 'legacy_process')):\n"
        "        importlib.import_module(module.name)\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.local_device_count() == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
