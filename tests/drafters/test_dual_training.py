"""Dual-mode training on tiny models: from nothing to a falling held-out loss, exact resumption, the confidence term,
the command."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import tiny
import torch

from specdiff import DiffusionLM, SpecDiff
from specdiff.cli import codes, main
from specdiff.diffusion.dual import DualAdapter, dual_spec
from specdiff.drafters.loading import load
from specdiff.drafters.train.corpus import Document, write_shard
from specdiff.drafters.train.dual.config import DualConfig
from specdiff.drafters.train.dual.pipeline import DualPlan, run
from specdiff.drafters.train.dual.trainer import Documents, DualTrainer, held_out_batches, summary
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.pipeline import Plan
from specdiff.errors import InvalidInputError, UnsupportedError

MASK = 3
QUICK = {"mixed_precision": "no", "optimizer": "adamw", "average": 0.0, "evaluate_every": 1e9, "warmup": 0.05}


def config(steps: int, **options) -> TrainConfig:
    values = {"max_steps": steps, "rows": 4, "anchors": 12, "lr": 1e-2, **QUICK}
    return TrainConfig(**(values | options))


def counting_model():
    """A tiny model that has learned to count: what comes later follows from what is seen."""
    model = tiny.target(spread=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draws = torch.Generator().manual_seed(0)
    for _ in range(120):
        start = torch.randint(0, tiny.VOCAB - 4, (16, 1), generator=draws)
        ids = 4 + (start + torch.arange(16)) % (tiny.VOCAB - 4)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def counting():
    return counting_model()


def prompts_of(rows: int, seed: int):
    start = torch.randint(0, tiny.VOCAB - 4, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return 4 + (start + torch.arange(4)) % (tiny.VOCAB - 4)


def write_corpus(folder, model, count: int, new: int) -> list[Document]:
    """The model's own greedy texts after the first numbers of a count."""
    prompts = prompts_of(count, 1)
    texts = tiny.greedy(model, prompts, new).numpy().astype(np.int64)
    documents = [Document(text, 4, "greedy") for text in texts]
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "greedy.npz", documents)
    return documents


@pytest.fixture(scope="module")
def trained(counting, tmp_path_factory):
    """A tiny model's own greedy texts, a run from nothing, and what it gave."""
    folder = tmp_path_factory.mktemp("dual")
    model = copy.deepcopy(counting)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    write_corpus(folder / "data", model, 30, 20)
    plan = DualPlan(
        Plan([str(folder / "data")], folder / "run", config=config(60), held_out=0.2, name="tiny"),
        DualConfig(block_sizes=(4,), length=32),
        rank=8,
        mask_id=MASK,
    )
    return model, before, plan, run(model, plan)


def test_held_out_loss_falls_and_drafts_get_longer(trained):
    _, _, plan, outcome = trained
    first, last = outcome.curve[0], outcome.curve[-1]
    assert last.loss < 0.6 * first.loss and last.kl < 0.6 * first.kl
    assert last.kl_partial < first.kl_partial
    assert last.tau > first.tau + 0.3
    lines = [json.loads(line) for line in (plan.run.folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 60]
    text = (plan.run.folder / "adapter" / "README.md").read_text()
    assert f"{last.loss:.2f} after" in text and "base_model: tiny" in text


def test_the_base_is_untouched_and_ar_mode_exact_to_the_bit(trained, counting):
    model, before, _, outcome = trained
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    ids = torch.randint(4, tiny.VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))
    fresh = copy.deepcopy(counting)
    assert torch.equal(model(ids).logits, fresh(ids).logits)
    assert torch.equal(outcome.adapter.model(ids).logits, fresh(ids).logits)
    assert not any(p.requires_grad for p in model.parameters())


def test_the_trained_adapter_drafts_for_its_own_model(trained, counting):
    """Saved and loaded: greedy text is the model's own, slot 1 is always right, and later slots got better."""
    model, _, plan, _ = trained
    lm = DiffusionLM.from_adapter(copy.deepcopy(counting), str(plan.run.folder / "adapter"))
    prompts = prompts_of(6, 8)
    wanted = tiny.greedy(model, prompts, 24)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def drafted(adapted: DiffusionLM):
        return SpecDiff(adapted.ar, adapted.drafter(block_size=3)).generate(
            prompts, attention_mask=torch.ones_like(prompts), return_dict_in_generate=True, **settings
        )

    out = drafted(lm)
    assert torch.equal(out.sequences, wanted)
    untrained = DualAdapter(counting, MASK, rank=8)
    plain = drafted(DiffusionLM(untrained.model, dual_spec(MASK, 4), adapter=untrained))
    assert torch.equal(plain.sequences, wanted)
    assert out.stats.acceptance_by_position[0] == plain.stats.acceptance_by_position[0] == 1.0
    assert out.stats.tau > plain.stats.tau + 0.2
    folder = plan.run.folder / "adapter"
    by_name = SpecDiff(lm.ar, str(folder)).generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    assert torch.equal(by_name, wanted)
    with pytest.raises(UnsupportedError, match="target"):
        load(folder)
    with pytest.raises(InvalidInputError, match="dtype"):
        load(folder, lm.ar, dtype=torch.float32)


class Stop(Exception):
    pass


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Interrupted in the middle of an epoch: the same batches, optimiser, average and weights as without."""
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path / "data", model, 30, new=20)
    dual = DualConfig(block_sizes=(2, 4), length=24, wsd=(0.3, 0.3), annealing=0.5)
    documents = Documents([str(tmp_path / "data")], dual, 0.2)

    def trainer(folder: str, stop: int | None = None) -> DualTrainer:
        def on_step(state, info):
            if state.step == stop:
                raise Stop

        torch.manual_seed(0)
        adapter = DualAdapter(model, MASK, rank=2)
        settings = config(9, average=0.9, evaluate_every=0.0, evaluate_documents=2)
        return DualTrainer(adapter, documents, dual_spec(MASK, 4), settings, dual, tmp_path / folder, on_step)

    whole = trainer("a")
    whole.train()
    with pytest.raises(Stop):
        trainer("b", stop=6).train()  # checkpoints after every step: the last one is of step 5
    second = trainer("b")
    assert second.resume() and second.state.step == 5
    second.train()
    assert second.state.step == whole.state.step == 9
    for (name, p), (_, q) in zip(whole.adapter.named_parameters(), second.adapter.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    for name, value in whole.average.values.items():
        assert torch.equal(value, second.average.values[name])


def test_the_confidence_term_sharpens_laws_and_saves_passes(tmp_path, counting):
    """CAP: the same run with the term ends with a lower mean entropy and writes more tokens per pass."""
    model = counting
    write_corpus(tmp_path / "data", model, 30, 20)

    def result(weight: float) -> tuple[float, float]:
        dual = DualConfig(block_sizes=(4,), length=32, confidence=weight)
        documents = Documents([str(tmp_path / "data")], dual, 0.2)
        torch.manual_seed(0)
        adapter = DualAdapter(model, MASK, rank=8)
        trainer = DualTrainer(
            adapter, documents, dual_spec(MASK, 4), config(30, evaluate_documents=1), dual, tmp_path / f"run{weight}"
        )  # fmt: skip
        trainer.train()
        lm = DiffusionLM(adapter.model, dual_spec(MASK, 4), adapter=adapter)
        out = lm.generate(prompts_of(8, 2), max_new_tokens=24, threshold=0.8, return_dict_in_generate=True)
        entropy = []
        with torch.no_grad():
            for batch in held_out_batches(documents.held, dual, 12):
                _, cache = trainer.objective.clean(batch)
                law = torch.log_softmax(trainer.objective.noisy(batch, cache), -1)
                entropy.append(-(law.exp() * law).sum(-1).mean())
        return float(sum(entropy)) / len(entropy), 8 * 24 / sum(out.stats.nfe)

    plain, sharp = result(0.0), result(1.0)
    assert sharp[0] < 0.9 * plain[0], (plain, sharp)
    assert sharp[1] > plain[1], (plain, sharp)


def test_held_out_noise_is_the_same_every_time(tmp_path):
    model = tiny.target()
    documents = tiny.write_greedy_corpus(tmp_path, model, 4)
    dual = DualConfig(block_sizes=(4,), length=40)
    first, second = (held_out_batches(documents, dual, 8) for _ in range(2))
    assert len(first) == 4
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
    adapter = DualAdapter(model, MASK, rank=2)
    from specdiff.drafters.train.dual.objective import DualObjective

    with torch.no_grad():
        values = summary([DualObjective(adapter, dual)(b)[1] for b in first])
    assert values.by_position[0] == 1.0 and values.tau == pytest.approx(1 + sum(values.by_position))


def test_nothing_to_learn_from_is_an_error(tmp_path):
    tiny.write_greedy_corpus(tmp_path, tiny.target(), 2, prompt=30, new=4)
    with pytest.raises(InvalidInputError, match="length"):
        Documents([str(tmp_path)], DualConfig(block_sizes=(4,), length=20), 0.0)


def test_command(tmp_path, tiny_folder, capsys):
    """``specdiff train --kind dual`` from prompts, with every recipe's options, then ``specdiff diffuse``."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello there"}\n{"prompt": "one two three"}\n')
    where = ["--kind", "dual", "--data", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "run")]
    options = "--chats 12 --own-share 0 --new-tokens 16 --held-out 0.3"
    options += " --max-steps 3 --rows 2 --anchors 4 --precision no --rank 2 --block-sizes 2,4 --length 64"
    options += " --wsd .3,.3 --mask-ratios .2,.9 --mask-level sequence --annealing .5 --inverse-t --confidence-term .1"
    options += " --no-packing --no-complement --drafting .3"
    assert main(["train", str(tiny_folder), *where, *options.split()]) == 0
    shown = capsys.readouterr().out
    assert f"adapter: {tmp_path / 'run' / 'adapter'}" in shown and "held-out loss" in shown
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["dual"]["annealing"] == 0.5 and result["rank"] == 2 and result["config"]["rows"] == 2
    call = ["diffuse", "hello there", "--raw", "--target", str(tiny_folder), "--adapter", str(tmp_path / "run/adapter")]
    assert main([*call, "--max-new-tokens", "6", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) <= 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kind", "dual", "--taps", "1,2"], "--taps belongs to --kind dflash"),
        (["--rank", "4"], "--rank belongs to --kind dual"),
        (["--kind", "dual"], "budget"),
    ],
)
def test_options_of_the_other_kind_are_refused(options, words, tmp_path, capsys):
    assert main(["train", "--data", "x.npz", "--out", str(tmp_path), *options]) == codes.USAGE
    assert words in capsys.readouterr().err
