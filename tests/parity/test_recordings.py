"""The recordings of the original: the committed results of replaying them, and the proof that the judge of them can fail."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from . import recordings

RESULTS = Path(__file__).parent / "results"
LEAVES = {"a/w": (4, 6), "a/b": (4,), "c/w": (3, 5), "c/b": (3,)}
HEADS = {"policy": (4, 2, 5), "value": (4, 3)}
CASE = "tiny_f32"


# The committed results of the whole set



def test_the_recordings_were_reproduced_within_limits():
    """All seven, in default and in exact mode, on the newest JAX that Python 3.11 runs."""
    results = read_results("0.10.2")
    assert set(results["cases"]) == set(recordings.CASES)
    for case, stacks in results["cases"].items():
        assert set(stacks) == set(recordings.STACKS)
        for stack, result in stacks.items():
            assert result["passed"] and {row["group"] for row in result["rows"]} == expected_groups(case)
            assert all(row["items"] > 0 for row in result["rows"])


@pytest.mark.parametrize("version", ["0.7.2", "0.10.2", "0.12.0.1"])
def test_every_replay_that_is_committed_kept_its_limits(version):
    results = read_results(version)
    assert results["environment"]["JAX"] == version and len(results["cases"]) >= 3
    for case, stacks in results["cases"].items():
        for stack, result in stacks.items():
            assert result["jax"] == version
            assert ("--xla_disable_hlo_passes=fusion" in result["xla_flags"]) == case.endswith("/exact")
            assert result["passed"] and [row["verdict"] for row in result["rows"] if not row["passed"]] == [], (case, stack)


def read_results(version: str) -> dict:
    return json.loads((RESULTS / f"recordings_jax_{version}.json").read_text())


def expected_groups(case: str) -> set[str]:
    groups = {"counts", "start states as loaded", "head outputs", "evaluation: metrics"}
    groups |= {f"one device: {stage}" for stage in ("gradient", "metrics", "moving statistics")}
    groups |= {f"kept checkpoints: {stage}" for stage in ("parameters", "moments", "moving statistics")}
    if not case.startswith("single_device"):
        groups |= {f"D devices: {stage}" for stage in ("loss terms", "gradient", "metrics", "moving statistics")}
    if case.startswith(("adamw_f32", "single_device", "muon_attn", "stacked")):
        groups |= {"kept checkpoints: ema"}
    if not case.endswith("/exact"):
        groups |= {"log", "meta of the checkpoint"}
    return groups | ({"batch stream"} if case == "adamw_f32" else set())


def test_every_case_is_recorded():
    """The folder of recordings beside the checkout holds what the results speak of."""
    if not recordings.TRACES.is_dir():
        pytest.skip(f"no folder of recordings at {recordings.TRACES}: the committed results cannot be checked against it")
    for case in recordings.CASES:
        arrays, lines, meta = recordings.read_recording(recordings.TRACES / case)
        assert {"step_0000/step", "start/step", "values/metrics_eval_1"} <= arrays.keys()
        assert bool(lines) == bool(meta) == (not case.endswith("/exact"))


# The judge can fail: small made-up recordings, replays of them with other rounding errors, and one fault at a time


def make_truth(rng) -> dict[str, np.ndarray]:
    """What a float64 run of the made-up case would dump."""
    truth = {}
    for step in (0, 1, 2):
        for kind in ("params", "opt_state/m", "opt_state/v"):
            for name, shape in LEAVES.items():
                start = truth.get(f"step_0000/{kind}/{name}", rng.normal(size=shape).astype(np.float32).astype(np.float64))
                truth[f"step_{step:04d}/{kind}/{name}"] = start + step * 1e-2 * rng.normal(size=shape)
        truth |= {f"step_{step:04d}/{name}": np.float64(step * 0.7) for name in ("moving_sum",)}
        truth |= {f"step_{step:04d}/moving_weight": np.float64(step), f"step_{step:04d}/step": np.int64(step), f"step_{step:04d}/samples": np.int64(8 * step)}
    truth |= {f"values/out/{name}": rng.normal(size=shape) for name, shape in HEADS.items()}
    for where in ("1", "D"):
        truth |= {f"values/grad_{where}/{name}": rng.normal(size=shape) for name, shape in LEAVES.items()}
        truth |= {f"values/metrics_train_{where}": 1 + rng.random(26), f"values/moving_{where}": np.array([0.25, 2.0])}
    truth |= {"values/metrics_eval_1": 1 + rng.random(26), "values/metrics_local_D": 1 + rng.random((2, 26))}
    truth |= {f"batches/0/{name}": rng.integers(0, 2, (8, 3)).astype(np.float32) for name in ("planes", "targets")}
    for line in ("step=1", "step=2", "VAL"):
        names = ("loss", "p0loss", "grad_norm", "lr") if line != "VAL" else ("loss", "p0loss")
        truth |= {f"figures/{line}/{name}": np.float64(1 + rng.random()) for name in names}
    return truth


def as_kept(x: np.ndarray) -> np.ndarray:
    return np.asarray(x) if np.asarray(x).dtype == np.int64 else np.asarray(x, np.float32)


def with_errors(truth, rng) -> dict[str, np.ndarray]:
    """A float32 side: errors of a few units in the last place wherever something was computed."""
    side = {}
    for name, x in truth.items():
        copied = name.startswith(("step_0000/", "batches/")) or "moving_" in name
        noise = 0 if copied else 3e-7 * rng.normal(size=np.shape(x)) * np.asarray(x)
        side[name] = as_kept(x + noise) if np.asarray(x).dtype != np.int64 else x
    return side


def starting_from(side, recorded) -> dict[str, np.ndarray]:
    """`side` with the recorded step 1 as the start of its values, in its own dtypes."""
    return side | {
        name.replace("step_0001", "start"): np.asarray(x, np.asarray(side[name]).dtype) for name, x in recorded.items() if "step_0001" in name
    }


def texts_of(side) -> list[str]:
    digits = {"grad_norm": ".3f", "lr": ".2e"}
    lines = []
    for line in ("step=1", "step=2", "VAL"):
        figures = {name.rpartition("/")[2]: x for name, x in side.items() if name.startswith(f"figures/{line}/")}
        text = ", ".join(f"{name}={float(x):{digits.get(name, '.4f')}}" for name, x in figures.items())
        lines.append(f"{line}, samples=8, wd=0.1000, {text}" if line != "VAL" else f"  VAL [16 samples]: {text}")
    return lines


def nest(flat: dict[str, np.ndarray]) -> dict:
    tree = {}
    for name, x in flat.items():
        *path, last = name.split("/")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = x
    return tree


def write_recording(folder: Path, side):
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps({"datadir": "data", "compute": "float32", "flags": []}))
    for step in ("step_0000", "step_0001", "step_0002"):
        flat = {name.removeprefix(f"{step}/"): x for name, x in side.items() if name.startswith(f"{step}/")}
        meta = {name: flat.pop(name).item() for name in ("moving_sum", "moving_weight", "step", "samples")}
        (folder / f"{step}.pkl").write_bytes(pickle.dumps(nest(flat) | {"meta": meta}))
    for prefix in ("values", "batches"):
        np.savez(folder / f"{prefix}.npz", **{name.removeprefix(f"{prefix}/"): x for name, x in side.items() if name.startswith(f"{prefix}/")})
    (folder / "train.log").write_text("\n".join(texts_of(side)) + "\n")


def write_replay(dumps: Path, side_name: str, side, **facts):
    stem = recordings.dump_stem(dumps, CASE, side_name)
    meta = {"moving_sum": float(side["step_0002/moving_sum"]), "moving_weight": 2.0, "step": 2, "samples": 16}
    items = [{"name": f"log/{i}", "equal": True, "text": text} for i, text in enumerate(texts_of(side))]
    items += [{"name": f"meta/{name}", "equal": True, "text": repr(value)} for name, value in meta.items()]
    compute = "float64" if side_name == recordings.REFERENCE else "float32"
    content = {"jax": "9.9", "xla_flags": "", "compute": compute, "kernels": None, "reproduced": False, "seconds": 1, "items": items, "bfloat16": []} | facts
    Path(f"{stem}.json").write_text(json.dumps(content))
    np.savez(f"{stem}.npz", **side)


@pytest.fixture
def made_up(tmp_path):
    """A recording and the dumps of its replays; `judge(new)` is the exit code with `new` as the replay of legacy_pmap."""
    rng = np.random.default_rng(3)
    truth = make_truth(rng)
    old, new, another = (with_errors(truth, rng) for _ in range(3))
    truth, new, another = (starting_from(side, old) for side in (truth, new, another))
    write_recording(tmp_path / "traces" / CASE, old)
    (tmp_path / "dumps").mkdir()
    write_replay(tmp_path / "dumps", recordings.REFERENCE, truth)

    def judge(new, noise=another, **facts):
        write_replay(tmp_path / "dumps", "legacy_pmap", new, **facts)
        write_replay(tmp_path / "dumps", recordings.NOISE, noise)
        flags = ["--traces", tmp_path / "traces", "--cases", CASE, "--stacks", "legacy_pmap", "--judge-only", "--dumps", tmp_path / "dumps"]
        code = recordings.main([*map(str, flags), "--json", str(tmp_path / "results.json")])
        return code, json.loads((tmp_path / "results.json").read_text())["cases"][CASE]["legacy_pmap"]

    return new, judge


def test_another_rounding_is_within_limits(made_up):
    new, judge = made_up
    code, result = judge(new)
    assert code == 0 and result["passed"], [row["verdict"] for row in result["rows"]]
    rows = {row["group"]: row for row in result["rows"]}
    assert rows["D devices: gradient"]["equal"] < rows["D devices: gradient"]["items"] == len(LEAVES)


@pytest.mark.parametrize(
    "name, group",
    [
        ("step_0002/params/c/w", "kept checkpoints: parameters"),
        ("step_0001/opt_state/v/a/b", "kept checkpoints: moments"),
        ("step_0000/params/a/w", "start states as loaded"),
        ("step_0002/moving_weight", "kept checkpoints: moving statistics"),
        ("values/out/policy", "head outputs"),
        ("values/grad_1/a/w", "one device: gradient"),
        ("values/grad_D/c/b", "D devices: gradient"),
        ("values/metrics_eval_1", "evaluation: metrics"),
        ("values/metrics_local_D", "D devices: loss terms"),
        ("batches/0/planes", "batch stream"),
        ("figures/step=2/loss", "log"),
    ],
)
def test_one_leaf_a_thousandth_too_large_is_found(made_up, name, group):
    new, judge = made_up
    code, result = judge(new | {name: (new[name] * np.float32(1.001)).astype(new[name].dtype)})
    assert code == 1 and [row["group"] for row in result["rows"] if not row["passed"]] == [group]


@pytest.mark.parametrize("name", ["step_0002/params/c/w", "values/grad_D/c/b", "values/out/value", "batches/0/targets"])
def test_a_missing_leaf_is_found(made_up, name):
    new, judge = made_up
    code, result = judge({key: x for key, x in new.items() if key != name})
    assert code == 1 and not result["passed"]


def test_the_printed_text_counts(made_up):
    """A last digit that differs is judged by the value behind it, and a text that its value does not round to is refused."""
    new, judge = made_up
    loss = new["figures/VAL/loss"]
    nudged = new | {"figures/VAL/loss": loss + np.float32(0.00005)}  # another last digit, within the rounding of the recorded one
    code, result = judge(nudged)
    row = next(row for row in result["rows"] if row["group"] == "log")
    assert code == 0 and row["equal"] == row["items"] - 1 and row["verdict"] == "within limits" and "VAL" in row["notes"][0]
    lying = [{"name": f"log/{i}", "equal": True, "text": text} for i, text in enumerate(texts_of(nudged))]
    code, result = judge(new | {"figures/VAL/loss": loss - np.float32(0.00005)}, items=lying)
    assert code == 1 and any("its value is" in note for row in result["rows"] for note in row["notes"])


def test_bits_are_demanded_where_the_recordings_were_made(made_up, monkeypatch):
    new, judge = made_up
    assert judge(new, kernels="others", reproduced=True)[0] == 0
    monkeypatch.setattr(recordings, "has_avx512", lambda: True)
    code, result = judge(new, kernels="unknown", reproduced=False)
    assert code == 1 and [row["group"] for row in result["rows"] if not row["passed"]] == ["every bit of every item"]
    monkeypatch.setattr(recordings, "has_avx512", lambda: False)
    code, result = judge(new, kernels="unknown", reproduced=False)
    assert code == 0 and any("NOT THE RECORDINGS' KERNELS" in row["verdict"] for row in result["rows"])


def test_a_leaf_that_rounding_carries_far_is_judged_by_the_noise_run(made_up):
    """An error that no other leaf has passes where the noise run has it too, to twice its size and no further."""
    new, judge = made_up
    name = "values/grad_D/c/b"
    off = 1e-4 * np.linalg.norm(new[name]) / new[name].size ** 0.5
    spoiled = new | {name: new[name] + np.float32(off)}
    assert judge(spoiled)[0] == 1
    assert judge(spoiled, noise=new | {name: new[name] - np.float32(0.6 * off)})[0] == 0
    assert judge(spoiled, noise=new | {name: new[name] - np.float32(0.4 * off)})[0] == 1


@pytest.mark.parametrize("ones, more, flags", [(2592.0, [], ""), (768.0, [], recordings.WITHOUT_YNNPACK), (768.0, ["--as-is"], "")])
def test_bfloat16_sums_of_the_compiler(tmp_path, monkeypatch, capsys, ones, more, flags):
    """Where XLA sums bfloat16 products in bfloat16, bfloat16 cases are replayed without that, and it is said; others are not."""
    used = {}

    def replay(traces, data, case, side, dumps, xla_flags):
        used[case] = xla_flags
        return 0.0

    for case, compute in (("low", "bfloat16"), ("full", "float32")):
        (tmp_path / case).mkdir()
        (tmp_path / case / "case.json").write_text(json.dumps({"datadir": "data", "compute": compute}))
    monkeypatch.setattr(recordings, "replay", replay)
    monkeypatch.setattr(recordings, "sum_of_ones", lambda: ones)
    recordings.main(["--traces", str(tmp_path), "--cases", "low", "full", *more])
    assert used == {"low": flags, "full": ""}
    assert ("XLA SUMS BFLOAT16" in capsys.readouterr().out) == (ones != 2592)


def test_nothing_to_judge_is_an_error(tmp_path, capsys):
    flags = ["--traces", str(tmp_path), "--cases", "none", "--judge-only", "--dumps", str(tmp_path)]
    assert recordings.main(flags) == 2
    assert "none" in capsys.readouterr().err
