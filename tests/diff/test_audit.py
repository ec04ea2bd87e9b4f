"""The single-device audit on real rows: one term differs, by several percent, and the global objective mends it."""

import pytest

from kgo_shard import Config, init_state
from kgo_shard.batches import find_files, read_packed_batches
from kgo_shard.diff.audit import audit_objective

OPTIONS = dict(pos_len=9, batch_size=32, model_kind="b2c32", compute_dtype="float32", symmetry_type="none", data_parallel=True)


@pytest.fixture(scope="module")
def audits(rows9):
    configs = {name: Config(**OPTIONS, data_parallel_devices=8, objective=name) for name in ("replica", "global")}
    batch = next(read_packed_batches(find_files(rows9 / "train"), configs["replica"], seed=1234))
    return {name: audit_objective(config, batch, init_state) for name, config in configs.items()}


def test_only_the_seki_term_differs_between_eight_devices_and_one(audits):
    first, *others = audits["replica"].terms
    assert first.term == "skloss"
    assert first.difference > 0.01, "the batch must have unowned points spread unevenly over the devices"
    # All else is rounding: five orders of magnitude below.
    assert max(term.difference for term in others) < 1e-5 * first.difference


def test_the_terms_make_the_whole_difference(audits):
    audit = audits["replica"]
    assert audit.difference == pytest.approx(audit.terms[0].difference, rel=1e-4)


def test_the_global_objective_has_the_single_devices_gradient(audits):
    assert audits["global"].difference < 1e-4 * audits["replica"].difference


def test_the_verdict_names_the_term_and_its_share(audits):
    audit = audits["replica"]
    assert "skloss alone" in audit.verdict() and f"{100 * audit.terms[0].difference:.2f} %" in audit.verdict()
