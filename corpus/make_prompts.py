"""Write ``prompts.jsonl``, prompts for ``specdiff train --data``: plain tasks and German sentences to translate.

    python corpus/make_prompts.py TASKS.jsonl corpus/prompts.jsonl

TASKS.jsonl holds lines with ``prompt`` and ``source`` (GSM8K training questions, self-instruct tasks). The German
sentences are made here, from patterns and word lists of the project's own, and are to be translated into English.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from pathlib import Path

WHO = (
    "Die Regierung", "Der Bürgermeister", "Die Polizei", "Ein Sprecher der Firma", "Die Universität", "Der Verein",
    "Die Ärztin", "Ein junger Forscher", "Das Museum", "Die Bank", "Der Trainer", "Die Ministerin", "Das Gericht",
    "Der Landwirt", "Eine Gruppe von Schülern", "Der Flughafen", "Die Feuerwehr", "Der Autor", "Die Gewerkschaft",
)  # fmt: skip
WHERE = (
    "in Hamburg", "in der Stadt", "im Norden des Landes", "an der Grenze", "in Wien", "am Bahnhof", "in der Schweiz",
    "auf dem Land", "in Leipzig", "an der Küste", "im ganzen Land", "in Brüssel", "in einem kleinen Dorf",
)  # fmt: skip
WHEN = (
    "am Montag", "am Freitagabend", "seit drei Jahren", "im vergangenen Sommer", "nächste Woche", "am frühen Morgen",
    "zum ersten Mal", "vor zwei Monaten", "nach langer Beratung", "im Jahr 2019", "bis Ende März",
)  # fmt: skip
WHAT = (
    "ein neues Krankenhaus", "höhere Preise", "eine Ausstellung über das Meer", "den Bau von Wohnungen", "neue Regeln",
    "mehr Züge", "ein Konzert", "die Suche nach der Ursache", "eine Spende von zehntausend Euro", "den Plan",
    "eine Brücke über den Fluss", "billige Medikamente", "den Schutz der Wälder", "ein Gesetz gegen Lärm",
)  # fmt: skip
WHY = (
    "weil viele Menschen darauf warten", "obwohl es Kritik gab", "damit die Kinder sicher zur Schule kommen",
    "weil das Geld fehlt", "nachdem ein Gutachten erschienen war", "ohne einen Grund zu nennen", "um Energie zu sparen",
    "wenn alle Länder zustimmen", "weil die Zahl der Besucher stark gestiegen ist", "trotz des schlechten Wetters",
)  # fmt: skip
SENTENCES = (
    "{who} hat {when} {where} {what} angekündigt, {why}.",
    "{who} will {where} {what}, {why}.",
    "{when2} sprach {who2} {where} über {what}.",
    "Nach Angaben der Zeitung plant {who2} {when} {what}.",
    "{who} erklärte, dass es {where} {when} keine Probleme gegeben habe.",
    "Es ist noch nicht klar, ob {who2} {what} unterstützt, sagte ein Beobachter {where}.",
    "Wer {where} lebt, kennt {what} schon {when}.",
    "{who} rechnet damit, dass {what} {when} {where} beginnt, {why}.",
    "Rund zwanzig Prozent der Befragten wünschen sich {what}, {why}.",
    "Der Streit um {what} dauert {where} an, {why}.",
)
ASKS = (
    "Translate German to English: {text}",
    "Translate the following German sentence into English: {text}",
    "{text}\n\nTranslate this into English.",
    "What does this mean in English? {text}",
    "Please translate from German:\n{text}",
)
SHARES = {"gsm8k": 400, "selfinst": 150, "selfinst_user": 150}
GERMAN = 300


def german(rng: random.Random) -> str:
    """One or two German sentences."""

    def one() -> str:
        who, when = rng.choice(WHO), rng.choice(WHEN)
        words = {"who": who, "who2": who[0].lower() + who[1:], "when": when, "when2": when[0].upper() + when[1:]}
        words |= {"where": rng.choice(WHERE), "what": rng.choice(WHAT), "why": rng.choice(WHY)}
        return rng.choice(SENTENCES).format(**words)

    return " ".join(one() for _ in range(rng.choice((1, 1, 2))))


def main(tasks: Path, out: Path) -> None:
    """Draw the mix and write it."""
    rng = random.Random(3)
    by_source: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in tasks.read_text(encoding="utf-8").strip().split("\n"):
        entry = json.loads(line)
        by_source[entry["source"]].append(entry)
    lines = [e for name, share in SHARES.items() for e in rng.sample(by_source[name], min(share, len(by_source[name])))]
    lines += [{"source": "german", "prompt": rng.choice(ASKS).format(text=german(rng))} for _ in range(GERMAN)]
    rng.shuffle(lines)
    out.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
