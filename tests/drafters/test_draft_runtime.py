"""What decoding runs of a drafter: packed copies that compute what the trainable modules compute, and follow them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.packed import PackedMLP, PackedModule, PackedNorm

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {"mask_token_id": 3},
    "direct": {"direct": True, "normalize_taps": True, "late_mlp": True, "correction_window": 2},
    "heads": {"direct": True, "correction": 8, "markov_rank": 4},
}


def drafter(kind: str, seed: int = 0) -> DFlashDrafter:
    torch.manual_seed(seed)
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=60,
        num_target_layers=4, target_layer_ids=(0, 2), block_size=4, **OPTIONS[kind],
    )  # fmt: skip
    made = DFlashDrafter(DFlashModel(config), torch.arange(0, 60, 2))
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.bind_weights(torch.randn(60, 32), torch.randn(60, 32))
    return made.eval()


@torch.no_grad()
def outputs(model: DFlashModel) -> list[torch.Tensor]:
    """Context keys and values, block states and corrected states on fixed inputs."""
    generator = torch.Generator().manual_seed(1)
    taps = model.tap_features(torch.randn(2, 5, 64, generator=generator) * 3)
    context = model.context(taps, torch.arange(5).expand(2, -1))
    anchor = torch.randn(2, 1, 32, generator=generator)
    x = model.block_input(anchor, taps[:, -1:], torch.ones(32), 4)
    states = model.run_layers(x, context, torch.ones(2, 1, 5, dtype=torch.bool), torch.full((2, 1), 5))
    previous = torch.randn(*states.shape[:-1], model.config.correction_window, 32, generator=generator)
    return [*(t for pair in context for t in pair), states, model.correct(states, previous)]


@pytest.mark.parametrize("kind", sorted(OPTIONS))
def test_packed_layers_compute_the_same(kind: str) -> None:
    made = drafter(kind)
    runtime = made.runtime()
    kinds = {type(module) for module in runtime.model.modules()}
    assert {PackedModule, PackedMLP, PackedNorm} <= kinds and nn.Linear not in kinds
    for packed, plain in zip(outputs(runtime.model), outputs(made.model), strict=True):
        torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)
    normed = torch.randn(2, 3, 32)
    with torch.no_grad():
        torch.testing.assert_close(runtime.logits(normed), made.logits(normed), atol=1e-4, rtol=1e-4)


def test_the_trainable_modules_stay_as_they_are() -> None:
    made = drafter("direct")
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    modules = [(name, id(module)) for name, module in made.named_modules()]
    made.runtime()
    assert modules == [(name, id(module)) for name, module in made.named_modules()]
    assert before.keys() == made.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_runtime_is_kept_until_a_weight_changes() -> None:
    made = drafter("heads")
    first = made.runtime()
    assert made.runtime() is first
    with torch.no_grad():
        made.model.stack[0].mlp.up_proj.weight.mul_(-1.0)
    second = made.runtime()
    assert second is not first
    torch.testing.assert_close(outputs(second.model)[-1], outputs(made.model)[-1], atol=1e-4, rtol=1e-4)


def test_other_dtypes_run_unpacked() -> None:
    made = drafter("plain").to(torch.float64)
    assert made.runtime().model is made.model
