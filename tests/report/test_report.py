"""Rendering: one page that needs nothing else, tables that work in a pipe, charts from any numbers."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdiff.report.format import equality_words, number, span
from specdiff.report.html import html_page
from specdiff.report.svg import bars, curves, ticks
from specdiff.report.terminal import print_report

VOID = {"meta", "link", "br", "hr", "img", "input"}


@pytest.fixture
def report() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "report.json").read_text(encoding="utf-8"))


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag


def test_page_is_one_file_without_scripts(report):
    page = html_page(report)
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    tags = {tag for tag, _ in parser.seen}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    for _, attributes in parser.seen:
        assert not {"src", "href", "onload", "onclick"} & set(attributes)
    assert "url(" not in page and "@import" not in page and "http" not in page
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(chart)


def test_page_holds_every_plot_and_the_verdict(report):
    page = html_page(report)
    for title in (
        "From transformers to specdiff",
        "Cost curve",
        "tau by prompt set",
        "Acceptance by position",
        "Accepted lengths",
        "Expected gain by block length",
    ):
        assert f"<figcaption>{title}</figcaption><svg" in page
    assert escape(report["verdict"]["headline"]) in page
    assert "break-even" in page and "Environment" in page
    speculation, kernels = page.index("(speculation)"), page.index("(kernels)")
    assert speculation < kernels, "the ratio of speculation comes first"
    assert not re.search(r"\b(None|nan|inf)\b", page)


def test_page_and_tables_stand_missing_parts(report):
    report["mode"]["drafting"] = report["mode"]["tau"] = report["equality"] = report["efficiency"] = None
    report["cost"] |= {"drafter": {}, "drafter_relative": {}, "break_even_tau": None}
    report["verdict"] |= {"blocks": [], "use": None, "break_even_tau": None}
    report["sampling"], report["memory"] = [], {}
    del report["mode"]["arms"]["specdiff"], report["mode"]["ratios"]["speculation"]
    for line in report["samples"]:
        del line["arms"]["specdiff"]
    parser = Balanced()
    parser.feed(html_page(report))
    assert not parser.open
    print_report(report, Console(file=io.StringIO(), width=80))


def test_foreign_words_are_escaped(report):
    report["names"]["target"] = "<b>&"
    report["mode"]["tau"]["by_set"]["<i>"] = next(iter(report["mode"]["tau"]["by_set"].values()))
    report["sampling"] = []
    page = html_page(report)
    assert "<b>" not in page and "<i>" not in page.replace('<i style="background', "") and "&lt;i&gt;" in page


def test_terminal_says_the_same(report):
    out = io.StringIO()
    print_report(report, Console(file=out, width=120))
    text = out.getvalue()
    assert report["verdict"]["headline"] in text
    assert text.index("(speculation)") < text.index("(kernels)")
    assert number(report["mode"]["tau"]["macro"]) in text
    assert "full blocks break even at tau" in text
    assert "\x1b" not in text and not re.search(r"\b(None|nan|inf)\b", text)


def test_mismatches_are_listed_with_margins(report):
    report["equality"]["specdiff"] |= {
        "passed": False,
        "mismatches": [{"prompt": "p1", "position": 7, "margin": 0.5, "near_tie": False}],
    }
    lines = equality_words(report)
    assert any(line.endswith("a fault.") for line in lines)
    assert any("p1: first difference at token 7, top-2 margin 5.00e-01 (no near-tie)" in line for line in lines)


def test_numbers_as_words():
    assert number(None) == "-" and number(1.234) == "1.23"
    assert span({"median": None, "p25": None, "p75": None}) == "-"
    assert span({"median": 2.0, "p25": 1.0, "p75": 3.0}) == "2.00 (1.00 to 3.00)"


@pytest.mark.parametrize("top", [1e-4, 0.3, 1, 7, 24.5, 43, 1234, 1e6])
def test_ticks_cover_and_stay_few(top):
    marks = ticks(top)
    assert marks[0] == 0 and marks[-1] >= top and 2 <= len(marks) <= 7
    assert marks[-2] < top


def test_charts_are_valid_for_any_numbers():
    charts = [
        bars([], [("x", [])], x="a", y="b"),
        bars(["a", "b"], [("x", [None, 0.0]), ("<y>", [1e-9, 5])], x="a", y="b&", percent=True, lines=[("m", 9.0)]),
        curves([("one", [(1, 1.0)])], x="a", y="b"),
        curves([("one", [(1, 0.0), (24, 0.0)]), ("two", [(3, 2.0)])], x="a", y="b"),
    ]
    for chart in charts:
        root = ElementTree.fromstring(f"<div>{chart}</div>")
        for rect in root.iter("rect"):
            assert float(rect.get("height", "-1")) >= 0
    assert ticks(0) == [0.0, 1.0]
