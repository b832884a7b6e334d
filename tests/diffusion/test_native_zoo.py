"""The shipped dual-mode adapter: what must hold however little it was trained."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from specdiff import DiffusionLM, SpecDiff
from specdiff.bench.native import judge
from specdiff.cli import main
from specdiff.diffusion.dual import WEIGHTS, DualAdapter
from specdiff.drafters.dual import adapters
from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.dual.config import DualConfig
from specdiff.drafters.train.dual.objective import DualObjective
from specdiff.drafters.train.dual.trainer import held_out_batches, summary

NAME = "smollm2-135m-instruct-dual"
QUESTION = "What is the capital of France, and why do people visit it?"


def test_it_ships_small_and_with_a_card():
    folder = adapters()[NAME]
    assert (folder / WEIGHTS).stat().st_size < 12e6
    card = (folder / "README.md").read_text()
    assert "held-out loss" in card and "base_model" in card
    values = json.loads((folder / "dual_config.json").read_text())
    assert values["rank"] == 16 and values["spec"]["attention"] == "causal_context"


@pytest.fixture(scope="module")
def dual(model_pair):
    model, tokenizer = model_pair
    return DiffusionLM.from_adapter(model, str(adapters()[NAME]), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def question(model_pair):
    chat = [{"role": "user", "content": QUESTION}]
    return model_pair[1].apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.fixture(scope="module")
def greedy(model_pair, question):
    """The base's own greedy text, from a copy that no adapter ever touched."""
    return copy.deepcopy(model_pair[0]).generate(**question, max_new_tokens=40, do_sample=False, eos_token_id=None)


@pytest.mark.model
@pytest.mark.slow
def test_ar_mode_is_exact_to_the_bit(dual, model_pair, greedy):
    assert dual.ar is model_pair[0]
    fresh = copy.deepcopy(model_pair[0])
    assert torch.equal(dual.ar(greedy).logits, fresh(greedy).logits)
    assert torch.equal(dual.model(greedy).logits, fresh(greedy).logits)


@pytest.mark.model
@pytest.mark.slow
def test_it_drafts_for_itself_losslessly_and_its_first_slot_is_the_models_own(dual, question, greedy):
    call = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    for drafter in (dual.drafter(), NAME):
        out = SpecDiff(dual.ar, drafter, block_size=2).generate(**question, **call)  # drafts, whatever it costs
        assert torch.equal(out.sequences, greedy)
        assert out.stats.acceptance_by_position[0] == 1.0
        assert out.stats.tau > 1.9


@pytest.mark.model
@pytest.mark.slow
def test_text_at_one_token_per_pass_is_as_good_as_greedy_ar(dual, question, greedy):
    """By the model's own log-likelihood; blocks of one token are the very same text."""
    prompt = question["input_ids"].shape[1]
    call = {"max_new_tokens": 40, "eos_token_id": ()}
    one = dual.generate(question["input_ids"], block_size=1, **call)
    assert torch.equal(one, greedy)
    left = dual.generate(question["input_ids"], threshold=1.0, **call)
    reference = float(judge(dual.ar, greedy, prompt)[0].mean())
    assert float(judge(dual.ar, left, prompt)[0].mean()) > reference - 0.5


@pytest.mark.model
@pytest.mark.slow
def test_training_lowered_the_loss_on_text_it_never_saw(dual, question, greedy):
    """On the model's own text after a prompt of this test, against an adapter before any training."""
    prompt = question["input_ids"].shape[1]
    document = Document(greedy[0].numpy().astype(np.int64), prompt, "test")
    config = DualConfig(block_sizes=(dual.spec.block_size,), length=len(document) + 1)

    def measured(adapter: DualAdapter):
        with torch.no_grad():
            batches = held_out_batches([document], config, 24)
            return summary([DualObjective(adapter, config)(b)[1] for b in batches])

    untrained = measured(DualAdapter(dual.ar, dual.spec.mask_id, rank=16))
    trained = measured(dual.adapter)
    assert trained.loss < 0.8 * untrained.loss
    assert trained.kl < untrained.kl and trained.kl_partial < untrained.kl_partial


@pytest.mark.model
@pytest.mark.slow
def test_the_command_needs_no_arguments_but_a_prompt(capsys):
    """Piped, without a terminal: plain text and statistics; a gap is filled and the rest stays."""
    assert main(["diffuse", QUESTION, "--max-new-tokens", "12", "--stats"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() and "tokens per pass" in shown.err
    assert main(["diffuse", "The capital of France is [...], a large city.", "--infill", "--gap-tokens", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("The capital of France is") and text.rstrip().endswith(", a large city.")
