"""The single-device audit on real rows: one term differs, by several percent, and the global objective mends it."""

import pytest

from kgo_shard import Config, init_state
from kgo_shard.batches import find_files, read_packed_batches
from kgo_shard.diff.audit import objective_ledger
from kgo_shard.diff.limits import limit_for

OPTIONS = dict(pos_len=9, batch_size=32, model_kind="b2c32", compute_dtype="float32", symmetry_type="none", data_parallel=True)


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def audits(rows9):
    config = Config(**OPTIONS, data_parallel_devices=8)
    batch = next(read_packed_batches(find_files(rows9 / "train"), config, seed=1234))
    return objective_ledger(config, batch, init_state)


def test_only_the_seki_term_differs_between_eight_devices_and_one(audits):
    first, *others = audits.audits["cold"].terms
    assert first.term == "skloss"
    assert first.difference > 0.01, "the batch must have unowned points spread unevenly over the devices"
    assert max(term.difference for term in others) <= limit_for(audits.floor) < first.difference
    assert audits.differs("cold") == ["skloss"]


def test_with_warm_statistics_it_still_differs_but_less(audits):
    assert audits.differs("warm") == ["skloss"]
    assert audits.audits["warm"].difference < audits.audits["cold"].difference


def test_the_terms_make_the_whole_difference(audits):
    audit = audits.audits["cold"]
    assert abs(audit.difference - audit.terms[0].difference) <= len(audit.terms) * limit_for(audits.floor)


def test_the_global_objective_has_the_single_devices_gradient(audits):
    for heat in ("cold", "warm"):
        assert audits.differs(f"global, {heat}") == []
        assert audits.audits[f"global, {heat}"].difference < audits.audits[heat].difference


def test_the_ledger_names_the_term_and_why(audits):
    rows = {row[0]: row for row in audits.rows()}
    assert len(rows) == 23 and [name for name, row in rows.items() if row[-1] != "equal"] == ["skloss"]
    assert "cold, warm: its weight comes from each device's own rows" in rows["skloss"][-1]
    assert audits.verdict().startswith("22 of 23 terms have the whole batch's gradient; skloss not")


def test_the_verdict_names_the_term_and_its_share(audits):
    audit = audits.audits["cold"]
    assert "skloss alone" in audit.verdict() and f"{100 * audit.terms[0].difference:.2f} %" in audit.verdict()
