"""The benchmark's report as tables on a terminal (or as plain text in a pipe)."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from specdiff.report.format import equality_words, mebibytes, milliseconds, number, percent, setting_words, span, times


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of :func:`specdiff.bench.run.run_bench`."""
    console = console or Console(soft_wrap=True, highlight=False)
    console.print(setting_words(report), markup=False)
    for table in (ratio_table(report), arm_table(report), tau_table(report), draft_table(report), cost_table(report)):
        if table is not None:
            console.print(table)
    if (report["mode"]["drafting"] or {}).get("accept_seconds_per_round") is not None:
        console.print(round_words(report["mode"]["drafting"]), markup=False)
    if report.get("roofline"):
        console.print(roofline_words(report["roofline"]), markup=False)
    if report["efficiency"]:
        console.print(efficiency_table(report))
    for line in equality_words(report):
        console.print(line, markup=False)
    for note in [*report["notes"], *((report["mode"]["drafting"] or {}).get("notes", []))]:
        console.print(f"Note: {note}", markup=False)
    console.print()
    console.print(report["verdict"]["headline"], style="bold", markup=False)
    for reason in report["verdict"]["reasons"]:
        console.print(reason, markup=False)


def ratio_table(report: dict[str, Any]) -> Table:
    """The decomposition: speculation first."""
    table = Table("decoding speed", "median (quartiles)", "without loops", title="Speed, by prompt")
    mode = report["mode"]
    for name, found in mode["ratios"].items():
        table.add_row(found["label"], span(found), times(mode["ratios_without_loops"][name]["median"]))
    return table


def arm_table(report: dict[str, Any]) -> Table:
    """Each way of generating by itself."""
    table = Table("", "tokens/s", "first token", "tau", "memory", title="Each by itself, medians")
    for name, arm in report["mode"]["arms"].items():
        table.add_row(
            arm["label"],
            number(arm["decode_tokens_per_second"]["median"], 1),
            milliseconds(arm["seconds_to_first_token"]["median"]),
            number(arm["tau"]),
            mebibytes(report["memory"].get(name)),
        )
    return table


def tau_table(report: dict[str, Any]) -> Table | None:
    """tau by set, and for the sampling temperatures."""
    tau = report["mode"]["tau"]
    if tau is None:
        return None
    others = [row for row in report["sampling"] if row["temperature"] != report["mode"]["temperature"]]
    extra = [f"at {row['temperature']:g}" for row in others]
    table = Table("prompt set", "prompts", "loops", "tau", "without loops", "speculation", *extra, title="tau by set")
    for name, row in tau["by_set"].items():
        table.add_row(
            name,
            str(row["prompts"]),
            str(row["loops"]),
            number(row["tau"]),
            number(row["tau_without_loops"]),
            times(row["speculation"]["median"]),
            *(number(other["tau"]["by_set"][name]["tau"]) for other in others),
        )
    table.add_section()
    table.add_row(
        "mean over sets",
        "",
        "",
        number(tau["macro"]),
        number(tau["macro_without_loops"]),
        "",
        *(number(other["tau"]["macro"]) for other in others),
    )
    return table


def draft_table(report: dict[str, Any]) -> Table | None:
    """Acceptance by position and accepted lengths."""
    drafting = report["mode"]["drafting"]
    if drafting is None or not drafting["proposed"]:
        return None
    title = f"Drafts: {percent(drafting['acceptance_rate'])} of {drafting['proposed']} kept, rule {drafting['rule']}"
    rates, lengths = drafting["acceptance_by_position"], drafting["accepted_lengths"]
    columns = [str(n) for n in range(max(len(rates) + 1, len(lengths)))]
    table = Table("", *columns, title=title)
    padded = ["", *(percent(rate) for rate in rates)]
    table.add_row("kept at position", *(padded + [""] * (len(columns) - len(padded))))
    rounds = sum(lengths.values())
    table.add_row("rounds that kept so many", *(percent(lengths.get(n, 0) / rounds) for n in columns))
    return table


def cost_table(report: dict[str, Any]) -> Table:
    """The cost curve."""
    cost = report["cost"]
    one = milliseconds(cost["target"]["1"])
    title = (
        f"Cost of a pass relative to the target over 1 input ({one}, {cost['path']} path, context {cost['context']})"
    )
    points = sorted(set(cost["target_relative"]) | set(cost["drafter_relative"]), key=int)
    table = Table("", *points, title=title)
    table.add_row("target, inputs", *(number(cost["target_relative"].get(n)) for n in points))
    if cost["drafter_relative"]:
        table.add_row("drafter, tokens", *(number(cost["drafter_relative"].get(n)) for n in points))
        table.caption = f"full blocks break even at tau {number(cost['break_even_tau'])}"
    return table


def round_words(drafting: dict[str, Any]) -> str:
    """Where a round's time goes, in one sentence."""
    seconds, accept = drafting["seconds_per_round"], drafting["accept_seconds_per_round"]
    parts = {
        "draft": seconds["draft"],
        "target pass": seconds["verify"] - accept,
        "accept": accept,
        "host": seconds["rest"],
    }
    shares = ", ".join(f"{name} {milliseconds(value)}" for name, value in parts.items())
    return f"A round of specdiff takes {milliseconds(sum(parts.values()))}: {shares}."


def roofline_words(found: dict[str, Any]) -> str:
    """The memory's limit in one sentence."""
    return (
        f"Weights: {found['weight_bytes'] / 1e6:.0f} MB at {found['bandwidth'] / 1e9:.1f} GB/s take "
        f"{milliseconds(found['floor_seconds'])}; a pass over 1 input takes {milliseconds(found['pass_seconds'])}, "
        f"so memory is {percent(found['share'])} of it."
    )


def efficiency_table(report: dict[str, Any]) -> Table:
    """What the engine makes of a known tau."""
    table = Table("tau (replayed)", "speed-up", "possible", "efficiency", title="Engine efficiency")
    for row in report["efficiency"]:
        table.add_row(number(row["tau"]), times(row["speed_up"]), times(row["possible"]), percent(row["efficiency"]))
    return table
