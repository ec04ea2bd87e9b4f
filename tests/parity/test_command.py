"""`kgo-shard diff` and `demo` as a user starts them: in a process of their own, without exact mode unless asked for."""

import json
import os
import subprocess
import sys

import pytest


def kgo_shard(*arguments, timeout=900):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "kgo_shard", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.long
def test_default_mode_keeps_the_three_way_bound(tmp_path):
    """Where the compiler may fuse, last bits differ; the new side's error against float64 stays within the old side's limit."""
    result = kgo_shard("diff", "--steps", 4, "--report", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"].startswith("WITHIN LIMITS")
    leaves = report["sections"][0]["data"]["leaves"]
    assert max(leaf["x_of_limit"] for leaf in leaves if leaf["x_of_limit"] is not None) <= 1
    assert {leaf["step"] for leaf in leaves} == {0, 1, 2, 3, 4}
    assert (tmp_path / "report.html").stat().st_size > 0


@pytest.mark.long
def test_a_fault_exits_with_1_and_is_named(tmp_path):
    result = kgo_shard("diff", "--steps", 1, "--exact", "--states-only", "--fault", "decay_on_norms", "--report", tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "first at step 1, stage parameters, leaf blocks/0/norm1/weight" in json.loads((tmp_path / "report.json").read_text())["verdict"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--batch-size", "30"), "batch_size 30"),
        (("--fault", "gremlins"), "gremlins"),
        (("--fault", "naive_port", "--shard-state", "data"), "--fault naive_port: not with --shard-state data"),
        (("--master-dtype", "float32"), "master_dtype float32: the old stack has only param"),
        (("--objective", "global"), "objective global: the old stack has only replica"),
        (("--checkpoint", "nowhere.pkl"), "nowhere.pkl"),
        (("--pos-len", "19"), "--pos-len"),
        (("--states-only",), "--states-only needs --exact"),
        (("--steps", "0"), "--steps 0"),
        (("--devices", "0"), "--devices 0"),
        (("--lr", "nan"), "lr"),
        (("--optimizer", "lion"), "optimizer"),
    ],
)
def test_what_cannot_be_compared_exits_with_2_and_one_line(arguments, named, tmp_path):
    result = kgo_shard("diff", "--report", tmp_path / "report", *arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert named in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "report").exists()
