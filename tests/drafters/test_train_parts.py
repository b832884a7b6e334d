"""The trainer's parts: corpus files, features, vocabulary, losses, regeneration, overlap, several processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from devdata import dev_data

from specdiff.drafters.train.corpus import Document, expand, read_shard, write_shard
from specdiff.drafters.train.data import Corpus, held_out
from specdiff.drafters.train.evaluate import replay
from specdiff.drafters.train.features import FeatureShard, extract
from specdiff.drafters.train.generate import Answer, Generator, Lane, draw, pass_width, refill
from specdiff.drafters.train.initialise import default_taps
from specdiff.drafters.train.losses import decay_weights, dpace_weights
from specdiff.drafters.train.optim import Average, schedule
from specdiff.drafters.train.overlap import N, shared
from specdiff.drafters.train.regenerate import Recipe, Template, read_prompts, regenerate
from specdiff.drafters.train.vocabulary import choose_vocabulary
from specdiff.errors import FormatError, InvalidInputError


def documents(count: int = 6, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [
        Document(rng.integers(4, tiny.VOCAB, rng.integers(6, 15)), 3, f"s{i % 2}", float(i % 2), f"k/{i}")
        for i in range(count)
    ]


def test_shards_round_trip(tmp_path):
    made = documents()
    write_shard(tmp_path / "a.npz", made)
    read = read_shard(tmp_path / "a.npz")
    assert [d.ids.tolist() for d in read] == [d.ids.tolist() for d in made]
    want = [(3, f"s{i % 2}", float(i % 2)) for i in range(6)]
    assert [(d.prompt_length, d.source, d.temperature) for d in read] == want
    write_shard(tmp_path / "b.npz", [Document(np.array([5, 70000]), 1)])
    assert read_shard(tmp_path / "b.npz")[0].ids.tolist() == [5, 70000]
    assert expand([str(tmp_path), str(tmp_path / "a*.npz")]) == [tmp_path / "a.npz", tmp_path / "b.npz"]
    with pytest.raises(InvalidInputError, match="no such corpus"):
        expand([str(tmp_path / "c.npz")])
    np.savez(tmp_path / "bad.npz", flat=np.arange(5), lens=np.array([3]), plen=np.array([1]))
    with pytest.raises(FormatError, match="do not fit"):
        read_shard(tmp_path / "bad.npz")
    np.savez(tmp_path / "bad.npz", flat=np.arange(5))
    with pytest.raises(FormatError, match="'lens', 'plen'"):
        read_shard(tmp_path / "bad.npz")


def test_features_are_the_targets_own(tmp_path):
    """Batched, padded, memory-mapped: still what the stock model says of each document alone."""
    model, made = tiny.target(), documents()
    extract(model, made, tmp_path / "f", [0, 2, 3], top=5, batch_tokens=30)
    shard = FeatureShard(tmp_path / "f", made, [2, 0])
    for i, document in enumerate(made):
        ids = torch.from_numpy(document.ids)[None]
        item = shard[i]
        want = tiny.taps_of(model, ids, (2, 0))[0]
        np.testing.assert_allclose(item.taps.reshape(len(document), -1), want.half().numpy(), atol=2e-2, rtol=2e-2)
        with torch.no_grad():
            law = model(ids).logits[0].log_softmax(-1).topk(5, -1)
        assert item.top_ids[:, 0].tolist() == law.indices[:, 0].tolist()
        np.testing.assert_allclose(item.top_logprobs, law.values.numpy(), atol=2e-2)
    with pytest.raises(FormatError, match="not stored"):
        FeatureShard(tmp_path / "f", made, [1])
    with pytest.raises(FormatError, match="another version"):
        FeatureShard(tmp_path / "f", made[:-1])
    with pytest.raises(InvalidInputError, match="taps"):
        extract(model, made, tmp_path / "g", [4])


def test_new_shards_are_taken_in_and_the_split_is_stable(tmp_path):
    model = tiny.target()
    write_shard(tmp_path / "a.npz", documents(40))
    corpus = Corpus([str(tmp_path / "*.npz")], tmp_path / "f", (0, 2), top=4, share=0.25, model=model)
    assert corpus.rescan() == 1 and corpus.rescan() == 0
    held = {s.documents[i].key for s, i in corpus.held}
    assert 3 <= len(held) <= 20 and len(corpus.train) == 40 - len(held)
    write_shard(tmp_path / "b.npz", documents(40))  # copies: held out in both shards or in none
    assert corpus.rescan() == 1
    assert len(corpus.held) == 2 * len(held)
    batches = list(corpus.epoch(4, 3, 2, np.random.default_rng(0)))
    assert len(batches) == -(-len(corpus.train) // 4)
    ranks = [list(corpus.epoch(2, 3, 2, np.random.default_rng(0), r, 2)) for r in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == -(-len(corpus.train) // 4)
    first = [{tuple(row) for b in rank for row in b.ids.tolist()} for rank in ranks]
    assert first[0] != first[1]
    assert held_out(documents(1)[0], 1.0) and not held_out(documents(1)[0], 0.0)


def test_batches_hold_what_follows_each_anchor(tmp_path):
    model, made = tiny.target(), documents(8)
    write_shard(tmp_path / "a.npz", made)
    corpus = Corpus([str(tmp_path)], tmp_path / "f", (0,), top=4, share=0.0, model=model)
    corpus.rescan()
    for batch in corpus.epoch(4, 6, 3, np.random.default_rng(0)):
        for row in range(4):
            n = int(batch.valid[row].sum())
            for a, at in enumerate(batch.anchors[row].tolist()):
                assert 3 <= at <= n - 2
                for k in range(3):
                    exists = at + 1 + k < n
                    assert bool(batch.present[row, a, k]) == exists
                    if exists:
                        assert batch.tokens[row, a, k] == batch.ids[row, at + 1 + k]
                        with torch.no_grad():
                            law = model(batch.ids[row : row + 1, : at + 1 + k]).logits[0, -1].softmax(-1)
                        assert batch.target_ids[row, a, k, 0] == law.argmax()
                        assert abs(float(batch.target_probs[row, a, k, 0] - law.max())) < 0.02


def test_vocabulary_keeps_what_is_written():
    made = [Document(np.array([9, 9, 30, 30, 30, 31]), 2), Document(np.array([8, 40, 40]), 1)]
    ids = choose_vocabulary(made, tiny.VOCAB, 3)
    assert ids.tolist() == [30, 31, 40]
    assert choose_vocabulary(made, tiny.VOCAB, 5).tolist() == [0, 1, 30, 31, 40], "unseen: the smallest ids first"
    assert choose_vocabulary(made, tiny.VOCAB, 6).tolist() == [0, 1, 9, 30, 31, 40], "prompts count a little"
    assert len(choose_vocabulary(made, tiny.VOCAB, 999)) == tiny.VOCAB


def test_weights_by_hand():
    torch.testing.assert_close(decay_weights(3, 4.0), torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5)]))
    weights = dpace_weights(torch.tensor([1.0, 0.0, 0.5]), floor=0.5)
    q = [1.0, 0.5, 0.75]
    reach = [q[0], q[0] * q[1], q[0] * q[1] * q[2]]
    torch.testing.assert_close(weights, torch.tensor([sum(reach), sum(reach[1:]), reach[2]]))
    assert schedule(0.0, 0.1) < 0.01 and schedule(0.1, 0.1) == 1.0 and schedule(1.0, 0.1) == pytest.approx(0.02)
    assert default_taps(30, 5) == (1, 8, 14, 20, 27) and default_taps(30, 1) == (15,)


def test_average_moves_and_swaps():
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(0.0)
    average = Average(layer, 0.9)
    layer.weight.data.fill_(1.0)
    average.update(layer)
    assert float(average.values["weight"][0, 0]) == pytest.approx(9 / 11)
    average.swap(layer)
    assert float(layer.weight.detach()[0, 0]) == pytest.approx(9 / 11)
    average.swap(layer)
    assert float(layer.weight.detach()[0, 0]) == 1.0


def test_replay():
    assert replay([2, 0, 0, 1, 0]) == (5, 2)
    assert replay([0, 0, 0]) == (3, 3)


def test_overlap_is_found():
    text = list(range(40))
    assert shared([text[5:20], text[5:17], [*range(100, 120)]], [text], n=13) == [0]
    assert shared([text[:20]], [text], boilerplate=[text[:21]], n=13) == []


CORPUS = Path(__file__).parents[2] / "corpus"
SHIPPED = sorted(path.name for path in CORPUS.glob("*") if path.suffix in (".npz", ".jsonl"))


def windows(texts: list[np.ndarray]) -> dict[bytes, int]:
    """Every n-gram of ids below 65536, as bytes, with a text that it stands in."""
    found: dict[bytes, int] = {}
    for number, text in enumerate(texts):
        raw = text.astype(np.uint16).tobytes()
        found.update(dict.fromkeys((raw[i : i + 2 * N] for i in range(0, len(raw) - 2 * N + 1, 2)), number))
    return found


@pytest.fixture(scope="module")
def dev_ngrams():
    """N-grams of the development prompts, those of the template left out; and how to read a text."""
    data = dev_data()
    if data is None:
        pytest.skip("no development data beside this checkout")
    from transformers import AutoTokenizer

    from specdiff.hub.default import ensure_default

    tokenizer = AutoTokenizer.from_pretrained(ensure_default())

    def ids(text: str) -> np.ndarray:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    lines = (data / "spec_bench_dev.jsonl").read_text(encoding="utf-8").strip().split("\n")
    template = Template.of(tokenizer)
    usual = windows([np.array(part) for part in (template.before, template.after)])
    turns = [ids(turn) for line in lines for turn in json.loads(line)["turns"]]
    return windows(turns).keys() - usual.keys(), ids, turns


def overlapping(texts: list[np.ndarray], taboo: set[bytes]) -> list[int]:
    found = windows(texts)
    return sorted({found[gram] for gram in taboo & found.keys()})


@pytest.mark.parametrize("name", SHIPPED)
def test_no_dev_prompt_in_the_training_text(name, dev_ngrams):
    """The 13-gram check on the real thing: every document of every file that is shipped, whole."""
    taboo, ids, turns = dev_ngrams
    if name.endswith(".npz"):
        trained = [d.ids for d in read_shard(CORPUS / name)]
    else:
        trained = [ids(text) for text, _ in read_prompts(CORPUS / name)]
    assert len(trained) > 100 and len(taboo) > 10_000 and max(int(t.max()) for t in trained) < 2**16
    assert overlapping(trained, taboo) == []
    planted = [*trained, np.concatenate([trained[0], max(turns, key=len)])]
    assert overlapping(planted, taboo) == [len(trained)], "a prompt among them is found"


def test_windows_find_what_the_trainer_finds():
    rng = np.random.default_rng(0)
    texts, held = ([rng.integers(0, 2, 40) for _ in range(30)] for _ in range(2))
    assert 0 < len(overlapping(texts, windows(held).keys())) < 30
    assert overlapping(texts, windows(held).keys()) == shared(texts, held)


# regeneration -------------------------------------------------------------------------------------------------------


def test_pass_width():
    assert pass_width([30, 30, 30]) == 30
    assert pass_width([1, 1, 1, 40]) <= 2
    assert pass_width([1, 1]) == 1 and pass_width([0, 7, 0]) == 7


def generator(model, lanes: int, ends=(), **traces) -> Generator:
    from specdiff.target import Target

    target = Target(model)
    return Generator(target.open, ends, target.device, lanes, **traces)


def test_continuous_generation_equals_generate():
    """Greedy: every text is that of plain generate, whatever lane and neighbours it had."""
    model = tiny.target()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, tiny.VOCAB, n).tolist() for n in (3, 9, 5, 14, 4, 6, 8)]
    wants = [tiny.greedy(model, torch.tensor([p]), 12)[0, len(p) :].tolist() for p in prompts]
    end = wants[2][4]
    got = {a.prompt: a.ids for a in generator(model, 3, [end])(prompts, [0.0] * 7, 12, 0)}
    assert sorted(got) == list(range(7))
    for i, want in enumerate(wants):
        cut = want.index(end) + 1 if end in want else 12
        assert got[i] == want[:cut]


def test_shared_starts_are_kept_and_traces_are_the_targets_own(tmp_path):
    """Prompts with a common start in few lanes: the same texts, and features equal to those of a pass over each."""
    model = tiny.target()
    rng = np.random.default_rng(1)
    start = rng.integers(4, tiny.VOCAB, 9).tolist()
    prompts = [start[:cut] + rng.integers(4, tiny.VOCAB, 3).tolist() for cut in (9, 0, 9, 4, 9)]
    fed: list[int] = []
    make = generator(model, 2, taps=(0, 2), top=5)
    inner = make.open_state

    def counted(*args):
        state = inner(*args)
        forward = state.forward

        def noted(tokens, counts, head):
            fed.append(int(counts.sum()))
            return forward(tokens, counts, head=head)

        state.forward = noted
        return state

    make.open_state = counted
    answers = {a.prompt: a for a in make(prompts, [0.0] * 5, 6, 0)}
    documents = [Document(np.array(p + answers[i].ids), len(p)) for i, p in enumerate(prompts)]
    for i, prompt in enumerate(prompts):
        assert answers[i].ids == tiny.greedy(model, torch.tensor([prompt]), 6)[0, len(prompt) :].tolist()
    assert sum(fed) < sum(len(p) + 6 for p in prompts) - 9, "at least one start was computed once only"
    extract(model, documents, tmp_path / "f", [0, 2], top=5)
    shard = FeatureShard(tmp_path / "f", documents)
    for i, document in enumerate(documents):
        want, got, cut = shard[i], answers[i].trace, document.prompt_length
        assert got is not None and got.taps.shape == (len(document), 2 * tiny.target().config.hidden_size)
        flat = want.taps.reshape(len(document), -1)
        np.testing.assert_allclose(got.taps[:-1], flat[:-1], atol=2e-2, rtol=2e-2)
        assert not got.taps[-1].any(), "the last token was never fed"
        answered = slice(cut - 1, len(document) - 1)
        assert got.top_ids[answered, 0].tolist() == want.top_ids[answered, 0].tolist() == answers[i].ids
        np.testing.assert_allclose(got.top_logprobs[answered], want.top_logprobs[answered], atol=2e-2)
        assert (np.exp(got.top_logprobs[: cut - 1].astype(np.float32)) == 0).all()


def test_refill_prefers_what_the_lane_holds():
    lane, queue = Lane(fed=[1, 2, 3, 9]), [0, 1, 2]
    assert refill(lane, [[5, 6], [1, 2, 3], [1, 2, 4]], queue) == 2, "one id is left to feed"
    assert lane.owner == 1 and queue == [0, 2]
    assert refill(Lane(), [[5]], []) == 0


def test_draw_mixes_greedy_and_sampled_rows():
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(4000, -1)
    heat = torch.tensor([0.0, 1.0]).repeat(2000)
    drawn = draw(logits, heat, 2, torch.Generator().manual_seed(0))
    assert set(drawn[::2].tolist()) == {1}
    share = float((drawn[1::2] == 2).float().mean())
    assert share == pytest.approx(1 / (1 + math.exp(2.0)), abs=0.03)
    assert 0 not in drawn.tolist()


class Words:
    """A tokenizer with one id per character and a chat template."""

    chat_template = "x"

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "<" + chat[0]["content"] + ">"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) % tiny.VOCAB for c in text]}


def test_regenerate_makes_chats():
    """Own prompts end at the template's next token; the others come from the list; heats follow the recipe."""
    calls = []
    after = ord(">") % tiny.VOCAB

    def generate(prompts, heats, limit, seed):
        calls.append((prompts, heats, limit))
        for i, _ in enumerate(prompts):
            if limit == 7:  # the user's turn
                yield Answer(i, [9] * 10 + [after] if i % 2 else [9] * 12)
            else:
                yield Answer(i, [20, 21, 2])

    made: list[Document] = []
    recipe = Recipe(own_share=0.5, own_prompt_tokens=7, max_new_tokens=5, max_prompt_tokens=20)

    def keep(document: Document, trace: object) -> None:
        assert trace is None
        made.append(document)

    count = regenerate(generate, Words(), [("hello", "list"), ("x" * 40, "long")], 8, recipe, keep)
    assert count == len(made) == 8
    assert calls[0][0] == [[ord("<") % tiny.VOCAB]] * 4
    assert sorted(d.source for d in made) == ["list"] * 6 + ["magpie"] * 2
    for d in made:
        assert d.ids[-3:].tolist() == [20, 21, 2] and d.prompt_length == len(d.ids) - 3
        assert d.ids[0] == ord("<") % tiny.VOCAB and d.ids[d.prompt_length - 1] == after
        assert d.temperature in recipe.temperatures
    with pytest.raises(InvalidInputError, match="longer than"):
        regenerate(generate, Words(), [("x" * 40, "long")], 2, recipe, keep)


def test_prompt_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "source": "s"}\n\n{"turns": ["b", "c"]}\n')
    assert read_prompts(path) == [("a", "s"), ("b", "")]
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_prompts(path) == [("a\u2028b", "")], "only a line feed ends a line"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(FormatError, match="line 2"):
        read_prompts(path)
    path.write_text("{")
    with pytest.raises(FormatError, match="line 1: not JSON"):
        read_prompts(path)


# processes and command ------------------------------------------------------------------------------------------------

WORKER = """
import sys
sys.path.insert(0, {here!r})
import json, pathlib, torch, tiny
from specdiff.drafters.train.build import Shape
from specdiff.drafters.train.pipeline import Plan, run
from specdiff.drafters.train.loop import TrainConfig
torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
plan = Plan(
    data=[str(folder / "data")], folder=folder / "run",
    shape=Shape(block_size=3, layers=1, taps=(0, 2), vocabulary=0, window=2),
    config=TrainConfig(max_steps=8, rows=2, anchors=8, optimizer="adamw", mixed_precision="no", evaluate_every=1e9),
    held_out=0.3, top=8, served_prompts=0,
)
outcome = run(tiny.target(), plan)
state = outcome.drafter.model.state_dict()
from accelerate import PartialState
rank = PartialState().process_index
total = float(sum(v.double().abs().sum() for v in state.values()))
facts = dict(step=outcome.state.step, anchors=outcome.state.anchors, total=total)
(folder / f"rank{{rank}}.json").write_text(json.dumps(facts))
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The same pipeline as two gloo processes (what ``accelerate launch`` starts on GPUs): equal weights, twice the
    anchors."""
    tiny.write_greedy_corpus(tmp_path / "data", tiny.target(), 24, new=16)
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(here=str(Path(__file__).parent)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(script), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["step"] == 8 and ranks[0]["anchors"] == 8 * 2 * 2 * 8


def test_command(tmp_path, tiny_folder, capsys):
    """``specdiff train`` from prompts to a drafter that loads, on a tiny model, in one command."""
    from transformers import AutoModelForCausalLM

    from specdiff.cli import main
    from specdiff.drafters.loading import load

    (tmp_path / "p.jsonl").write_text('{"prompt": "hello there"}\n{"prompt": "one two three"}\n')
    where = ["--data", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "run")]
    options = "--chats 12 --own-share 0 --new-tokens 16 --max-steps 4 --rows 2 --anchors 4 --held-out 0.3"
    options += " --serve-prompts 1 --precision no --vocabulary 0"
    arguments = ["train", str(tiny_folder), *where, *options.split()]
    assert main(arguments) == 0
    assert f"drafter: {tmp_path / 'run' / 'drafter'}" in capsys.readouterr().out
    shards = list((tmp_path / "run" / "features").glob("own-*/taps.npy"))
    assert len(shards) == 1, "kept while the text was generated"
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    assert load(tmp_path / "run" / "drafter", model).block_size == 4
    assert main(["train", str(tiny_folder), *where]) != 0, "no budget"

    more = ["train", str(tiny_folder), "--data", str(tmp_path / "run" / "corpus"), "--out", str(tmp_path / "more")]
    more += ["--rows", "2", "--anchors", "4", "--serve-prompts", "0", "--precision", "no", "--max-steps", "2"]
    more += ["--from", str(tmp_path / "run" / "drafter"), "--block-size", "3"]
    assert main(more) == 0
    assert load(tmp_path / "more" / "drafter", model).block_size == 3
    capsys.readouterr()
    assert main([*more, "--layers", "2"]) != 0, "the drafter has its shape"
    assert "leave out --layers" in capsys.readouterr().err


def test_a_drafter_is_continued_with_another_block_size(tmp_path):
    """Fewer slots: the first ones as they were. More: the new ones start as the last."""
    from specdiff.drafters.train.build import Shape, build, continued

    model = tiny.target()
    write_shard(tmp_path / "a.npz", documents(8))
    shape = Shape(block_size=3, layers=1, taps=(0, 2), vocabulary=0, window=2)
    corpus = Corpus([str(tmp_path)], tmp_path / "f", (0, 2), top=4, share=0.0, model=model)
    corpus.rescan()
    build(model, corpus, shape).save_pretrained(tmp_path / "d", dtype=None)
    same = continued(str(tmp_path / "d"), model)
    assert same.block_size == 3 and same.bound
    for slots in (2, 5):
        other = continued(str(tmp_path / "d"), model, slots)
        assert other.block_size == slots and other.bound
        mine, theirs = other.model.state_dict(), same.model.state_dict()
        for name, value in theirs.items():
            if "slot" in name or "gain" in name:
                assert torch.equal(mine[name], value[[min(k, 2) for k in range(slots)]])
            else:
                assert torch.equal(mine[name], value), name
    with pytest.raises(InvalidInputError, match="no block-diffusion drafter"):
        continued("lookup", model)


def test_precision_is_the_faster_one(monkeypatch):
    from specdiff.drafters.train import precision

    cpu = torch.device("cpu")
    for faster, want in ((torch.float32, "no"), (torch.bfloat16, "bf16")):
        monkeypatch.setattr(precision, "seconds", lambda dtype, device, faster=faster: 1.0 if dtype == faster else 2.0)
        assert precision.choose("auto", cpu) == want
        assert precision.choose("no", cpu) == "no" and precision.choose("bf16", cpu) == "bf16"
    monkeypatch.undo()
    assert precision.seconds(torch.float32, cpu) > 0
