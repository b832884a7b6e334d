"""Prompts that quote text: summarise, answer from passages, extract, rewrite, translate, explain, ask, write.

What a drafter accepts depends on the kind of prompt it was trained on: one that never saw a long quoted text accepts
little when the answer leans on one. Texts to quote are at hand wherever the target has written something, so prompts of
these kinds are built from its earlier answers by rules alone. Languages other than English come in two steps: some
prompts ask for a text in another language, and what came back in that language is given for translation later.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdiff.drafters.train.corpus import Document


class Passage(NamedTuple):
    """A text to quote. ``language`` is that of its text as :func:`language_of` sees it."""

    text: str
    language: str = "English"


COMMON_WORDS = {
    "English": {"the", "of", "and", "to", "is", "in", "that", "for", "with", "are", "this", "it"},
    "German": {"der", "die", "das", "und", "ist", "ein", "eine", "nicht", "zu", "den", "mit", "wir", "ich", "sie"},
    "French": {"le", "la", "les", "et", "est", "un", "une", "des", "dans", "pour", "que", "nous", "du", "je"},
    "Spanish": {"el", "la", "los", "y", "es", "un", "una", "de", "en", "que", "para", "las", "con", "del"},
    "Italian": {"il", "la", "di", "e", "che", "un", "una", "per", "sono", "del", "con", "non", "gli", "della"},
}
"""Frequent short words, by which a text's language is told."""
FOREIGN = tuple(name for name in COMMON_WORDS if name != "English")
MOST_REPEATS = 0.3
"""Largest share of a passage's sentences that may be repeats."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(]?[A-ZÀ-Þ0-9])")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_NAME = re.compile(r"(?<=[a-z0-9,] )(?:[A-Z][a-z]+(?: (?:of|the|and) (?=[A-Z])| (?=[A-Z]))?){1,4}")
_THING = re.compile(r"\b(?:the|a|an|of|their|its) ((?:[a-z]{4,} )?[a-z]{5,})\b")


def sentences(text: str) -> list[str]:
    """The sentences of a text, white space evened out."""
    return [s for s in _SENTENCE_END.split(" ".join(text.split())) if s]


def language_of(text: str) -> str | None:
    """The language whose common words make up most of a text's words, at least an eighth of them; None if unclear."""
    words = [w.lower() for w in _WORD.findall(text)]
    counts = {name: sum(w in common for w in words) for name, common in COMMON_WORDS.items()}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] * 8 >= max(len(words), 8) else None


def as_passage(text: str) -> Passage | None:
    """A text as a passage: whole sentences, at least two and 20 words; None where it does not serve (code, lists,
    repeats, no language told)."""
    whole = sentences(text)
    if whole and whole[-1][-1] not in ".!?\"'":
        whole = whole[:-1]
    if len(whole) < 2 or len(set(whole)) < (1 - MOST_REPEATS) * len(whole):
        return None
    body = " ".join(whole)
    language = language_of(body)
    letters = sum(c.isalpha() or c.isspace() for c in body)
    if language is None or len(body.split()) < 20 or letters < 0.85 * len(body):
        return None
    return Passage(body, language)


def as_passages(documents: Sequence[Document], tokenizer: Any) -> list[Passage]:
    """The passages among the answers of some chats."""
    texts = (tokenizer.decode(d.ids[d.prompt_length :].tolist(), skip_special_tokens=True) for d in documents)
    return [passage for text in texts if (passage := as_passage(text)) is not None]


def excerpt(text: str, words: int, rng: random.Random) -> str:
    """Sentences in a row, from a random one on, until there are ``words`` words (at least one sentence)."""
    whole = sentences(text)
    start = rng.randrange(max(len(whole) - 2, 1))
    taken: list[str] = []
    for sentence in whole[start:]:
        if taken and sum(len(s.split()) for s in taken) + len(sentence.split()) > words:
            break
        taken.append(sentence)
    return " ".join(taken)


def topics(text: str) -> list[str]:
    """Names and things that a text mentions, in order, each once."""
    found = [m.group(0).strip() for m in _NAME.finditer(text)] + [m.group(1) for m in _THING.finditer(text)]
    return list(dict.fromkeys(t for t in found if len(t) > 3))


@dataclass
class Shelf:
    """Passages to draw from.

    Attributes:
        english: texts.
        foreign: texts by language, only languages that have some.
        rng: of all choices.
    """

    english: list[str]
    foreign: dict[str, list[str]]
    rng: random.Random

    def text(self, words: int) -> str:
        """English text of about ``words`` words: an excerpt of one passage, or of several as paragraphs."""
        parts = [excerpt(self.rng.choice(self.english), words, self.rng)]
        while sum(len(p.split()) for p in parts) < 0.6 * words and len(parts) < 8:
            parts.append(excerpt(self.rng.choice(self.english), words, self.rng))
        return "\n\n".join(parts)

    def topic(self) -> str:
        """Something that one of the texts mentions."""
        for _ in range(20):
            if found := topics(self.rng.choice(self.english)):
                return self.rng.choice(found)
        return "everyday life"

    def of(self, *patterns: str, **values: str) -> str:
        """One of the patterns, filled in."""
        return self.rng.choice(patterns).format(**values)


def summarise(shelf: Shelf) -> list[str]:
    """A text to be shortened."""
    text = shelf.text(shelf.rng.choice((60, 120, 200, 300, 450)))
    length = shelf.of("", " in one sentence", " in two sentences", " in a short paragraph", " briefly")
    return [
        shelf.of(
            "Summarize the following text{length}:\n\n{text}",
            "{text}\n\nSummarize the text above{length}.",
            "Please give a summary of this article{length}.\n\n{text}",
            "Summarize: {text}",
            "What is the main point of the following text?\n\n{text}",
            "Write a headline for this article, then sum it up{length}.\n\nArticle: {text}",
            text=text,
            length=length,
        )
    ]


def answer(shelf: Shelf) -> list[str]:
    """Two or three questions about the same passages; what they share comes first, so it is computed once."""
    texts = [shelf.text(shelf.rng.choice((40, 70, 100))) for _ in range(shelf.rng.choice((1, 2, 3, 5)))]
    label = shelf.rng.choice(("Passage {}: {}", "[{}] {}", "{}. {}", "Document {}: {}"))
    quoted = "\n\n".join(label.format(i, t) for i, t in enumerate(texts, 1))
    head = shelf.of(
        "Use the passages to answer the question.\n\n{quoted}\n\nQuestion: ",
        "Answer the question based on the given documents. Give only the answer.\n\n{quoted}\n\nQuestion: ",
        "{quoted}\n\n",
        "Read this and answer: {quoted}\n\nQ: ",
        quoted=quoted,
    )
    found = topics(" ".join(texts)) or ["the text"]
    asked = shelf.rng.sample(found, min(len(found), shelf.rng.choice((2, 3))))
    forms = (
        "What do the passages say about {topic}?",
        "What is {topic}?",
        "Why is {topic} important?",
        "How is {topic} described?",
        "Who or what is connected with {topic}?",
        "What can be learned about {topic}?",
    )
    return [head + shelf.of(*forms, topic=topic) for topic in asked]


def extract(shelf: Shelf) -> list[str]:
    """Parts of a text to be picked out."""
    return [
        shelf.of(
            "List the main points of this text:\n\n{text}",
            "{text}\n\nWhich people, places and things does the text mention? List them.",
            "Copy the most important sentence of the following text.\n\n{text}",
            "Give three keywords for this text.\n\n{text}",
            "Classify the tone of the following text as positive, negative or neutral, and say why.\n\n{text}",
            text=shelf.text(shelf.rng.choice((50, 100, 160))),
        )
    ]


def rewrite(shelf: Shelf) -> list[str]:
    """A text to be said in another way."""
    how = shelf.of(
        "in simpler words", "more formally", "as a short list", "in the past tense", "for a child", "briefly"
    )
    return [
        shelf.of(
            "Rewrite the following text {how}:\n\n{text}",
            "{text}\n\nSay this {how}.",
            "Correct any mistakes in this text and return it.\n\n{text}",
            "Paraphrase: {text}",
            "Continue this text:\n\n{text}",
            how=how,
            text=shelf.text(shelf.rng.choice((25, 50, 80))),
        )
    ]


def translate(shelf: Shelf) -> list[str]:
    """A sentence or two in another language, to be put into English; from English while there is nothing foreign."""
    if shelf.foreign and shelf.rng.random() < 0.8:
        language = shelf.rng.choice(sorted(shelf.foreign))
        text = excerpt(shelf.rng.choice(shelf.foreign[language]), shelf.rng.choice((10, 20, 35)), shelf.rng)
        return [
            shelf.of(
                "Translate {language} to English: {text}",
                "Translate the following {language} text into English.\n\n{text}",
                "What does this mean in English? {text}",
                "{text}\n\nTranslate this from {language} to English.",
                language=language,
                text=text,
            )
        ]
    text = excerpt(shelf.rng.choice(shelf.english), shelf.rng.choice((8, 20)), shelf.rng)
    language = shelf.rng.choice(FOREIGN)
    return [
        shelf.of("Translate to {language}: {text}", "Say this in {language}:\n{text}", language=language, text=text)
    ]


def explain(shelf: Shelf) -> list[str]:
    """A sentence to be explained or judged."""
    text = excerpt(shelf.rng.choice(shelf.english), 15, shelf.rng)
    return [
        shelf.of(
            'Explain what this sentence means: "{text}"',
            'Is the following true? Give reasons. "{text}"',
            'What question does this answer? "{text}"',
            "Give two arguments for and two against this claim: {text}",
            text=text,
        )
    ]


def ask(shelf: Shelf) -> list[str]:
    """Short questions without any context."""
    return [
        shelf.of(
            "what is {topic}?",
            "who discovered {topic}?",
            "when did {topic} begin?",
            "where does {topic} come from?",
            "how many kinds of {topic} are there?",
            "what is the meaning of {topic}?",
            "why do people need {topic}",
            "what is the difference between {topic} and {other}?",
            topic=shelf.topic(),
            other=shelf.topic(),
        )
    ]


def write(shelf: Shelf) -> list[str]:
    """Texts to be written."""
    what = shelf.of(
        "a blog post", "an email", "a short story", "a review", "a letter", "a speech", "a dialogue", "an essay"
    )
    return [
        shelf.of(
            "Write {what} about {topic}.",
            "Write {what} about {topic} and {other}. Use clear paragraphs.",
            "Describe {topic} to someone who has never heard of it.",
            "Give me five ideas for {topic}.",
            "Compare {topic} with {other}. What are the advantages of each?",
            "Act as an expert on {topic}. What would you advise a beginner?",
            "Make a plan in steps to learn about {topic}.",
            what=what,
            topic=shelf.topic(),
            other=shelf.topic(),
        )
    ]


def write_foreign(shelf: Shelf) -> list[str]:
    """Texts to be written in another language, for :func:`translate` to use later."""
    asked = {
        "German": "Schreibe einen kurzen Text über {topic} auf Deutsch.",
        "French": "Écris un court paragraphe sur {topic} en français.",
        "Spanish": "Escribe un párrafo corto sobre {topic} en español.",
        "Italian": "Scrivi un breve testo su {topic} in italiano.",
    }
    language = shelf.rng.choice(FOREIGN)
    return [
        shelf.of(
            asked[language],
            "Write three sentences in {language} about {topic}. Write only in {language}.",
            language=language,
            topic=shelf.topic(),
        )
    ]


KINDS: dict[str, tuple[Callable[[Shelf], list[str]], float]] = {
    "summarise": (summarise, 4),
    "answer": (answer, 2),  # gives two or three prompts at a time
    "extract": (extract, 1.5),
    "rewrite": (rewrite, 1.5),
    "translate": (translate, 3),
    "explain": (explain, 1),
    "ask": (ask, 3),
    "write": (write, 3),
    "write-foreign": (write_foreign, 1),
}
"""Each kind with how often it is chosen, relative to the others."""


def quoting_prompts(passages: Sequence[Passage], count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` prompts (text, kind) made from passages; the same for the same arguments. None without English text.

    Args:
        passages: what to quote.
        count: how many prompts.
        seed: of all choices.
    """
    english = [p.text for p in passages if p.language == "English"]
    if not english:
        return []
    foreign: dict[str, list[str]] = {}
    for passage in passages:
        if passage.language != "English":
            foreign.setdefault(passage.language, []).append(passage.text)
    shelf = Shelf(english, foreign, random.Random(seed))
    names, weights = list(KINDS), [weight for _, weight in KINDS.values()]
    prompts: list[tuple[str, str]] = []
    while len(prompts) < count:
        kind = shelf.rng.choices(names, weights)[0]
        prompts += [(text, f"quote-{kind}") for text in KINDS[kind][0](shelf)]
    return prompts[:count]
