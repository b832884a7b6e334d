"""Training on tiny models: B52 (no leak), B53 (training and serving agree), a run from nothing."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdiff import SpecDiff
from specdiff.cli import main
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.loading import load
from specdiff.drafters.train.batches import collate, draw_anchors
from specdiff.drafters.train.build import Shape, build
from specdiff.drafters.train.corpus import Document, write_shard
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.evaluate import accepted_lengths, evaluate, greedy_block
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.pipeline import Plan, run
from specdiff.drafters.train.step import BlockObjective, LossConfig
from specdiff.drafters.train.trainer import Trainer

QUICK = {
    "mixed_precision": "no",
    "lr": 5e-3,
    "average": 0.0,
    "evaluate_every": 1e9,
    "optimizer": "adamw",
    "warmup": 0.05,
}


def corpus_of(folder, model, shape: Shape, share: float = 0.0) -> Corpus:
    corpus = Corpus([str(folder)], folder / "features", shape.tap_ids(model), top=8, share=share, model=model)
    corpus.rescan()
    return corpus


def served(model, drafter, prompts, new: int):
    """Accepted tokens per full round, greedy, and the text."""
    out = SpecDiff(model, drafter).generate(
        prompts,
        attention_mask=(prompts != 0).long(),
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return out


SHAPES = {
    "plain": Shape(block_size=4, layers=2, taps=(0, 2), vocabulary=0, plain=True, mask_token_id=3),
    "late": Shape(block_size=4, layers=1, taps=(0, 2), vocabulary=0, window=2),
}


def replayed(drafter: DFlashDrafter, items, cut: bool = True) -> tuple[float, list[float]]:
    """Tau and acceptance by position of serving these greedy texts, replayed by the training path alone.

    ``cut``: slots past a text's end count as drafted and not accepted, as ``result.json`` has it.
    """
    proposed, accepted = np.zeros((2, drafter.block_size))
    tokens = rounds = 0
    for item in items:
        lengths = accepted_lengths(drafter, item, drafter.block_size, torch.device("cpu")).tolist()
        at = 0
        while at < len(lengths):
            limit = min(drafter.block_size, len(lengths) - 1 - at)  # a text's last token is the target's own
            kept = min(lengths[at], limit)
            proposed[: drafter.block_size if cut else limit] += 1
            accepted[:kept] += 1
            at, rounds = at + kept + 1, rounds + 1
        tokens += len(lengths)
    return tokens / rounds, (accepted / proposed).tolist()


@pytest.mark.parametrize(("shape", "tied"), [("plain", False), ("plain", True), ("late", True), ("late", False)])
def test_b53_overfitted_drafter_serves_what_it_learned(tmp_path, shape, tied):
    """Four of the target's own greedy texts learned by heart: nearly whole blocks accepted when served, from any prompt
    length, in a padded batch, and after save and load."""
    model = tiny.target(tied=tied)
    documents = tiny.write_greedy_corpus(tmp_path, model, 4, new=36)
    kind = SHAPES[shape]
    corpus = corpus_of(tmp_path, model, kind)
    drafter = build(model, corpus, kind)
    last: dict[str, list[float]] = {}
    config = TrainConfig(max_steps=260, rows=4, anchors=24, loss=LossConfig(gamma=8.0, hard=0.5), **QUICK)
    trainer = Trainer(drafter, corpus, config, tmp_path / "run", lambda state, info: last.update(info))
    trainer.train()
    assert min(last["accuracy"]) > 0.99, last["accuracy"]

    items = [s[i] for s, i in corpus.train]
    trained = evaluate(drafter, items)
    assert trained.by_position[0] > 0.97

    prompts = torch.tensor(np.stack([d.ids[: d.prompt_length] for d in documents]))
    want = torch.tensor(np.stack([d.ids for d in documents]))
    batch = served(model, drafter, prompts, 36)
    assert batch.sequences.tolist() == want.tolist()
    tau, by_position = replayed(drafter, items, cut=False)
    assert batch.stats.tau == pytest.approx(tau, rel=0.02)
    assert batch.stats.acceptance_by_position == pytest.approx(by_position, abs=0.03)
    learned = np.cumprod(last["accuracy"]) - 0.03
    assert all(np.array(batch.stats.acceptance_by_position) > learned), "what the training loop said it knows"
    assert batch.stats.tau > 4.0, "K = 4: nearly whole blocks"

    longer = [torch.tensor(d.ids[None, : 4 + cut]) for cut, d in zip((0, 1, 6, 9), documents, strict=True)]
    width = max(p.shape[1] for p in longer)
    padded = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in longer])
    mixed = served(model, drafter, padded, 20)
    assert mixed.stats.tau > 3.5
    for row, document in zip(mixed.sequences, documents, strict=True):
        text = row[row != 0].tolist() if 0 not in document.ids else row.tolist()
        assert text == document.ids[: len(text)].tolist()

    drafter.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", model)
    reloaded = served(model, again, prompts, 36)
    assert reloaded.stats.emitted == batch.stats.emitted


def as_text(corpus: Corpus) -> None:
    """Make the document's own next token the training target (the target model's opinion of noise is learnable)."""
    for shard in corpus.shards.values():
        following = np.concatenate([np.append(d.ids[1:], 0) for d in shard.documents])
        shard._ids = np.tile(following[:, None], (1, 8))
        shard._logprobs = np.concatenate([np.zeros((len(following), 1)), np.full((len(following), 7), -100.0)], 1)


def hits_by_slot(drafter: DFlashDrafter, items) -> tuple[torch.Tensor, torch.Tensor]:
    """Right tokens and all tokens of every slot, by the trainer's own evaluation, whatever the slots before it drew."""
    hits, count = torch.zeros(drafter.block_size), torch.zeros(drafter.block_size)
    for item in items:
        batch = collate([item], [draw_anchors(item, 0, None)], drafter.block_size)
        features = drafter.model.tap_features(batch.taps.float())
        with torch.no_grad():
            states = drafter.states(
                features, batch.anchors, batch.ids.gather(1, batch.anchors), drafter.block_size, batch.valid
            )
            right = greedy_block(drafter, states) == batch.tokens
        hits += (right & batch.present).sum((0, 1))
        count += batch.present.sum((0, 1))
    return hits, count


NOISE_SHAPES = {
    "plain": Shape(8, layers=1, taps=(0,), vocabulary=0, plain=True, mask_token_id=3, init="random"),
    "late": Shape(8, layers=1, taps=(0, 2), vocabulary=0, window=2),
}


@pytest.mark.parametrize("leak", [False, True], ids=["as it is", "control"])
@pytest.mark.parametrize(("anchors", "rows"), [(1, 96), (4, 32), (46, 10)])
@pytest.mark.parametrize("shape", NOISE_SHAPES)
def test_b52_random_tokens_stay_at_chance(tmp_path, monkeypatch, shape, anchors, rows, leak):
    """Nothing to learn in independent uniform tokens: accuracy above chance, at any slot of held-out text, is a leak
    through the block mask. The control sees states two positions further on, so that each block's first answer is
    among them: the very same training notices."""
    model = tiny.target(spread=0.2)
    rng = np.random.default_rng(0)
    write_shard(tmp_path / "random.npz", [Document(rng.integers(0, tiny.VOCAB, 12), 2) for _ in range(600)])
    kind = NOISE_SHAPES[shape]
    corpus = corpus_of(tmp_path, model, kind, share=0.2)
    as_text(corpus)
    drafter = build(model, corpus, kind)
    if leak:
        honest = drafter.states
        monkeypatch.setattr(drafter, "states", lambda taps, *rest: honest(torch.roll(taps, -2, 1), *rest))
    options = QUICK | {"optimizer": "muon", "muon_lr": 0.02, "lr": 1e-2}
    config = TrainConfig(max_steps=100, rows=rows, anchors=anchors, loss=LossConfig(gamma=1.0, hard=1.0), **options)
    Trainer(drafter, corpus, config, tmp_path / "run").train()
    hits, count = hits_by_slot(drafter, [s[i] for s, i in corpus.held])
    assert count.min() > 150
    chance = 1 / tiny.VOCAB
    limit = chance + 4 * (chance / count).sqrt()
    if leak:
        assert hits[0] / count[0] > 1.5 * limit[0], "the leak is far beyond the limit"
    else:
        assert bool((hits / count < limit).all()), (hits, count)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_blocks_see_nothing_they_should_not(variant):
    """Changing a document from some position on changes no block that starts before it (teacher forcing aside)."""
    model = tiny.target()
    drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
    ids = torch.randint(4, tiny.VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 11:] = (other[:, 11:] + 7) % tiny.VOCAB
    anchors = torch.tensor([[3, 7, 10, 11, 12]])
    states = []
    for text in (ids, other):
        features = drafter.model.tap_features(tiny.taps_of(model, text, drafter.taps))
        with torch.no_grad():
            states.append(drafter.states(features, anchors, text.gather(1, anchors), 4))
    torch.testing.assert_close(states[0][:, :3], states[1][:, :3], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(states[0][:, 3:], states[1][:, 3:], atol=1e-3)


def test_run_from_nothing(tmp_path, tiny_folder, capsys):
    """The command, from prompts to a drafter: text, states, training, evaluation and card. What it says that serving
    accepts, position by position, is what the training path accepts on the same prompts and tokens."""
    began = time.monotonic()
    shutil.copytree(tiny_folder, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # as it is, its texts are one word, and no state matters
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(tmp_path / "model")
    words = ("one", "two", "three", "four", "five", "six", "seven", "red", "green", "blue", "sun", "moon")
    rng = np.random.default_rng(0)
    prompts = "".join(json.dumps({"prompt": " ".join(rng.choice(words, 3))}) + "\n" for _ in range(150))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    options = (
        "--chats 150 --own-share 0 --new-tokens 96 --held-out 0.3 --serve-prompts 99 --vocabulary 0 --precision no"
    )
    options += " --max-steps 120 --rows 8 --anchors 24 --lr 3e-3 --average 0.9 --optimizer adamw"
    run = tmp_path / "run"
    where = ["--data", str(tmp_path / "prompts.jsonl"), "--out", str(run)]
    assert main(["train", str(tmp_path / "model"), *where, *options.split()]) == 0
    assert time.monotonic() - began < 180
    assert "served greedy tau, drafter" in capsys.readouterr().out

    result = json.loads((run / "result.json").read_text())
    served, lookup = result["served"]["drafter"], result["served"]["prompt lookup"]
    assert result["state"]["step"] == 120
    drafter = load(run / "drafter", model)
    corpus = Corpus([str(run / "corpus")], run / "features", drafter.taps, top=32, share=0.3, model=model)
    corpus.rescan()
    items = corpus.evaluation_items(48)
    assert len(items) > 15
    tau, shares = replayed(drafter, items)
    assert served["tau"] == pytest.approx(tau, rel=0.01)
    assert served["by_position"] == pytest.approx(shares, abs=0.02), "near-ties apart they are the same rounds"
    assert 1.5 < served["tau"] < 4.8 and lookup["tau"] < 4.8, "something was learned, and it was not trivial"
    card = (run / "drafter" / "README.md").read_text()
    assert "held-out greedy tau" in card and "served greedy tau" in card
    assert json.loads((run / "log.jsonl").read_text().splitlines()[-1])["step"] == 120


def test_served_acceptance_equals_replay(tmp_path):
    """On one held-out greedy text the replayed rounds are the served rounds, one by one."""
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path, model, 12, new=30)
    kind = SHAPES["late"]
    corpus = corpus_of(tmp_path, model, kind)
    drafter = build(model, corpus, kind)
    Trainer(drafter, corpus, TrainConfig(max_steps=40, rows=4, anchors=16, **QUICK), tmp_path / "run").train()
    for shard, i in corpus.train[:6]:
        item = shard[i]
        lengths = accepted_lengths(drafter, item, 4, torch.device("cpu")).tolist()
        want, at = [], 0
        while at < len(lengths):
            want.append(min(lengths[at], len(lengths) - at) + 1)
            at += lengths[at] + 1
        prompt = torch.tensor(item.document.ids[None, :4])
        out = served(model, drafter, prompt, 30)
        got = out.stats.emitted[0][1:]
        assert got[:-1] == want[: len(got) - 1], (got, want)


def test_resume_continues(tmp_path):
    """A run that stopped goes on from its step, with the same optimiser state and budget."""
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path, model, 10)
    kind = SHAPES["late"]

    def trainer(steps: int, folder: str) -> Trainer:
        corpus = corpus_of(tmp_path, model, kind)
        config = TrainConfig(max_steps=steps, rows=4, anchors=8, **(QUICK | {"average": 0.9}))
        return Trainer(build(model, corpus, kind), corpus, config, tmp_path / folder)

    first = trainer(6, "a")
    first.train()
    second = trainer(12, "a")
    assert second.resume() and second.state.step == 6
    for (name, p), (_, q) in zip(
        first.drafter.model.named_parameters(), second.drafter.model.named_parameters(), strict=True
    ):
        assert torch.equal(p, q), name
    for name, value in first.average.values.items():
        assert torch.equal(value, second.average.values[name])
    states = [o.state_dict()["state"] for t in (first, second) for o in t.optimizers]
    assert states[0].keys() == states[1].keys()
    assert torch.equal(states[0][0]["exp_avg"], states[1][0]["exp_avg"])
    second.train()
    assert second.state.step == 12
    assert not trainer(12, "b").resume()


class Stop(Exception):
    pass


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Interrupted within epochs, before and after a new shard is taken in: the same batches, vocabulary, weights."""
    model = tiny.target()

    def train(name: str, stops: tuple[int, ...]) -> dict[str, torch.Tensor]:
        data = tmp_path / name / "data"
        tiny.write_greedy_corpus(data, model, 12, new=20)
        shape = Shape(block_size=3, layers=1, taps=(0, 2), vocabulary=30, window=2)
        config = TrainConfig(max_steps=9, rows=4, anchors=8, **(QUICK | {"average": 0.9, "evaluate_every": 0.0}))
        plan = Plan([str(data)], tmp_path / name / "run", shape, config=config, held_out=0.2, top=8, served_prompts=0)
        left = list(stops)

        def tell(stage: str, done: float, total: float | None, note: str) -> None:
            step = int(note.split()[1].strip(",")) if stage == "train" else 0
            if step == 2 and not (data / "a new one.npz").exists():
                rng = np.random.default_rng(5)
                made = [Document(rng.integers(4, tiny.VOCAB, 15), 3, "new") for _ in range(9)]
                write_shard(data / "a new one.npz", made)
            if left and step == left[0]:
                del left[0]
                raise Stop

        for _ in stops:
            with pytest.raises(Stop):
                run(model, plan, tell=tell)
        outcome = run(model, plan, tell=tell)
        assert outcome.state.step == 9 and outcome.state.epoch == 2
        assert outcome.drafter.draft_ids is not None
        average = load_file(plan.folder / "checkpoint" / "average.safetensors")
        return {"draft_ids": outcome.drafter.draft_ids, **average}

    whole = train("whole", ())
    stopped = train("stopped", (3, 6, 8))  # checkpoints after every step: those of 2, 5 and 7 are gone on from
    assert whole.keys() == stopped.keys()
    for name, value in whole.items():
        assert torch.equal(value, stopped[name]), name


def test_a_resumed_run_without_its_shards_begins_an_epoch(tmp_path, caplog):
    model = tiny.target()
    kind = SHAPES["late"]
    config = TrainConfig(max_steps=1, rows=2, anchors=4, **QUICK)
    for name in ("one", "two"):
        tiny.write_greedy_corpus(tmp_path / name, model, 6, new=12 if name == "one" else 14)
    first = corpus_of(tmp_path / "one", model, kind)
    Trainer(build(model, first, kind), first, config, tmp_path / "run").train()
    other = corpus_of(tmp_path / "two", model, kind)
    second = Trainer(build(model, other, kind), other, config, tmp_path / "run")
    assert second.resume() and second.state.step == 1
    assert (second.state.epoch, second.state.position) == (1, 0) and "not all there" in caplog.text


def test_objective_matches_dense_loss(tmp_path):
    """The chunked loss and its gradient equal a dense computation by autograd."""
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path, model, 4)
    kind = Shape(block_size=3, layers=1, taps=(0, 2), vocabulary=30, window=2)
    corpus = corpus_of(tmp_path, model, kind)
    drafter: DFlashDrafter = build(model, corpus, kind)
    items = [s[i] for s, i in corpus.train]
    rng = np.random.default_rng(0)
    batch = collate(items, [draw_anchors(i, 10, rng) for i in items], 3)
    objective = BlockObjective(drafter, LossConfig(gamma=2.0, hard=0.3))
    loss, info = objective(batch)
    loss.backward()
    got = drafter.model.fc.weight.grad.clone()
    drafter.model.zero_grad()
    states = objective.slots(batch)
    logq = (states @ drafter.head.T).log_softmax(-1)
    columns = objective.columns[batch.target_ids]
    known = columns >= 0
    soft = batch.target_probs * known * 0.7
    soft[..., 0] += 0.3 * (known[..., 0] & batch.present)
    picked = logq.gather(-1, columns.clamp(min=0))
    weights = torch.exp(-torch.arange(3) / 2.0) * batch.present
    dense = -((soft * picked).sum(-1) * weights).sum() / batch.anchors.numel()
    dense.backward()
    torch.testing.assert_close(loss, dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, drafter.model.fc.weight.grad, atol=1e-5, rtol=1e-4)
    assert info["hits"].shape == (3,)
