"""Stage 4: what a run says about itself, the card beside the drafter and ``result.json``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdiff.drafters.train.card import card
from specdiff.drafters.train.loop import TrainState
from specdiff.drafters.train.regenerate import is_prompt_file
from specdiff.drafters.train.speed import rates

if TYPE_CHECKING:
    from specdiff.drafters.train.data import Corpus
    from specdiff.drafters.train.pipeline import Outcome, Plan

CURVE_ROWS = 12
"""Rows of the card's curve; ``result.json`` has all of it."""


def curve(folder: Path) -> list[dict[str, Any]]:
    """Held-out evaluations of a run folder's log by rising step; of steps that were done twice, because a run was
    interrupted after its last checkpoint, what the later one says."""
    log = folder / "log.jsonl"
    kept: list[dict[str, Any]] = []
    for line in log.read_text().splitlines() if log.exists() else ():
        entry = json.loads(line)
        kept = [k for k in kept if k["step"] < entry["step"]]
        kept.append(entry)
    keys = ("step", "tokens", "anchors", "hours", "tau", "by_position")
    return [{key: entry[key] for key in keys} for entry in kept]


def curve_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown lines: tau against tokens and hours, at most :data:`CURVE_ROWS` points with the first and the last."""
    if len(points) > CURVE_ROWS:
        last = len(points) - 1
        points = [points[round(row * last / (CURVE_ROWS - 1))] for row in range(CURVE_ROWS)]
    lines = ["| steps | tokens | hours | held-out tau | accepted through slot 1, 2, ... |", "|---|---|---|---|---|"]
    for p in points:
        lines.append(
            f"| {p['step']} | {p['tokens']} | {p['hours']:.3f} | {p['tau']:.2f} | {shares(p['by_position'])} |"
        )
    return lines if points else []


def shares(values: Sequence[float]) -> str:
    """Acceptance by position, for people."""
    return ", ".join(f"{value:.2f}" for value in values)


def served_line(values: Mapping[str, Any]) -> str:
    """What serving gave with one drafter, with loops and without."""
    line = f"{values['tau']:.2f} (accepted through slot 1, 2, ...: {shares(values.get('by_position', ()))})"
    if values.get("loops"):
        rest = values["without_loops"]
        count = f"{values['loops']} of {values['prompts']} answers that loop"
        line += f"; without the {count}: " + (
            f"{rest['tau']:.2f} ({shares(rest['by_position'])})" if rest else "none left"
        )
    elif "loops" in values:
        line += f"; none of the {values['prompts']} answers loops"
    return line


def speeds(folder: Path, state: TrainState) -> dict[str, dict[str, float]]:
    """Tokens and anchors per second by stage."""
    found = {stage: {"tokens_per_second": rate} for stage, rate in rates(folder).items()}
    if state.seconds:
        found["train"] = {
            "tokens_per_second": state.tokens / state.seconds,
            "anchors_per_second": state.anchors / state.seconds,
        }
    return found


def command_of(words: Sequence[str], private: bool = False) -> str:
    """The command line that was given; ``private`` leaves out where files lie, as a card should."""
    return "specdiff " + shlex.join(Path(w).name if private and w.startswith(("/", "~")) else w for w in words)


def settings(plan: Plan) -> dict[str, Any]:
    """All that the result follows from, beside the target."""
    return {
        "command": command_of(plan.command) if plan.command else None,
        "data": list(plan.data),
        "exclude": list(plan.exclude),
        "chats": plan.chats,
        "recipe": asdict(plan.recipe),
        "held_out": plan.held_out,
        "top": plan.top,
        "from": plan.start_name,
        "shape": asdict(plan.shape) if plan.start is None else plan.start.config.to_dict(),
        "config": asdict(plan.config),
        "seed": plan.config.seed,
    }


def repeat_lines(plan: Plan) -> list[str]:
    """Rows of the card that let one repeat the run; files by their names alone."""
    names = [Path(name).name for name in plan.data]
    lines = {"data files": ", ".join(names), "held out, target logits kept": f"{plan.held_out:g}, {plan.top}"}
    if plan.exclude:
        lines["left out what shares 13 tokens with"] = ", ".join(Path(name).name for name in plan.exclude)
    if any(map(is_prompt_file, plan.data)):
        recipe = ", ".join(f"{key} {value}" for key, value in asdict(plan.recipe).items())
        lines["text"] = f"{plan.chats} chats: {recipe}"
    if plan.start_name:
        lines["trained further from"] = Path(plan.start_name).name
    lines["seed"] = str(plan.config.seed)
    if plan.command:
        lines["command"] = f"`{command_of(plan.command, private=True)}`"
    return [f"| {key} | {value} |" for key, value in lines.items()]


def report(plan: Plan, corpus: Corpus, outcome: Outcome) -> None:
    """Write the card and ``result.json``."""
    documents = [s.documents[i] for s, i in corpus.train]
    points, speed = curve(plan.folder), speeds(plan.folder, outcome.state)
    lines = {f"served greedy tau, {name}": served_line(values) for name, values in outcome.served.items()}
    lines["speed"] = ", ".join(
        f"{stage} {rate:.0f} {what.replace('_per_second', '/s')}"
        for stage, found in speed.items()
        for what, rate in found.items()
    )
    text = card(
        plan.folder.name, plan.name, outcome.drafter, documents, plan.config, outcome.state, outcome.held_out, lines,
        repeat=repeat_lines(plan), curve=curve_table(points),
    )  # fmt: skip
    (plan.folder / "drafter" / "README.md").write_text(text)
    result = {
        "state": asdict(outcome.state),
        "held_out": asdict(outcome.held_out) if outcome.held_out else None,
        "served": outcome.served,
        "speed": speed,
        "curve": points,
        "documents": {"trained_on": len(documents), "held_out": len(corpus.held), "left_out": corpus.excluded},
        **settings(plan),
    }
    (plan.folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
