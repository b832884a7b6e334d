"""Prompt files: what is read, and what is said about files that are wrong."""

from __future__ import annotations

import json

import pytest
import torch
from bench_tiny import StubTokenizer
from devdata import dev_data

from specdiff.bench.prompts import DEFAULT_SET, Prompt, encode, left_padded, load_prompts, spread
from specdiff.errors import InvalidInputError


def test_own_set_is_six_sets_of_eight():
    prompts = load_prompts()
    counts = {prompt.set: sum(other.set == prompt.set for other in prompts) for prompt in prompts}
    assert len(counts) == 6 and set(counts.values()) == {8}
    assert len({prompt.text for prompt in prompts}) == 48
    assert len(load_prompts(per_set=3)) == 18


def test_own_set_shares_nothing_with_the_development_prompts():
    folder = dev_data()
    if folder is None:
        pytest.skip("no development data beside this checkout")

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[at : at + 8]) for at in range(len(words) - 7)}

    lines = (folder / "spec_bench_dev.jsonl").read_text(encoding="utf-8").splitlines()
    foreign = set().union(*(grams(turn) for line in lines for turn in json.loads(line)["turns"]))
    assert not [prompt.id for prompt in load_prompts() if grams(prompt.text) & foreign]


def test_both_layouts(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": 7, "set": "x", "turns": ["first", "second"]}\n\n{"prompt": "plain"}\n', encoding="utf-8")
    assert load_prompts(file) == [Prompt("7", "x", "first"), Prompt("line-3", DEFAULT_SET, "plain")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\nnot json\n', "line 2: not valid JSON"),
        ("[1]\n", "line 1: expected a JSON object, got list"),
        ('{"text": "a"}\n', r'line 1: neither "turns" nor "prompt" given \(keys: text\)'),
        ('{"turns": []}\n', 'line 1: "turns" must be a list'),
        ('{"turns": [3]}\n', "line 1: the prompt must be a non-empty string"),
        ('{"prompt": "  "}\n', "line 1: the prompt must be a non-empty string"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "line 2: id 'a' appears twice"),
    ],
)
def test_wrong_files_name_the_line(tmp_path, content, message):
    file = tmp_path / "p.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message):
        load_prompts(file)


def test_missing_file_and_wrong_counts(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot read prompts"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InvalidInputError, match="at least 1"):
        load_prompts(per_set=0)
    with pytest.raises(InvalidInputError, match="cannot take 49"):
        spread(load_prompts(), 49)


def test_spread_takes_sets_in_turn():
    assert [prompt.set for prompt in spread(load_prompts(), 8)][:6] == [prompt.set for prompt in load_prompts()][::8]


def test_encode_and_pad():
    ids = encode(StubTokenizer(32), "hello")
    assert ids.shape == (5,)
    padded, mask = left_padded([ids, ids[:2]], 0)
    assert padded[1].tolist() == [0, 0, 0, *ids[:2].tolist()] and mask[1].tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        encode(StubTokenizer(32), "")

    class Chatty(StubTokenizer):
        chat_template = "x"

        def apply_chat_template(self, chat, **options):
            assert options["add_generation_prompt"] and chat == [{"role": "user", "content": "hi"}]
            return {"input_ids": [9, 8]}

    assert encode(Chatty(32), "hi").tolist() == [9, 8]
    assert torch.equal(encode(Chatty(32), "hi", raw=True), encode(StubTokenizer(32), "hi"))
