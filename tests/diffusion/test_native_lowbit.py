"""Low-bit weights (QDLM, Quant-dLLM): quantised drafters and targets just run, and the output is still the target's."""

from __future__ import annotations

import copy

import pytest
import torch
from native_tiny import MASK, PAD, prompt, tiny_llama
from torch import Tensor, nn

from specdiff import DiffusionLM, DLMSpec, SpecDiff


class LowBitLinear(nn.Module):
    """A linear layer with integer weights and one scale per output row."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        top = 2 ** (bits - 1) - 1
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / top
        self.register_buffer("values", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.values.to(x.dtype) * self.scale)


def quantised(model: nn.Module, bits: int) -> nn.Module:
    """A copy of ``model`` with low-bit linear layers."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LowBitLinear(module, bits))
    return model


SPEC = DLMSpec(mask_id=MASK, pad_id=PAD, shift=1, attention="causal_context", block_size=4)
CALL = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("which", ["drafter", "target", "both"])
def test_text_is_the_targets_own_whatever_is_quantised(which, bits):
    model = tiny_llama(0)
    small = quantised(model, bits)
    target = model if which == "drafter" else small
    drafting = model if which == "target" else small
    ids = prompt(6, rows=2)
    mask = torch.ones_like(ids)
    wanted = target.generate(ids, attention_mask=mask, suppress_tokens=[MASK], **CALL)
    drafter = DiffusionLM(drafting, SPEC).drafter(block_size=3)
    out = SpecDiff(target, drafter).generate(
        ids, attention_mask=mask, suppress_tokens=[MASK], return_dict_in_generate=True, **CALL
    )
    assert torch.equal(out.sequences, wanted)
    if which == "both":
        assert out.stats.acceptance_by_position[0] == 1.0  # the same weights: the first slot is the target's own
    if which == "drafter" and bits == 8:
        assert out.stats.acceptance_by_position[0] > 0.5  # close to what they were


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_diffusion_model_decodes_with_its_cache_as_without(bits):
    lm = DiffusionLM(quantised(tiny_llama(1), bits), SPEC)
    ids = prompt(7)
    out = lm.generate(ids, max_new_tokens=12, threshold=0.3)
    assert torch.equal(out, lm.generate(ids, max_new_tokens=12, threshold=0.3, cache="none"))
    assert not (out == MASK).any()
