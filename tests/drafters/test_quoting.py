"""Prompts that quote: passages found in answers, kinds of prompts, what they share."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from specdiff.drafters.common_start import common_start
from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.quoting import (
    KINDS,
    Passage,
    as_passage,
    as_passages,
    excerpt,
    language_of,
    quoting_prompts,
    sentences,
    topics,
)

ENGLISH = (
    "The old bridge of Port Lorne was built in 1820 by local masons. It has three arches and a narrow road. "
    "Every spring the river rises, and the keepers of the bridge close the northern gate. "
    "In 1902 Anna Vale painted the bridge, and the painting hangs in the town hall."
)
GERMAN = (
    "Die alte Brücke ist ein Denkmal und wird im Sommer von vielen Gästen besucht. Der Weg zu den Türmen ist nicht "
    "weit, und die Aussicht ist schön. Das Dorf liegt mit dem Fluss in einem Tal."
)


def test_passages_are_whole_sentences_of_one_language():
    found = as_passage(ENGLISH + " And then the")
    assert found == Passage(ENGLISH, "English"), "a sentence that was cut off is dropped"
    german = as_passage(GERMAN)
    assert german is not None and german.language == "German"
    assert language_of("zzz qqq") is None
    assert as_passage("Too short. Really.") is None
    assert as_passage("The dog is in the house of the king. " * 6) is None, "repeats"
    assert (
        as_passage("def f(x): return {x: [1, 2, 3]}. " + "x = (y + 1) * [2] / {3: 4}; " * 8 + "Done. The end.") is None
    )


def test_passages_come_from_the_answer_only():
    class Letters:
        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens
            return "".join(map(chr, ids))

    prompt = "Tell me. "
    document = Document(np.array([ord(c) for c in prompt + ENGLISH]), len(prompt))
    assert as_passages([document], Letters()) == [Passage(ENGLISH, "English")]


def test_excerpts_and_topics():
    import random

    for seed in range(20):
        part = excerpt(ENGLISH, 25, random.Random(seed))
        assert part in ENGLISH and all(s in sentences(ENGLISH) for s in sentences(part))
        assert len(part.split()) <= 25 or len(sentences(part)) == 1
    assert {"Port Lorne", "Anna Vale", "bridge"} <= set(topics(ENGLISH))


def test_every_kind_is_made_and_the_same_again():
    other = ENGLISH.replace("bridge", "harbour").replace("Anna Vale", "Tom Reed")
    passages = [Passage(ENGLISH), Passage(other), Passage(GERMAN, "German")]
    prompts = quoting_prompts(passages, 600, 4)
    assert len(prompts) == 600 and prompts == quoting_prompts(passages, 600, 4)
    assert prompts != quoting_prompts(passages, 600, 5)
    counts = Counter(kind for _, kind in prompts)
    assert set(counts) == {f"quote-{kind}" for kind in KINDS}
    for text, kind in prompts:
        assert "{" not in text
        if kind in ("quote-summarise", "quote-answer", "quote-extract", "quote-rewrite"):
            assert any(s in text for s in sentences(ENGLISH) + sentences(other)), (kind, text)
    foreign = [text for text, kind in prompts if kind == "quote-translate"]
    share = sum(any(s in text for s in sentences(GERMAN)) for text in foreign) / len(foreign)
    assert 0.6 < share < 0.95
    assert quoting_prompts([Passage(GERMAN, "German")], 5, 0) == []


def test_questions_about_the_same_passages_start_alike():
    texts = [text for text, kind in quoting_prompts([Passage(ENGLISH)], 200, 1) if kind == "quote-answer"]
    alike = [common_start(a, b) > 0.6 * len(a) for a, b in itertools.pairwise(texts)]
    assert sum(alike) >= 0.4 * len(alike)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_count(count):
    assert len(quoting_prompts([Passage(ENGLISH)], count, 0)) == count
