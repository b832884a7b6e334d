"""Generation as people expect it, and infill, edit, refine, score."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from native_tiny import EOS, MASK, PAD, VOCAB, full_net, left_padded, lm, prompt, spec, tiny_llama
from test_native_invariants import Table

from specdiff import DiffusionLM, DLMSpec
from specdiff.diffusion.policies import POLICIES, make_policy
from specdiff.diffusion.policies.ancestral import ReMDM
from specdiff.errors import InvalidInputError, SpecDiffError, UnsupportedError

BLOCK = {"attention": "block_causal", "block_size": 4, "alignment": "absolute", "convention": "sdar", "cache": "block"}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(0)


class Letters:
    """A tokenizer of one character per id."""

    mask_token_id = MASK

    def encode(self, text, add_special_tokens=True):
        return [ord(c) - 97 for c in text]

    def decode(self, ids, skip_special_tokens=False, **kwargs):
        return "".join(chr(97 + int(i)) for i in ids)


# -- length, end ids, stop strings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("changes", [{}, BLOCK], ids=["full", "blocks"])
def test_exactly_max_new_tokens(model, new, changes):
    out = lm(model, **changes).generate(prompt(6), max_new_tokens=new, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 6 + new)
    assert out.stats.new_tokens == [new] and out.stats.finish_reason == ["length"]
    assert not (out.sequences[0, 6:] == MASK).any()


@pytest.mark.parametrize("name,changes", [("threshold", {}), ("dynamic", BLOCK), ("edit", BLOCK), ("mask_predict", {})])
def test_the_first_end_id_ends_the_row(model, name, changes):
    """Take a token that is really written as end id: the row ends there, wherever it lies in a block."""
    dlm = lm(model, **changes)
    ids = prompt(6)
    free = dlm.generate(ids, max_new_tokens=12, policy=name)[0, 6:].tolist()
    for at in (0, 3, 7, 11):
        eos = free[at]
        first = free.index(eos)
        both, mask = left_padded([prompt(3, 9)[0], ids[0]])
        out = dlm.generate(both, mask, max_new_tokens=12, policy=name, eos_token_id=eos, return_dict_in_generate=True)
        row = out.sequences[1, 6:].tolist()
        assert row[: first + 1] == free[: first + 1]
        assert set(row[first + 1 :]) <= {PAD}
        assert out.stats.new_tokens[1] == first + 1
        assert out.stats.finish_reason[1] == "eos"


def test_an_end_id_with_noise_before_it_does_not_end_the_row(model):
    """Decoded right to left, the end id at the last place appears first."""
    dlm = lm(model)
    free = dlm.generate(prompt(5), max_new_tokens=6, policy="any_order", order="right")[0, 5:].tolist()
    out = dlm.generate(
        prompt(5),
        max_new_tokens=6,
        policy="any_order",
        order="right",
        eos_token_id=free[-1],
        return_dict_in_generate=True,
    )
    assert out.sequences[0, 5:].tolist() == free[: free.index(free[-1]) + 1]


def test_stop_strings(model):
    dlm = DiffusionLM(model, spec(policy="quota"), tokenizer=Letters())
    args = {"max_new_tokens": 12, "block_size": 4, "steps": 12}
    free = dlm.generate(prompt(5), **args)[0, 5:]
    text = Letters().decode(free)
    for begin, n in ((0, 1), (3, 3), (6, 2), (2, 5)):  # inside a block, over a block edge, at once
        stop = text[begin : begin + n]
        end = text.index(stop) + n
        out = dlm.generate(prompt(5), stop_strings=[stop, "~~~"], return_dict_in_generate=True, **args)
        assert out.sequences[0, 5:].tolist() == free[:end].tolist()
        assert out.stats.finish_reason == ["stop"]
    with pytest.raises(InvalidInputError, match="tokenizer"):
        lm(model).generate(prompt(5), stop_strings="a")


# -- arguments --------------------------------------------------------------------------------------------------------


def test_unknown_options_and_contradictions_are_refused_before_compute(model, monkeypatch):
    calls = []
    dlm = lm(model)
    inner = dlm.denoiser.logits
    monkeypatch.setattr(dlm.denoiser, "logits", lambda *a, **k: calls.append(1) or inner(*a, **k))
    ids = prompt(4)
    for kwargs in (
        {"treshold": 0.9},
        {"policy": "nope"},
        {"policy": "quota", "threshold": 0.9},
        {"policy": "sub_block"},
        {"policy": "entropy_bound"},
        {"policy": "apd_lossy"},
        {"policy": make_policy("quota", {}), "steps": 4},
        {"steps": 0, "policy": "quota"},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": 0},
        {"cfg_scale": -0.5},
        {"context_window": 0},
        {"context_window": -3},
        {"max_new_tokens": -1},
        {"seed": [1, 2]},
        {"draws": "dice"},
        {"fixed": {3: [1, 2]}, "max_new_tokens": 4},
        {"force_words_ids": [[1] * 9], "max_new_tokens": 4},
        {"cache": "certainty", "policy": "mask_predict"},
        {"attention_mask": torch.ones(1, 9)},
        {"token_type_ids": torch.ones(1, 4)},
    ):
        with pytest.raises(SpecDiffError):
            dlm.generate(ids, **kwargs)
    with pytest.raises(InvalidInputError, match="vocabulary"):
        dlm.generate(torch.tensor([[VOCAB]]))
    with pytest.raises(UnsupportedError, match="trained"):
        lm(model, **BLOCK).generate(ids, block_size=8)
    with pytest.raises(InvalidInputError, match="empty prompt"):
        lm(model, shift=1).generate(ids[:, :0])
    with pytest.raises(InvalidInputError, match="one row"):
        dlm.generate(ids.repeat(2, 1), streamer=object())
    assert not calls


def test_every_policy_is_reachable_and_spec_round_trips():
    assert len(POLICIES) >= 19
    for name, kind in POLICIES.items():
        assert make_policy(name, {}).name == name == kind.name
    s = spec(eos_ids=(1, 2), options={"threshold": 0.5})
    assert DLMSpec.from_dict(s.to_dict()) == s
    assert hash(s) == hash(DLMSpec.from_dict(s.to_dict()))
    with pytest.raises(AttributeError):
        s.shift = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        s.options["threshold"] = 1  # type: ignore[index]


def test_sampling_filters(model):
    """top_k = 1 is greedy at any temperature; top_p keeps to the nucleus of every pass."""
    for convention in ("llada", "dream", "sdar"):
        dlm = lm(model, convention=convention, policy="any_order")
        greedy = dlm.generate(prompt(5), max_new_tokens=8, order="left")
        assert torch.equal(
            dlm.generate(prompt(5), max_new_tokens=8, order="left", temperature=5.0, top_k=1, seed=3), greedy
        )
        assert not torch.equal(dlm.generate(prompt(5), max_new_tokens=8, order="left", temperature=5.0, seed=3), greedy)
    hot = dlm.generate(prompt(5), max_new_tokens=6, do_sample=True, seed=1)
    assert torch.equal(hot, dlm.generate(prompt(5), max_new_tokens=6, temperature=1.0, seed=1))
    assert torch.equal(
        dlm.generate(prompt(5), max_new_tokens=6, do_sample=False, temperature=1.0, seed=1, order="left"),
        greedy[:, :11],
    )


# -- hooks, guidance, spans, words ------------------------------------------------------------------------------------


def test_logits_and_token_hooks(model):
    """Dream's hooks: the logits of every pass may be changed, the tokens after it too; prompt and spans may not."""
    seen = []

    def only_seven(i, ids, logits, positions):
        seen.append((i, tuple(positions[0].tolist())))
        logits[..., 7] += 1e4
        return logits

    out = lm(model, shift=1, policy="dream", convention="dream").generate(
        prompt(4), max_new_tokens=5, steps=5, logits_hook=only_seven, fixed={0: [3]}
    )
    assert out[0, 4:].tolist() == [3, 7, 7, 7, 7]
    assert [i for i, _ in seen] == list(range(len(seen))) and seen[0][1] == (5, 6, 7, 8)

    def all_nine(i, ids, noisy):
        return torch.full_like(ids, 9)

    out = lm(model).generate(prompt(4), max_new_tokens=5, tokens_hook=all_nine, fixed={0: [3]})
    assert out[0].tolist() == [*prompt(4)[0].tolist(), 3, 9, 9, 9, 9]


def test_guidance_zero_is_none_and_one_doubled_pass(model):
    dlm = lm(model, policy="quota")
    ids, mask = left_padded([prompt(3)[0], prompt(7, 2)[0]])
    shapes = []
    handle = model.register_forward_pre_hook(lambda m, a, k: shapes.append(k["input_ids"].shape[0]), with_kwargs=True)
    plain = dlm.generate(ids, mask, max_new_tokens=6, steps=3)
    assert torch.equal(dlm.generate(ids, mask, max_new_tokens=6, steps=3, cfg_scale=0.0), plain)
    assert shapes == [2] * 6
    shapes.clear()
    out = dlm.generate(ids, mask, max_new_tokens=6, steps=3, cfg_scale=2.0, return_dict_in_generate=True)
    handle.remove()
    assert shapes == [4] * 3 and out.stats.nfe == [3, 3]
    assert not torch.equal(out.sequences, plain)
    # a block model caches both halves; rows leave both
    block = lm(model, **BLOCK)
    args = {"max_new_tokens": 9, "policy": "dynamic", "threshold": 0.3, "cfg_scale": 1.0}
    assert torch.equal(
        block.generate(ids, mask, cache="block", **args), block.generate(ids, mask, cache="none", **args)
    )


def test_guidance_with_a_cache_and_rows_without_anything_to_do(model):
    dlm = lm(model, block_size=4, cache="dual")
    ids = prompt(8, rows=2)
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[1, 4:6] = True
    out = dlm.infill(ids, hole, cfg_scale=1.0)
    assert torch.equal(out[~hole], ids[~hole]) and not (out == MASK).any()
    assert torch.equal(out[1:], dlm.infill(ids[1:], hole[1:], cfg_scale=1.0))
    assert torch.equal(dlm.generate(ids, max_new_tokens=0, cfg_scale=1.0), ids)


def test_a_block_size_of_one_call_stays_out_of_the_next(model):
    """An object with the denoiser's methods is the caller's own: its spec is not touched."""
    mine = lm(model, policy="quota").denoiser
    before = mine.spec
    dlm = DiffusionLM(mine)
    plain = dlm.generate(prompt(5), max_new_tokens=8, steps=2, return_dict_in_generate=True)
    blocks = dlm.generate(prompt(5), max_new_tokens=8, steps=2, block_size=4, return_dict_in_generate=True)
    assert (plain.stats.blocks, blocks.stats.blocks) == ([1], [2])
    again = dlm.generate(prompt(5), max_new_tokens=8, steps=2, return_dict_in_generate=True)
    assert again.stats.blocks == [1] and mine.spec is before
    assert DiffusionLM(mine, block_size=2).spec.block_size == 2 and mine.spec is before


def test_fixed_suffix_is_there_and_no_end_before_it(model):
    """A forced suffix is present, even if the model would rather stop."""

    def stop(i, ids, logits, positions):
        logits[..., EOS] += 50
        return logits

    dlm = lm(model, eos_ids=(EOS,))
    out = dlm.generate(prompt(4), max_new_tokens=10, fixed={-2: [5, 6]}, logits_hook=stop)
    assert out[0, -2:].tolist() == [5, 6] and out.shape == (1, 14)
    assert dlm.generate(prompt(4), max_new_tokens=10, logits_hook=stop).shape == (1, 5)
    rows = dlm.generate(prompt(4).repeat(2, 1), max_new_tokens=6, fixed=[{0: [1]}, {2: [2, 3]}])
    assert int(rows[0, 4]) == 1 and rows[1, 6:8].tolist() == [2, 3]


@pytest.mark.parametrize("changes", [{}, BLOCK], ids=["full", "blocks"])
def test_forced_words_appear_where_the_model_likes_them_best(model, changes):
    words = [[5, 6, 7], [9]]
    ids, mask = left_padded([prompt(3)[0], prompt(8, 2)[0]])
    dlm = lm(model, **changes, eos_ids=(EOS,))
    args = {"max_new_tokens": 12, "force_words_ids": words, "return_dict_in_generate": True}
    out = dlm.generate(ids, mask, **args)
    for i, row in enumerate([prompt(3)[0], prompt(8, 2)[0]]):
        text = out.sequences[i, 8:].tolist()
        assert any(text[j : j + 3] == [5, 6, 7] for j in range(10)) and 9 in text
        solo = dlm.generate(row[None], **args)
        assert solo.sequences[0, len(row) :].tolist() == text[: solo.sequences.shape[1] - len(row)]
        assert solo.stats.nfe[0] == out.stats.nfe[i]
    if not changes:
        net = full_net(model)
        x = torch.cat([prompt(3)[0], torch.full((12,), MASK)])
        logits = net(x)[3:]
        logits[:, MASK] = -torch.inf
        logits[:, EOS] = -torch.inf  # no end before a word
        log_p = torch.log_softmax(logits, -1)
        best = max(range(10), key=lambda j: float(log_p[j, 5] + log_p[j + 1, 6] + log_p[j + 2, 7]))
        assert out.sequences[0, 8 + best : 11 + best].tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    "changes,length,args",
    [
        (BLOCK, 5, {"max_new_tokens": 4, "force_words_ids": [[5, 6, 7, 8]]}),
        (
            {**BLOCK, "alignment": "prompt"},
            5,
            {"max_new_tokens": 10, "force_words_ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]},
        ),
        ({}, 5, {"max_new_tokens": 6, "fixed": {2: [1, 1]}, "force_words_ids": [[5, 6, 7, 8]]}),
        (  # the first token of a block is the clean pass's
            {**BLOCK, "shift": 1, "first_token": "ar", "alignment": "prompt"},
            5,
            {"max_new_tokens": 8, "force_words_ids": [[5, 6, 7, 8]]},
        ),
    ],
)
def test_forced_words_that_no_block_can_hold_are_refused_before_compute(model, changes, length, args, monkeypatch):
    calls = []
    dlm = lm(model, **changes)
    monkeypatch.setattr(dlm.denoiser, "logits", lambda *a, **k: calls.append(1))
    with pytest.raises(InvalidInputError, match="force_words_ids"):
        dlm.generate(prompt(length), **args)
    assert not calls


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "changes,args,words",
    [
        ({}, {"max_new_tokens": 6}, [[5, 6, 7], [8, 9, 10]]),  # a phrase in the middle would leave 1 and 2
        ({}, {"max_new_tokens": 8, "fixed": {2: [1]}}, [[5, 6, 7], [8, 9], [3, 4]]),
        (BLOCK, {"max_new_tokens": 8}, [[5, 6, 7], [8, 9, 10, 11]]),  # runs of 3, 4 and 1
        (
            {**BLOCK, "shift": 1, "first_token": "ar", "sub_block": 2, "policy": "sub_block"},
            {"max_new_tokens": 8},
            [[5, 6, 7], [8, 9, 10]],
        ),
        ({"block_size": 4}, {"max_new_tokens": 8, "cache": "certainty"}, [[5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_forced_words_leave_room_for_each_other(model, changes, args, words, seed):
    out = lm(model, **changes).generate(prompt(5, seed), force_words_ids=words, **args)[0, 5:].tolist()
    for phrase in words:
        assert any(out[j : j + len(phrase)] == phrase for j in range(len(out))), (phrase, out)


def test_a_row_that_ends_before_its_forced_words_says_so(model):
    dlm = DiffusionLM(model, spec(), tokenizer=Letters())
    free = dlm.generate(prompt(5), max_new_tokens=4)[0, 5:].tolist()
    args = {"max_new_tokens": 8, "fixed": {0: free}, "stop_strings": chr(97 + free[0]), "return_dict_in_generate": True}
    out = dlm.generate(prompt(5), force_words_ids=[[9, 9, 9]], **args)
    assert out.stats.finish_reason == ["stop"] and any("forced words" in n for n in out.stats.notes)


# -- outputs and streams ----------------------------------------------------------------------------------------------


def test_outputs(model):
    ids, mask = left_padded([prompt(3)[0], prompt(7, 2)[0]])
    out = lm(model, policy="quota").generate(
        ids, mask, max_new_tokens=6, steps=3, return_dict_in_generate=True, output_trajectory=True
    )
    assert torch.equal(out.sequences[:, :7], ids)
    assert out.confidence.shape == (2, 6) and ((out.confidence > 0) & (out.confidence <= 1)).all()
    s = out.stats
    assert (
        s.nfe == [3, 3]
        and s.passes == 3
        and s.new_tokens == [6, 6]
        and s.tokens_per_pass == [2.0, 2.0]
        and s.blocks == [1, 1]
    )
    assert len(out.trajectory) == 3
    assert [int(noisy.sum()) for _, noisy in out.trajectory] == [8, 4, 0]
    assert torch.equal(out.trajectory[-1][0], out.sequences[:, 7:])


class Recorder:
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(("put", value.reshape(-1).tolist()))

    def put_draft(self, value, **kwargs):
        self.events.append(("draft", value.reshape(-1).tolist()))

    def end(self):
        self.events.append(("end", []))


@pytest.mark.parametrize("name,changes", [("quota", {}), ("dynamic", BLOCK), ("edit", BLOCK)])
def test_streams_confirm_each_token_once_and_show_drafts(model, name, changes):
    dlm = lm(model, **changes)
    plain = dlm.generate(prompt(5), max_new_tokens=11, policy=name)
    eos = int(plain[0, 5 + 6])
    for stop in ((), (eos,)):
        r = Recorder()
        out = dlm.generate(prompt(5), max_new_tokens=11, policy=name, streamer=r, eos_token_id=stop)
        puts = [v for k, v in r.events if k == "put"]
        assert puts[0] == prompt(5)[0].tolist()
        assert list(itertools.chain(*puts[1:])) == out[0, 5:].tolist()
        assert r.events[-1][0] == "end" and [k for k, _ in r.events].count("end") == 1
        assert any(k == "draft" and MASK in v for k, v in r.events)


def test_transformers_text_diffusion_streamer(model, capsys):
    from transformers import TextDiffusionStreamer

    dlm = lm(model, **BLOCK)
    out = dlm.generate(prompt(5), max_new_tokens=6, streamer=TextDiffusionStreamer(Letters(), skip_prompt=True))
    assert "\033[33m" in capsys.readouterr().out  # a draft was shown
    assert out.shape == (1, 11)


def test_a_stream_ends_when_generation_fails(model):
    r = Recorder()
    with pytest.raises(RuntimeError, match="boom"):

        def hook(i, ids, logits, positions):
            raise RuntimeError("boom")

        lm(model).generate(prompt(5), max_new_tokens=4, streamer=r, logits_hook=hook)
    assert r.events[-1][0] == "end"


@pytest.mark.parametrize("first", [0, 4])
def test_an_infill_streams_the_text_before_the_gap_as_its_prompt(model, first, capsys):
    from transformers import TextStreamer

    ids = prompt(10)
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, first : first + 3] = True
    dlm = lm(model, policy="any_order")
    r = Recorder()
    out = dlm.infill(ids, hole, order="left", streamer=r)[0].tolist()
    puts = [v for k, v in r.events if k == "put"]
    assert puts[0] == out[:first] and list(itertools.chain(*puts)) == out
    dlm.infill(ids, hole, order="left", streamer=TextStreamer(Letters(), skip_prompt=True))
    assert capsys.readouterr().out.strip() == Letters().decode(out[first:]).strip()


# -- infill, refine, edit ---------------------------------------------------------------------------------------------


def test_infill_sees_both_sides_and_changes_nothing_else(model):
    dlm = lm(model, policy="any_order")
    rows = [prompt(12)[0], prompt(9, 3)[0]]
    ids, mask = left_padded(rows)
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, 4:7] = hole[1, 5:7] = hole[1, 9] = True
    out = dlm.infill(ids, hole, mask, order="left", return_dict_in_generate=True)
    assert torch.equal(out.sequences[~hole], ids[~hole])
    assert out.stats.nfe == [3, 3]
    net = full_net(model)
    x = rows[0].clone()
    x[4:7] = MASK
    for i in (4, 5, 6):
        logits = net(x)[i]
        logits[MASK] = -torch.inf
        x[i] = logits.argmax()
    assert out.sequences[0].tolist() == x.tolist()
    solo = dlm.infill(rows[1][None], hole[1:, 3:], order="left")
    assert solo[0].tolist() == out.sequences[1, 3:].tolist()
    nothing = dlm.infill(ids, torch.zeros_like(hole), mask)
    assert torch.equal(nothing, ids)


def test_block_causal_infill_refuses_a_suffix_it_cannot_see(model):
    ids = prompt(12)
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, 5] = True
    dlm = lm(model, **BLOCK)
    with pytest.raises(UnsupportedError, match="stretch"):
        dlm.infill(ids, hole)
    last = torch.zeros_like(hole)
    last[0, 9] = True  # span and suffix in one block
    out = dlm.infill(ids, last)
    assert torch.equal(out[~last], ids[~last])
    # with stretch=True the suffix counts: another suffix, another filling is possible; the canvas is one block
    seen = set()
    for s in range(8):
        other = ids.clone()
        other[0, 6:] = prompt(6, 50 + s)
        got = dlm.infill(other, hole, stretch=True)
        assert torch.equal(got[~hole], other[~hole])
        seen.add(int(got[0, 5]))
    assert len(seen) > 1
    with pytest.raises(UnsupportedError, match="causal"):
        lm(model, attention="causal", shift=1, block_size=4).infill(ids, hole)


def test_refine_and_edit(model):
    dlm = DiffusionLM(model, spec(policy="quota"), tokenizer=Letters())
    ids = prompt(10)
    out = dlm.refine(ids, [(2, 4), (7, 8)])
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, [2, 3, 7]] = True
    assert torch.equal(out[~hole], ids[~hole])
    assert torch.equal(out, dlm.infill(ids, hole))
    assert torch.equal(dlm.refine(ids.repeat(2, 1), [[(2, 4), (7, 8)], [(2, 4), (7, 8)]])[1:], out)
    with pytest.raises(InvalidInputError, match="outside"):
        dlm.refine(ids, [(8, 12)])
    text = "abcdefghij"
    new = dlm.edit(text, [(2, 4)])
    assert new[:2] == "ab" and new[4:] == "efghij" and len(new) == 10
    longer = dlm.edit(text, [(2, 4, 5), (6, 6, 1)])
    assert longer.startswith("ab") and longer[7:9] == "ef" and longer.endswith("ghij") and len(longer) == 14
    with pytest.raises(InvalidInputError, match="overlaps"):
        dlm.edit(text, [(2, 5), (4, 6)])


def bert_like_tokenizer():
    """Words, the special tokens around a text that BERT has, and a marker that is special too."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<m>": MASK, "[CLS]": 36, "[SEP]": 37, "<k>": 35} | {f"w{i}": i for i in range(35)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 36), ("[SEP]", 37)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, mask_token="<m>", cls_token="[CLS]", sep_token="[SEP]", additional_special_tokens=["<k>"]
    )


def test_edit_keeps_special_tokens_around_and_text_outside_the_spans(model):
    tok = bert_like_tokenizer()
    dlm = DiffusionLM(model, spec(policy="quota", forbidden_ids=(35, 36, 37, 38, 39)), tokenizer=tok)
    seen = []

    def look(i, ids, logits, positions):
        seen.append(ids[0].tolist())
        return logits

    text = "<k> w1   w2 w3\nw4"
    at = text.index("w2")
    new = dlm.edit(text, [(at, at + 2)], logits_hook=look)
    assert seen[0] == [36, 35, 1, MASK, 3, 4, 37]
    assert new.startswith(text[:at]) and new.endswith(text[at + 2 :])
    assert new[at : -len(text[at + 2 :])] in {f"w{i}" for i in range(35)}
    seen.clear()
    first = dlm.edit("w1 w2", [(0, 2)], logits_hook=look)  # a span at the beginning
    assert seen[0] == [36, MASK, 2, 37] and first.endswith(" w2")
    seen.clear()
    with pytest.raises(InvalidInputError, match="return_dict_in_generate"):
        dlm.edit(text, [(at, at + 2)], return_dict_in_generate=True, logits_hook=look)
    with pytest.raises(InvalidInputError, match="negative"):
        dlm.edit(text, [(at, at + 2, -1)], logits_hook=look)
    assert not seen


# -- score ------------------------------------------------------------------------------------------------------------


def test_score_is_exact_where_nothing_is_random(model):
    """One-token blocks with shift 1: the model's own autoregressive likelihood."""
    dlm = lm(model, attention="causal", shift=1, block_size=1)
    ids = prompt(9)
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double()
    logits[:, MASK] = -torch.inf
    want = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[2:].sum()
    out = dlm.score(ids, 3, samples=5)
    assert out.bound[0].item() == pytest.approx(float(want), abs=1e-4)
    assert out.stderr[0] == 0 and out.tokens.tolist() == [6]


def test_score_is_within_its_interval_of_the_exact_value_on_a_toy():
    """Exact conditionals give the same likelihood in every order, so the bound is tight: log p itself."""
    joint = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(3)) + 0.2
    joint = joint / joint.sum()
    dlm = DiffusionLM(Table(joint), spec(mask_id=3, pad_id=0))
    for code in (0, 13, 22):
        text = torch.tensor([[0, code // 9, code // 3 % 3, code % 3]])
        out = dlm.score(text, 1, samples=400, seed=code, batch_size=50)
        want = math.log(joint[tuple(text[0, 1:].tolist())])
        assert abs(out.bound[0] - want) < 5 * out.stderr[0] + 1e-6
        assert out.stderr[0] < 0.2


def test_orders_have_the_same_likelihood_on_an_exact_toy():
    joint = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(4))
    joint = joint / joint.sum()
    table = Table(joint)
    text = [2, 0, 1]
    for order in itertools.permutations(range(3)):
        total, known = 0.0, [3, 3, 3]
        for place in order:
            batch = type("B", (), {})()
            batch.ids = torch.tensor([known])
            batch.want = torch.zeros(1, 3, dtype=torch.bool)
            batch.want[0, place] = True
            total += float(table.logits(batch)[0, 0, text[place]])
            known[place] = text[place]
        assert total == pytest.approx(math.log(joint[tuple(text)]), abs=1e-5)


def test_score_of_block_models_and_padding(model):
    dlm = lm(model, **BLOCK)
    rows = [prompt(7)[0], prompt(10, 2)[0]]
    ids, mask = left_padded(rows)
    both = dlm.score(ids, torch.tensor([3 + 2, 2]), mask, samples=8, seed=[1, 2])
    for i, (row, p) in enumerate(zip(rows, (2, 2), strict=True)):
        solo = dlm.score(row[None], p, samples=8, seed=[1 + i])
        assert both.bound[i] == pytest.approx(float(solo.bound[0]), abs=1e-3)
    with pytest.raises(InvalidInputError):
        dlm.score(ids, 10, mask)


# -- ReMDM's formulas, D3PM-type posteriors ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cap", "rescale", "loop"])
def test_remdm_keeps_the_expected_share_of_masks(kind):
    """sigma within its bound, and (1 - alpha_t)(1 - unmask) + alpha_t sigma = 1 - alpha_s at every step."""
    policy = ReMDM(kind=kind, steps=40)
    grid = torch.linspace(1, 0, 41, dtype=torch.float64)
    settled, confidence = torch.ones(1, 4, dtype=torch.bool), torch.full((1, 4), 0.7)
    held = 0
    for t, s in itertools.pairwise(grid):
        sigma, unmask = policy.rates(t[None], s[None], confidence, settled)
        a_t, a_s = policy.alpha(t[None]), policy.alpha(s[None])
        bound = ((1 - a_s) / a_t.clamp(min=1e-12)).clamp(max=1)
        assert (sigma <= bound + 1e-12).all() and (unmask >= 0).all() and (unmask <= 1).all()
        share = (1 - a_t) * (1 - unmask[0, 0]) + a_t * sigma[0, 0]
        assert share.item() == pytest.approx(float(1 - a_s), abs=1e-9)
        held += kind == "loop" and float(a_t) == 0.9 and float(sigma.max()) > 0
    assert float(policy.alpha(grid[-1:])) == pytest.approx(1.0)
    assert (held > 10) == (kind == "loop")


def test_remdm_conf_spreads_the_bound_over_the_least_confident():
    policy = ReMDM(kind="conf", steps=10)
    t, s = torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.4], dtype=torch.float64)
    confidence = torch.tensor([[0.9, 0.1, 0.5, 0.0]])
    settled = torch.tensor([[True, True, True, False]])
    sigma, unmask = policy.rates(t, s, confidence, settled)
    want = torch.softmax(-confidence[0, :3].double(), 0) * min(1.0, 0.4 / 0.5)
    assert torch.allclose(sigma[0, :3], want) and sigma[0, 3] == 0
    assert unmask[0, 3].item() == pytest.approx((0.6 - 0.5) / 0.5)


def test_absorbing_posterior_on_a_toy(model):
    """Masked share after each grid step of the ancestral sampler is binomial with mean 1 - alpha."""
    rows, steps = 500, 4
    out = lm(model).generate(
        prompt(3).repeat(rows, 1),
        max_new_tokens=5,
        policy="ancestral",
        steps=steps,
        seed=2,
        return_dict_in_generate=True,
    )
    assert max(out.stats.nfe) <= steps and min(out.stats.nfe) >= 1
    # a grid step needs a pass only if it decides something: expected passes = sum over steps of 1 - (1 - 1/4)^5
    want = steps * (1 - (1 - 1 / steps) ** 5)
    got = sum(out.stats.nfe) / rows
    assert got == pytest.approx(want, abs=4 * 0.8 / math.sqrt(rows))
