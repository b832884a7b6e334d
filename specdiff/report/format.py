"""Numbers as words; shared by the terminal and the page."""

from __future__ import annotations

from typing import Any


def number(value: Any, digits: int = 2) -> str:
    """A fixed number of decimals; a dash for what is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def times(value: Any) -> str:
    """A ratio."""
    return "-" if value is None else f"{value:.2f}x"


def percent(value: Any) -> str:
    """A share."""
    return "-" if value is None else f"{100 * value:.0f}%"


def milliseconds(value: Any) -> str:
    """Seconds as milliseconds."""
    return "-" if value is None else f"{1e3 * value:.1f} ms"


def mebibytes(value: Any) -> str:
    """Bytes as MiB."""
    return "-" if value is None else f"{value / 2**20:.0f} MiB"


def span(spread: dict[str, Any], digits: int = 2) -> str:
    """Median with the quartiles behind it."""
    if spread["median"] is None:
        return "-"
    return f"{spread['median']:.{digits}f} ({spread['p25']:.{digits}f} to {spread['p75']:.{digits}f})"


def setting_words(report: dict[str, Any]) -> str:
    """One line on what was measured."""
    settings, names = report["settings"], report["names"]
    temperature = report["mode"]["temperature"]
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return (
        f"{names.get('target', 'target')} with {names.get('drafter', 'no drafter')}, K = {settings['block_size']}; "
        f"{settings['prompts']} prompts, {settings['max_new_tokens']} new tokens, {how}, "
        f"batch {settings['batch_size']}; "
        f"{settings['dtype']} on {settings['device']}, {settings['threads']} threads"
    )


def equality_words(report: dict[str, Any]) -> list[str]:
    """Lines on whether the texts are transformers' own."""
    if report["equality"] is None:
        return ["Sampled texts are not compared token by token; see specdiff audit for the test of their law."]
    lines = []
    for arm, found in report["equality"].items():
        label = report["mode"]["arms"][arm]["label"]
        line = f"{label}: {found['equal']} of {found['texts']} texts equal to transformers generate, token by token"
        lines.append(line + ("." if found["passed"] else ": a fault."))
        for one in found["mismatches"]:
            kind = "near-tie" if one["near_tie"] else "no near-tie"
            lines.append(
                f"  {one['prompt']}: first difference at token {one['position']}, "
                f"top-2 margin {one['margin']:.2e} ({kind})"
            )
    return lines
