"""Other JAX versions than the one `pip install` brings: `nox` runs all sessions, `nox -s jax072 -- ARGUMENTS` one of them."""

import os
import pathlib
import shutil
import subprocess
import sys

import nox

ROOT = pathlib.Path(__file__).resolve().parent
# Without what shows nothing of JAX's version (lines, options, judges, the old stack's own tests): the README's test command runs that.
ONCE = ("legacy", "test_profile.py", "test_profiles.py", "test_train.py", "test_options.py", "test_recordings.py", "test_replay.py", "test_benchmarks.py", "test_benchmark_scripts.py")
SPLIT = "tests/test_shares.py::test_every_bit_is_that_of_the_whole_state"
PARITY_TESTS = ("tests/parity", SPLIT, *(f"--ignore=tests/parity/{test}" for test in ONCE))
# `python -m tests.parity.recordings` alone replays all, in both modes; its last full results are in tests/parity/results/recordings_jax_*.json.
# These have every optimizer, layout and precision of them, and 8 and 16 devices.
NAMES = ("adamw_f32", "muon_attn_allbf16", "fused_scan_sgd_f32", "stacked_muon_ffn_d16")
EXACT = tuple(f"{name}/exact" for name in NAMES)

JAX_0435 = ("jax==0.4.35", "jaxlib==0.4.35", "numpy<2.5", "ml_dtypes")

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["jax072", "jax012", "recordings", "recordings_now", "across"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"


def python_version(python: str) -> tuple[int, int] | None:
    """The version of an interpreter, or None where it does not start (a pyenv shim of a version that is not selected, say)."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor = answer.split()
    return int(major), int(minor)


def pyenv_root() -> pathlib.Path | None:
    if root := os.environ.get("PYENV_ROOT"):
        return pathlib.Path(root)
    if pyenv := shutil.which("pyenv"):
        answer = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return pathlib.Path(answer.stdout.strip())
    return None


def find_python(*versions: str) -> str | None:
    """The first of these versions ("3.13") that is there: the one nox runs on, one on PATH, or one that pyenv holds."""
    root = pyenv_root()
    for version in versions:
        wanted = tuple(int(part) for part in version.split("."))
        candidates = [sys.executable, shutil.which(f"python{version}")]
        if root is not None:
            candidates += [str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python"))]
        for python in candidates:
            if python and python_version(python) == wanted:
                return python
    return None


def run_pytest(session: nox.Session, *requirements: str) -> None:
    session.install("-e", ".[test]", *requirements)
    session.run("python", "-c", "import jax, jaxlib, sys; print(sys.version, 'JAX', jax.__version__, 'jaxlib', jaxlib.__version__)")
    session.run("python", "-m", "pytest", *(session.posargs or PARITY_TESTS))


def not_run(session: nox.Session, reason: str) -> None:
    print(f"\nNOT RUN: {session.name}: {reason}\n", flush=True)
    session.skip(f"NOT RUN: {reason}")


PYTHON_JAX012 = find_python("3.13", "3.12", "3.14")
PYTHON_RECORDINGS = find_python("3.11", "3.12", "3.13")


@nox.session
def jax072(session: nox.Session) -> None:
    """The parity tests on JAX 0.7.2, where pmap is still the original; arguments after `--` go to pytest."""
    run_pytest(session, "jax==0.7.2", "jaxlib==0.7.2")


@nox.session(python=PYTHON_JAX012, venv_backend=None if PYTHON_JAX012 else "none")
def jax012(session: nox.Session) -> None:
    """The parity tests on JAX 0.12, which needs Python 3.12 or later; arguments after `--` go to pytest."""
    if PYTHON_JAX012 is None:
        not_run(session, "no Python >= 3.12 found (tried 3.13, 3.12 and 3.14 on PATH and under pyenv)")
    run_pytest(session, "jax==0.12.*", "jaxlib==0.12.*")


def find_traces(session: nox.Session) -> pathlib.Path:
    """The folder of recordings: the session's only argument, or the one beside the checkout."""
    if len(session.posargs) > 1:
        session.error(f"{session.name} takes at most one argument, the folder of recordings")
    traces = pathlib.Path(session.posargs[0]) if session.posargs else ROOT.parent / "shared" / "traces"
    if not traces.is_dir():
        if session.posargs:
            session.error(f"{traces}: no such folder")
        not_run(session, f"no folder of recordings at {os.path.relpath(traces, ROOT)}; name one with `nox -s {session.name} -- FOLDER`")
    return traces


@nox.session(python=PYTHON_RECORDINGS, venv_backend=None if PYTHON_RECORDINGS else "none")
def recordings(session: nox.Session) -> None:
    """legacy_pmap against recordings of the original, on the JAX that made them: bits and bound; `-- FOLDER` names their folder."""
    traces = find_traces(session)
    if PYTHON_RECORDINGS is None:
        not_run(session, "JAX 0.4.35 needs Python 3.11, 3.12 or 3.13, and none was found")
    session.install(*JAX_0435, "rich", "matplotlib")
    session.run("python", "-m", "tests.parity.recordings", "--traces", str(traces), "--cases", *EXACT, "muon_attn_allbf16")


@nox.session
def recordings_now(session: nox.Session) -> None:
    """Both stacks against the recordings, on the newest JAX that this Python runs; `-- FOLDER` names the folder of recordings."""
    traces = find_traces(session)
    session.install("-e", ".[test]")
    session.run("python", "-m", "tests.parity.recordings", "--traces", str(traces), "--cases", *EXACT)


@nox.session
def across(session: nox.Session) -> None:
    """The old stack on the JAX that its recordings were made with against both stacks here; arguments after `--` go to `kgo-shard diff`."""
    if PYTHON_RECORDINGS is None:
        not_run(session, "JAX 0.4.35 needs Python 3.11, 3.12 or 3.13, and none was found")
    session.install("-e", ".[test]")
    there = pathlib.Path(session.create_tmp()) / "jax0435"
    session.run(PYTHON_RECORDINGS, "-m", "venv", str(there), external=True)
    python = str(there / "bin" / "python")
    session.run(python, "-m", "pip", "install", "--quiet", *JAX_0435, external=True)
    session.run("kgo-shard", "diff", "--exact", "--steps", "3", "--legacy-python", python, *session.posargs)
