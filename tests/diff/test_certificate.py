"""The certificate puts every part on one page, and fails when one part does. Its parts have their own tests; here they are made up."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from kgo_shard.__main__ import SAMPLE, SAMPLE_OPTIONS
from kgo_shard.batches import find_files
from kgo_shard.diff import audit, certificate, collectives, compare, report, split_audit
from kgo_shard.diff.trace import Tape

ONE = collectives.Collective("all_reduce", "f32", 6, 8)


def trace(shift=0.0, dtype=np.float32):
    rng = np.random.default_rng(0)
    start = {"parameters/w": rng.normal(size=(4, 3)).astype(np.float32), "counts/step": np.int64(0)}
    step = {"parameters/w": (start["parameters/w"] + 0.1).astype(dtype) + dtype(shift), "counts/step": np.int64(1)}
    return [{name: np.asarray(x, dtype if name[0] == "p" else None) for name, x in start.items()}, step]


def finding(name, apart=1e-8):
    terms = tuple(audit.TermAudit(term, 0.2, apart if term != "skloss" or "global" in name else 0.1) for term in audit.LOSS_WEIGHTS)
    return audit.Audit(8, 0.1, tuple(sorted(terms, key=lambda term: -term.difference)))


@pytest.fixture
def certify(monkeypatch, tmp_path, capsys):
    """certify(**changes) -> (exit code, report.json, report.html); the changes are the parts' results."""

    def certify(new=None, losses=(1.0, 2.0), found=None, ledger=None, faults=(), split=None):
        traces = {"old": trace(), "new": trace() if new is None else new}
        monkeypatch.setattr(certificate.run, "old_stack", lambda: SimpleNamespace(make_side=lambda tape, probe_only=False: SimpleNamespace(name="old")))
        monkeypatch.setattr(certificate.shard_side, "make_side", lambda tape: SimpleNamespace(name="new"))
        monkeypatch.setattr(certificate.run, "record_shown", lambda side, tape, progress: traces[side.name])
        reference = [{n: x.astype(np.float64) + 1e-9 if n[0] == "p" and i else x.astype(np.float64) if n[0] == "p" else x for n, x in s.items()} for i, s in enumerate(trace())]
        monkeypatch.setattr(certificate.run, "measure_bound", lambda tape, old, progress: certificate.run.Bound(reference, (), np.dtype(np.float32)))
        monkeypatch.setattr(certificate.demo, "losses", lambda side, progress: [1.0, losses[0] if side.name == "old" else losses[1]])
        noisy = compare.compare(trace(), trace(1e-6))
        monkeypatch.setattr(certificate.noise, "measure", lambda tape, side, plain, progress: {"perturbed": noisy, "reordered": noisy})
        counted = {"lowered": collectives.Audit(Counter({ONE: 2}), Counter({ONE: 2})), "compiled": found or collectives.Audit(Counter({ONE: 1}), Counter({ONE: 1}))}
        monkeypatch.setattr(certificate.collectives, "audit", lambda tape: counted)
        monkeypatch.setattr(certificate.split_audit, "audit_split", lambda tape: split)
        names = ("cold", "warm", "global, cold", "global, warm")
        made = audit.Ledger(ledger or {name: finding(name) for name in names})
        monkeypatch.setattr(certificate.audit, "objective_ledger", lambda config, batch, load: made if config.shard_state == "none" else None)
        monkeypatch.setattr(certificate.fault_matrix, "run_faults", lambda *arguments: iter(faults))
        options = {"shard_state": "data", "data_parallel": True, "data_parallel_devices": 8} if split else {}
        tape = Tape(SAMPLE_OPTIONS | options, find_files(SAMPLE / "train"), 1)
        code = certificate.certify(tmp_path, tape, [], ({}, [], []), Console())
        return code, json.loads((tmp_path / "report.json").read_text()), (tmp_path / "report.html").read_text()

    return certify


def test_every_part_is_on_the_page(certify):
    code, content, page = certify(losses=(2.0, 2.0))
    assert code == 0 and content["verdict"].startswith("PASSED")
    titles = [section["title"] for section in content["sections"]]
    for word in ("old against new", "float64", "30 steps", "Noise floor", "State ledger", "lowered", "compiled", "Objective ledger", "Planted faults", "Limits"):
        assert any(word in title for title in titles), word
        assert word in page
    assert page.count("data:image/png;base64,") == 2 and "<script" not in page and "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"new": trace(1e-3)}, "old against new"),
        ({"losses": (1.0, 2.0)}, "steps with each stack"),
        ({"losses": (2.0, 2.0), "found": collectives.Audit(Counter({ONE: 1}), Counter())}, "Collectives of the compiled step"),
    ],
)
def test_one_failed_part_fails_the_whole(certify, changes, part):
    code, content, _ = certify(**changes)
    assert code == 1 and content["verdict"].startswith("FAILED") and part in content["verdict"]


@pytest.mark.parametrize(("found", "code"), [(Counter({ONE: 2}), 0), (Counter({ONE: 3}), 1)])
def test_a_split_states_collectives_are_those_that_were_foretold(certify, found, code):
    foretold = {split_audit.SCATTER: Counter({ONE: 1}), split_audit.GATHER: Counter({ONE: 1})}
    ended, content, _ = certify(losses=(2.0, 2.0), split=split_audit.SplitAudit(foretold, found, Counter()))
    verdicts = {section["title"]: section["verdict"] for section in content["sections"]}
    assert ended == code and verdicts["Collectives of the step with split state"].startswith("UNEXPLAINED" if code else "EXPLAINED")


def test_the_picture_of_errors_needs_a_reference():
    with pytest.raises(ValueError, match="nothing to draw"):
        report.plot_errors(compare.compare(trace(), trace()))
