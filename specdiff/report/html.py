"""The benchmark's report as one self-contained HTML page: no scripts, no other files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from specdiff.report.format import equality_words, mebibytes, milliseconds, number, percent, setting_words, span, times
from specdiff.report.svg import bars, curves

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; background: #fff; max-width: 1020px;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin: 1.8em 0 .5em; }
.muted { color: #4a5568; }
.verdict { border-left: 5px solid #718096; background: #f7fafc; padding: .6em 1em; margin: 1em 0; }
.verdict.yes { border-color: #2f855a; } .verdict.no { border-color: #c53030; } .verdict p { margin: .3em 0; }
table { border-collapse: collapse; margin: .4em 0; }
th, td { text-align: left; padding: .25em .8em .25em 0; border-bottom: 1px solid #e2e8f0; }
td + td, th + th { text-align: right; } tr.total td { font-weight: 600; border-top: 2px solid #a0aec0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1.2em 2em; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .2em; } svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #2d3748; } svg .axis { fill: #4a5568; }
svg .note { fill: #c53030; stroke: #fff; stroke-width: 3px; paint-order: stroke; }
svg .grid { stroke: #e2e8f0; } svg .mark { stroke: #c53030; stroke-dasharray: 5 4; }
.legend span { margin-right: 1.2em; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: .4em; }
ul.plain { list-style: none; padding-left: 0; }
"""


def html_page(report: dict[str, Any]) -> str:
    """The page for a report of :func:`specdiff.bench.run.run_bench`."""
    parts = [
        "<h1>specdiff benchmark</h1>",
        f'<p class="muted">{escape(setting_words(report))}. Made {escape(report["made"])}.</p>',
        _verdict(report),
        _speed(report),
        _charts(report),
        _tau(report),
        _costs(report),
        _texts(report),
        _environment(report),
        _samples(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>specdiff benchmark</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], total: Sequence[str] | None = None) -> str:
    """An HTML table; ``total`` is a last row set apart."""
    out = ["<table><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr>"]
    for row in rows:
        out += ["<tr>", *(f"<td>{escape(cell)}</td>" for cell in row), "</tr>"]
    if total is not None:
        out += ['<tr class="total">', *(f"<td>{escape(cell)}</td>" for cell in total), "</tr>"]
    return "".join([*out, "</table>"])


def _verdict(report: dict[str, Any]) -> str:
    found = report["verdict"]
    colour = {True: "yes", False: "no", None: ""}[found["use"]]
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in found["reasons"])
    return f'<div class="verdict {colour}"><p><strong>{escape(found["headline"])}</strong></p>{reasons}</div>'


def _speed(report: dict[str, Any]) -> str:
    mode = report["mode"]
    without = mode["ratios_without_loops"]
    ratios = table(
        ("decoding speed, by prompt", "median (quartiles)", "without loops"),
        ((row["label"], span(row), times(without[name]["median"])) for name, row in mode["ratios"].items()),
    )
    arms = table(
        ("each by itself, medians", "tokens/s", "time to first token", "tau", "peak memory"),
        (
            (
                arm["label"],
                number(arm["decode_tokens_per_second"]["median"], 1),
                milliseconds(arm["seconds_to_first_token"]["median"]),
                number(arm["tau"]),
                mebibytes(report["memory"].get(name)),
            )
            for name, arm in mode["arms"].items()
        ),
    )
    note = (
        '<p class="muted">All ways ran in turn on each prompt, after a warm-up that is not counted. Speeds are of '
        "decoding alone; the prefill is the time to the first token. Peak memory is above what was in use before "
        "the call.</p>"
    )
    return f"<h2>Speed</h2>{ratios}{arms}{note}"


def _charts(report: dict[str, Any]) -> str:
    mode, cost = report["mode"], report["cost"]
    drafting, tau = mode["drafting"], mode["tau"]
    arms = mode["arms"]
    charts = [
        (
            "From transformers to specdiff",
            bars(
                [
                    arm["label"].removeprefix("transformers ").replace("specdiff, plain decoding", "specdiff plain")
                    for arm in arms.values()
                ],
                [("tokens/s", [arm["decode_tokens_per_second"]["median"] for arm in arms.values()])],
                x="way of generating",
                y="decoded tokens per second",
            ),
        )
    ]
    target = [(float(n), value) for n, value in cost["target_relative"].items()]
    draft = [(float(n), value) for n, value in cost["drafter_relative"].items()]
    lines = [("target, by inputs", target), *([("drafter, by drafted tokens", draft)] if draft else [])]
    charts.append(("Cost curve", curves(lines, x="inputs, or drafted tokens", y="relative to target over 1 input")))
    if tau is not None:
        needed = report["verdict"]["break_even_tau"]
        mark = [(f"break-even {needed:.2f}", needed)] if needed else []
        sets = tau["by_set"]
        series = [
            ("all prompts", [row["tau"] for row in sets.values()]),
            ("without loops", [row["tau_without_loops"] for row in sets.values()]),
        ]
        charts.append(("tau by prompt set", bars(list(sets), series, x="prompt set", y="tau", lines=mark)))
    if drafting is not None and drafting["proposed"]:
        rates = drafting["acceptance_by_position"]
        labels = [str(n + 1) for n in range(len(rates))]
        kept = bars(labels, [("kept", rates)], x="position in the block", y="kept / proposed", percent=True)
        charts.append(("Acceptance by position", kept))
        lengths = drafting["accepted_lengths"]
        rounds = sum(lengths.values())
        shares = [count / rounds for count in lengths.values()]
        histogram = bars(
            list(lengths), [("rounds", shares)], x="drafted tokens kept", y="share of rounds", percent=True
        )
        charts.append(("Accepted lengths", histogram))
    blocks = report["verdict"]["blocks"]
    if blocks:
        series = [("expected ratio", [row["expected_ratio"] for row in blocks])]
        labels = [str(row["block_size"]) for row in blocks]
        expected = bars(
            labels, series, x="most drafted tokens per round", y="speed over plain", lines=[("plain decoding", 1.0)]
        )
        charts.append(("Expected gain by block length", expected))
    figures = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>" for title, chart in charts)
    return f'<h2>Plots</h2><div class="charts">{figures}</div>'


def _tau(report: dict[str, Any]) -> str:
    tau = report["mode"]["tau"]
    if tau is None:
        return ""
    others = [row for row in report["sampling"] if row["temperature"] != report["mode"]["temperature"]]
    rows = [
        (
            name,
            str(row["prompts"]),
            str(row["loops"]),
            number(row["tau"]),
            number(row["tau_without_loops"]),
            times(row["speculation"]["median"]),
            *(number(other["tau"]["by_set"][name]["tau"]) for other in others),
        )
        for name, row in tau["by_set"].items()
    ]
    extra = [f"tau at {row['temperature']:g} ({row['rule']})" for row in others]
    total = ["mean over sets", "", "", number(tau["macro"]), number(tau["macro_without_loops"]), ""]
    total += [number(other["tau"]["macro"]) for other in others]
    head = ("prompt set", "prompts", "loops", "tau", "without loops", "speculation", *extra)
    note = (
        '<p class="muted">tau: new tokens per target pass, the prefill\'s own token not counted. A text is a loop '
        "when a quarter or more of its 6-grams occurred in it before.</p>"
    )
    return f"<h2>tau</h2>{table(head, rows, total)}{note}"


def _costs(report: dict[str, Any]) -> str:
    cost = report["cost"]
    points = sorted(set(cost["target"]) | set(cost["drafter"]), key=int)
    head = (f"{cost['path']} path, context {cost['context']}, batch {cost['batch_size']}", *points)
    rows = [
        ("target, by inputs", *(milliseconds(cost["target"].get(n)) for n in points)),
        ("relative", *(number(cost["target_relative"].get(n)) for n in points)),
    ]
    if cost["drafter"]:
        rows.append(("drafter, by drafted tokens", *(milliseconds(cost["drafter"].get(n)) for n in points)))
        rows.append(("relative to target over 1", *(number(cost["drafter_relative"].get(n)) for n in points)))
    parts = [f"<h2>Costs</h2>{table(head, rows)}"]
    drafting = report["mode"]["drafting"]
    if drafting is not None:
        seconds = drafting["seconds_per_round"]
        parts.append(
            f"<p>A round took {', '.join(f'{milliseconds(seconds[part])} {part}' for part in seconds)} on average.</p>"
        )
    if report["efficiency"]:
        rows = [
            (number(row["tau"]), times(row["speed_up"]), times(row["possible"]), percent(row["efficiency"]))
            for row in report["efficiency"]
        ]
        parts.append(table(("tau, replayed text", "speed-up", "possible", "engine efficiency"), rows))
    return "".join(parts)


def _texts(report: dict[str, Any]) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in [*equality_words(report), *report["notes"]])
    return f'<h2>Texts and notes</h2><ul class="plain">{lines}</ul>'


def _environment(report: dict[str, Any]) -> str:
    rows = []
    for section, values in {"settings": report["settings"], **report["environment"]}.items():
        rows += [(f"{section}: {name}", "-" if value is None else str(value)) for name, value in values.items()]
    return (
        f"<h2>Environment</h2><details><summary>Versions, machine, settings</summary>{table(('', ''), rows)}</details>"
    )


def _samples(report: dict[str, Any]) -> str:
    names = list(report["mode"]["arms"])
    head = ("prompts", "set", "prompt tokens", "loop", *(f"{name} tok/s" for name in names), "tau")
    rows = [
        (
            " ".join(line["ids"]),
            line["set"],
            " ".join(map(str, line["prompt_tokens"])),
            "yes" if line["loop"] else "",
            *(number(line["arms"][name]["decode_tokens_per_second"], 1) for name in names),
            number(line["arms"][names[-1]]["tau"]),
        )
        for line in report["samples"]
    ]
    return f"<h2>Every prompt</h2><details><summary>Times by prompt</summary>{table(head, rows)}</details>"
