"""Packed linear layers: every kernel gives the product of the float32 weight."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from specdiff.fast.linear import Half, OneDnn, Plain, fastest, half_exponent, pack


def rounded(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Random weights that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()


@pytest.mark.parametrize("kernel", ["plain", "onednn", "half"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 48), (33, 129)])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kernel_gives_the_float32_product(kernel: str, shape: tuple[int, int], bias: bool) -> None:
    weight, offset = rounded(*shape), rounded(shape[0]) if bias else None
    layer = pack(weight, offset, kernel=kernel)
    assert layer.kernel == kernel
    for rows in (1, 2, 9, 17, 40):
        x = torch.randn(rows, shape[1])
        wanted = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(layer(x).double(), wanted, atol=2e-5, rtol=1e-5)


def test_chosen_kernel_is_one_that_exists_and_is_remembered() -> None:
    layer = pack(rounded(32, 24))
    assert isinstance(layer, (Plain, OneDnn, Half))
    before = fastest.cache_info().hits
    pack(rounded(32, 24, seed=1))
    assert fastest.cache_info().hits == before + 1


def test_small_bfloat16_weights_are_exact_in_float16_after_a_scale() -> None:
    """Weights near 1e-7 vanish in float16 itself; scaled by a power of two every bit survives."""
    weight = rounded(16, 8, scale=1e-6)
    exponent = half_exponent(weight)
    assert exponent is not None and exponent > 0
    layer = pack(weight, kernel="half")
    assert torch.equal(layer(torch.eye(8)), weight.t())
    offset = rounded(16, scale=1e-6)
    torch.testing.assert_close(pack(weight, offset, kernel="half")(torch.zeros(1, 8))[0], offset, atol=0, rtol=1e-6)


def test_weights_that_float16_would_round_are_never_rounded() -> None:
    weight = torch.tensor([[1.0 + 2**-20, 3.0]])
    assert half_exponent(weight) is None
    assert pack(weight).kernel != "half"
    with pytest.raises(ValueError, match="float16"):
        pack(weight, kernel="half")
    assert pack(weight, kernel="half", exact=False).kernel == "half"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_weights_outside_float16_stay_float32(value: float) -> None:
    weight = torch.tensor([[value, 1.0]])
    assert pack(weight, exact=False).kernel != "half"


def test_zero_weights_and_subnormals_are_exact() -> None:
    assert half_exponent(torch.zeros(4, 4)) == 0
    weight = torch.randint(-1023, 1024, (16, 16)).float() * 2.0**-24
    assert half_exponent(weight) == 0
    assert torch.equal(pack(weight, kernel="half")(torch.eye(16)), weight.t())


def test_other_dtypes_run_as_they_are() -> None:
    weight = torch.randn(4, 3, dtype=torch.bfloat16)
    layer = pack(weight)
    assert layer.kernel == "plain"
    assert layer(torch.randn(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel must be"):
        pack(torch.ones(2, 2), kernel="magic")


def test_packing_is_a_copy_and_leaves_the_weight_alone() -> None:
    weight = rounded(8, 8)
    before, layer = weight.clone(), pack(weight, kernel="half")
    assert torch.equal(weight, before)
    weight.zero_()
    assert torch.equal(layer(torch.eye(8)), before.t())


def test_module_needs_torch_only() -> None:
    """Drafters use it, so it must not pull the engine in."""
    code = (
        "import sys, specdiff.fast.linear; print([m for m in ('transformers', 'specdiff.target') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
