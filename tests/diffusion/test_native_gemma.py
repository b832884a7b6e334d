"""DiffusionGemma: transformers' own class, tokens equal to its own generate."""

from __future__ import annotations

import pytest
import torch
from native_tiny import left_padded

from specdiff import DiffusionLM
from specdiff.errors import InvalidInputError

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
    pytest.skip("this transformers has no DiffusionGemma", allow_module_level=True)


def build(canvas=8, window=6, scale=0.3):
    torch.manual_seed(0)
    text = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_experts": 2,
        "top_k_experts": 1,
        "moe_intermediate_size": 16,
        "initializer_range": scale,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=canvas,
        image_token_id=39,
        boi_token_id=38,
        eoi_token_id=37,
    )
    return transformers.DiffusionGemmaForBlockDiffusion(config).eval()


@pytest.fixture(scope="module")
def model():
    return build()


def prompt(n, seed=5):
    return torch.randint(2, 36, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "options,theirs",
    [
        ({"steps": 10}, {"max_denoising_steps": 10}),
        # bounds at which canvases really stop early, at different steps
        (
            {"steps": 30, "stability": 1, "confidence": 1.0, "bound": 100.0, "t_min": 0.02, "t_max": 0.04},
            {
                "max_denoising_steps": 30,
                "stability_threshold": 1,
                "confidence_threshold": 1.0,
                "t_min": 0.02,
                "t_max": 0.04,
            },
        ),
        (
            {"steps": 30, "stability": 2, "confidence": 2.0, "bound": 2.0, "t_min": 0.01, "t_max": 0.03},
            {
                "max_denoising_steps": 30,
                "stability_threshold": 2,
                "confidence_threshold": 2.0,
                "t_min": 0.01,
                "t_max": 0.03,
            },
        ),
    ],
)
@pytest.mark.parametrize("length", [5, 13])
def test_tokens_equal_hugging_faces_own_generate(model, options, theirs, length):
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    ids = prompt(length)
    theirs = {**theirs, "sampler_config": EntropyBoundSamplerConfig(entropy_bound=options.get("bound", 0.1))}
    lm = DiffusionLM(model)
    early = False
    for seed in range(2):
        for eos in (None, 1):
            torch.manual_seed(seed)
            ref = model.generate(ids, max_new_tokens=20, eos_token_id=eos, pad_token_id=0, **theirs)
            torch.manual_seed(seed)
            out = lm.generate(
                ids,
                max_new_tokens=20,
                draws="torch",
                eos_token_id=() if eos is None else eos,
                return_dict_in_generate=True,
                **options,
            )
            got = out.sequences[0]
            assert got.tolist() == ref.sequences[0, : len(got)].tolist()
            if eos is None:
                assert len(got) == length + 20  # exactly what was asked, not whole canvases
                assert out.stats.blocks == [3]
                early |= out.stats.nfe[0] < 3 * options["steps"]
            else:
                assert len(got) == length + 20 or int(got[-1]) == 1
    assert early == ("confidence" in options)


def test_rows_of_a_batch_equal_their_solo_runs(model):
    rows = [prompt(4)[0], prompt(11, 6)[0]]
    ids, mask = left_padded(rows, pad=0)
    lm = DiffusionLM(model)
    args = {
        "max_new_tokens": 14,
        "steps": 14,
        "confidence": 1.0,
        "bound": 100.0,
        "t_min": 0.02,
        "t_max": 0.04,
        "eos_token_id": (),
        "return_dict_in_generate": True,
    }
    out = lm.generate(ids, mask, seed=[3, 4], **args)
    for i, row in enumerate(rows):
        solo = lm.generate(row[None], seed=[3 + i], **args)
        assert solo.sequences[0, -14:].tolist() == out.sequences[i, -14:].tolist()
        assert solo.stats.nfe[0] == out.stats.nfe[i]


def test_spec_comes_from_the_model(tmp_path, model):
    model.save_pretrained(tmp_path)
    lm = DiffusionLM.from_pretrained(str(tmp_path))
    assert (lm.spec.name, lm.spec.block_size, lm.spec.eos_ids, lm.spec.pad_id) == ("diffusion-gemma", 8, (1,), 0)
    a = lm.generate(prompt(6), max_new_tokens=8, steps=5, seed=1)
    assert torch.equal(a, DiffusionLM(model).generate(prompt(6), max_new_tokens=8, steps=5, seed=1))


def test_infill_of_a_uniform_canvas_keeps_the_rest(model):
    ids = prompt(12)
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, 6:9] = True
    out = DiffusionLM(model).infill(ids, hole, steps=6, seed=2)
    assert torch.equal(out[~hole], ids[~hole])


@pytest.mark.parametrize("extra", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.9}, {"do_sample": False}])
def test_sampling_that_the_policy_does_not_have_is_refused_by_name(model, extra):
    with pytest.raises(InvalidInputError, match=next(iter(extra))):
        DiffusionLM(model).generate(prompt(5), max_new_tokens=4, steps=2, **extra)
    DiffusionLM(model).generate(prompt(5), max_new_tokens=4, steps=2, do_sample=True)


def test_a_wider_row_of_an_infilled_batch_may_stop_early(model):
    """Rows with holes of several widths: each equals its solo run, also when the widest leaves first."""
    ids = torch.cat([prompt(12), prompt(12, 6)])
    ids[0, 0], ids[1, 0] = 3, 4
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, 5:12] = hole[1, 9:12] = True

    def sure(i, ids, logits, positions):
        return logits + 80.0 * ((ids[:, 0] == 3)[:, None, None] * (torch.arange(40) == 7))

    args = {"steps": 6, "confidence": 0.5, "bound": 2.0, "return_dict_in_generate": True, "logits_hook": sure}
    lm = DiffusionLM(model)
    out = lm.infill(ids, hole, seed=[1, 2], **args)
    assert out.stats.nfe[0] < out.stats.nfe[1]
    for row in range(2):
        solo = lm.infill(ids[row : row + 1], hole[row : row + 1], seed=[1 + row], **args)
        assert solo.sequences[0].tolist() == out.sequences[row].tolist()


@pytest.mark.parametrize("second", [slice(4, 7), slice(9, 12)])
def test_a_row_with_a_smaller_hole_is_conditioned_as_alone(model, second):
    """A whole canvas beside one with fixed tokens: the columns of the self-conditioning are each row's own."""
    ids = torch.cat([prompt(12), prompt(12, 6)])
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, 4:12] = True
    hole[1, 4] = hole[1, 6] = hole[1, 9] = hole[1, second.stop - 1] = True
    lm = DiffusionLM(model)
    args = {"steps": 5, "bound": 2.0, "confidence": 0.0}
    seen = {}

    def look(name, row):
        def hook(i, ids, logits, positions):
            seen.setdefault(name, []).append(logits[row, :3].clone())
            return logits

        return hook

    lm.infill(ids, hole, seed=[1, 2], logits_hook=look("both", 1), **args)
    lm.infill(ids[1:], hole[1:], seed=[2], logits_hook=look("solo", 0), **args)
    for a, b in zip(seen["both"], seen["solo"], strict=True):
        assert torch.allclose(a, b, atol=1e-4)
