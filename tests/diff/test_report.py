"""The report shows what was found, hides nothing, and needs nothing but itself."""

import html.parser
import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from kgo_shard.diff import report
from kgo_shard.diff.compare import STAGES, compare


def traces():
    """Two traces; B differs in one leaf that is infinite, in one that is missing, and in one by a factor of 8."""
    a = [{"moments/[w]": np.ones(3, np.float32), "norm": np.float32(1), "counts/step": np.int64(i)} for i in range(3)]
    a[1]["reduced_gradient/blocks/0/w"] = np.ones((2, 2), np.float32)
    a[2]["metrics/p<b>0"] = np.float32(2)
    b = [{key: x.copy() for key, x in step.items()} for step in a]
    b[1]["reduced_gradient/blocks/0/w"] *= 8
    b[2]["moments/[w]"][0] = np.inf
    del b[2]["metrics/p<b>0"]
    return a, b


@pytest.fixture
def comparison():
    return compare(*traces())


def a_report(comparison, **more):
    picture = report.plot_losses({"old": [2.0, 1.0], "new": [2.0, 1.0]})
    section = report.comparison_section(comparison, "Old & new", "five <steps>") | {"image_png": picture}
    return {
        "title": "Report <1>",
        "environment": {"JAX": "0.0 & more"},
        "sections": [section, report.limits_section()],
        "verdict": comparison.verdict(),
    } | more


def printed(table, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_table_has_a_row_for_every_stage_and_shows_the_worst_leaf(comparison):
    columns, rows = report.comparison_rows(comparison)
    assert tuple(columns) == report.STAGE_COLUMNS and [row[0] for row in rows] == list(STAGES)
    by_stage = {row[0]: dict(zip(columns, row)) for row in rows}
    assert by_stage["batch"]["verdict"] == "not recorded"
    assert by_stage["norm"]["verdict"] == "equal" and by_stage["norm"]["equal bits"] == "3/3"
    assert by_stage["reduced_gradient"]["relative norm"] == "7"
    assert by_stage["reduced_gradient"]["worst leaf"] == "step 1, blocks/0/w"
    assert by_stage["metrics"]["verdict"] == "DIFFERENT: 1 leaves, first at step 2"
    text = printed(report.comparison_table(comparison, "title"))
    assert "step 2, [w]" in text and "DIFFERENT: first at step 1, stage reduced_gradient, leaf blocks/0/w" in text


def test_all_leaves_are_shown_when_asked_for(comparison):
    columns, rows = report.comparison_rows(comparison, all_leaves=True)
    assert len(rows) == len(comparison.leaves) and all(len(row) == len(columns) for row in rows)
    assert sum(row[-1].startswith("DIFFERENT") for row in rows) == 3
    assert "2x2" in printed(report.comparison_table(comparison, all_leaves=True))


def test_unknown_stages_are_shown_too():
    a = [{"gradients/w": np.ones(1)}]
    rows = report.comparison_rows(compare(a, [{"gradients/w": np.ones(1)}]))[1]
    assert rows[-1][0] == "gradients" and rows[-1][-1].startswith("DIFFERENT")


def test_json_holds_every_leaf_and_is_strict(comparison, tmp_path):
    json_path, html_path = report.write_report(a_report(comparison), tmp_path / "new" / "folder")

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    loaded = json.loads(json_path.read_text(), parse_constant=refuse)
    data = loaded["sections"][0]["data"]
    assert len(data["leaves"]) == len(comparison.leaves) and not data["equal"]
    assert data["first_bad"]["leaf"] == "blocks/0/w" and data["first_bad"]["relative_norm"] == 7.0
    assert "image_png" not in loaded["sections"][0] and loaded["verdict"] == comparison.verdict()
    assert html_path.read_text().startswith("<!doctype html>")


def test_infinity_is_text_in_json():
    value = {"a": (np.float32(np.inf), float("nan"), np.int64(3), None, True)}
    assert report.finite(value) == {"a": ["inf", "nan", 3, None, True]}


class Tags(html.parser.HTMLParser):
    """Collects what a page refers to, and that what it opens it closes."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_escaped_and_self_contained(comparison):
    page = report.render_html(a_report(comparison))
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert tags.links and all(link.startswith("data:image/png;base64,") for link in tags.links)
    assert "http" not in page and "@import" not in page and "url(" not in page and "<script" not in page
    text = " ".join(tags.text)
    for shown in ("Report <1>", "five <steps>", "Old & new", "0.0 & more", comparison.verdict(), "FlashAttention's rule"):
        assert shown in text
    assert "<b>" not in page and 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    assert '<p class="verdict bad">' in page and "<tr class=bad>" in page


def test_good_and_bad_verdicts_look_different(comparison):
    a, _ = traces()
    equal = compare(a, [{key: x.copy() for key, x in step.items()} for step in a])
    page = report.render_html(a_report(equal))
    assert '<p class="verdict good">' in page and "class=bad" not in page and '"verdict bad"' not in page


def test_curves_that_coincide_are_both_visible():
    def colors(curves):
        pixels = imread(io.BytesIO(report.plot_losses(curves)))[..., :3]
        upper = pixels[: int(0.6 * len(pixels)), : int(0.7 * pixels.shape[1])]  # left of the legend, above the lower panel
        return {name: int((np.abs(upper - color).max(axis=-1) < 0.08).sum()) for name, color in LINES.items()}

    LINES = {"light": np.array([0x9E, 0xCA, 0xE1]) / 255, "dark": np.array([0x08, 0x30, 0x6B]) / 255}
    losses = list(np.linspace(3, 1, 50))
    both, alone = colors({"old": losses, "new": losses}), colors({"old": losses})
    assert both["light"] > 500 and both["dark"] > 100 and alone["dark"] == 0


@pytest.mark.parametrize("curves", [{}, {"a": []}, {"a": [1.0], "b": [1.0, 2.0]}])
def test_curves_that_cannot_be_compared_are_refused(curves):
    with pytest.raises(ValueError, match="one length and not empty"):
        report.plot_losses(curves)


def test_drawing_leaves_no_pyplot_state():
    code = (
        "import sys; from kgo_shard.diff.report import plot_losses;"
        "assert plot_losses({'a': [1.0], 'b': [1.0]}).startswith(b'\\x89PNG'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_environment_says_what_ran():
    facts = report.environment_facts()
    assert facts["JAX"] == jax.__version__ and str(len(jax.devices())) in facts["devices"]
    assert all(isinstance(value, str) and value for value in facts.values())


def test_pmap_is_named_by_what_it_is(monkeypatch):
    merge = "pmap merged onto jit+shard_map, switchable (jax_pmap_shmap_merge is "
    for version, switch, expected in [
        ((0, 7, 2), None, "original pmap runtime"),
        ((0, 7, 2), False, "original pmap runtime"),
        ((0, 7, 2), True, merge + "on)"),
        ((0, 8, 0), True, merge + "on)"),
        ((0, 9, 2), False, merge + "off, so this is the original pmap runtime)"),
        ((0, 10, 2), None, "pmap is jit(shard_map)"),
        ((1, 0, 0), None, "pmap is jit(shard_map)"),
    ]:
        config = type("Config", (), {} if switch is None else {"jax_pmap_shmap_merge": switch})
        monkeypatch.setattr(report, "jax", type("Jax", (), {"config": config, "__version_info__": version}))
        assert report.pmap_implementation() == expected


def test_this_pmap_is_named_truly():
    """A shard_map appears in the lowered program's trace only where pmap is built on it."""
    traced = str(jax.make_jaxpr(jax.pmap(lambda x: x + 1))(np.ones((1, 2), np.float32)))
    assert ("shard_map" in traced) == (report.pmap_implementation() != "original pmap runtime")


def test_exact_mode_is_read_from_the_flags():
    exact = "--xla_disable_hlo_passes=fusion --xla_cpu_max_isa=SSE4_2"
    assert report.exact_mode(exact).startswith("exact: no fusion, no contraction")
    assert report.exact_mode("--xla_disable_hlo_passes=algsimp,fusion").startswith("exact: no fusion; the instruction set")
    for flags in ("", "--xla_cpu_max_isa=SSE4_2", "--xla_disable_hlo_passes=algsimp", exact + " --xla_disable_hlo_passes=dce"):
        assert report.exact_mode(flags).startswith("default")


def test_no_checkout_is_no_error(tmp_path):
    assert report.git_commit(tmp_path) == "unknown" == report.git_commit(tmp_path / "nowhere")
