"""Tiny random weights in every public layout, loaded back through ``DiffusionLM.from_pretrained``."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from native_tiny import full_net, prompt
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from specdiff import DiffusionLM, DLMSpec
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError

VOCAB, MASK, EOS, PAD = 41, 40, 39, 38
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}


def write(folder, weights, config, **files):
    folder.mkdir(exist_ok=True)
    save_file(
        {k: v.contiguous().clone() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return str(folder)


def tokenizer_files(folder, mask_id=MASK):
    """A word-level tokenizer with the special ids where the checkpoint says."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB)}
    words = {("<|mask|>" if i == mask_id else w): i for w, i in words.items()}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, mask_token="<|mask|>", eos_token=f"w{EOS}", pad_token=f"w{PAD}"
    ).save_pretrained(folder)


def same_logits(lm, net, ids):
    """The loaded model computes what the original does."""
    n = ids.shape[1]
    got = lm.model(input_ids=ids, attention_mask=torch.zeros(1, 1, n, n)).logits[0]
    assert torch.allclose(got, net(ids[0]), atol=1e-4)


def test_llada_by_remap(tmp_path):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, rms_norm_eps=1e-5, rope_theta=5e5)
    ).eval()
    names = {
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    weights = {}
    for key, value in llama.state_dict().items():
        if key == "model.embed_tokens.weight":
            key = "model.transformer.wte.weight"
        elif key == "model.norm.weight":
            key = "model.transformer.ln_f.weight"
        elif key == "lm_head.weight":
            key = "model.transformer.ff_out.weight"
        else:
            _, _, layer, rest = key.split(".", 3)
            key = f"model.transformer.blocks.{layer}.{names[rest.removesuffix('.weight')]}.weight"
        weights[key] = value
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 48,
        "vocab_size": VOCAB,
        "embedding_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_sequence_length": 128,
        "block_type": "llama",
        "activation_type": "silu",
        "include_bias": False,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "weight_tying": False,
        "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
    }
    path = write(tmp_path / "m", weights, config)
    tokenizer_files(tmp_path / "m")
    lm = DiffusionLM.from_pretrained(path)
    assert type(lm.model).__name__ == "LlamaForCausalLM"
    assert (lm.spec.name, lm.spec.mask_id, lm.spec.eos_ids, lm.spec.shift, lm.spec.attention) == (
        "llada",
        MASK,
        (EOS,),
        0,
        "full",
    )
    assert lm.tokenizer.mask_token_id == MASK
    same_logits(lm, full_net(llama), prompt(7))
    assert lm.generate(prompt(4), max_new_tokens=5, eos_token_id=()).shape == (1, 9)

    config["block_type"] = "sequential"
    with pytest.raises(FormatError, match="block_type"):
        DiffusionLM.from_pretrained(write(tmp_path / "x", weights, config))
    config["block_type"] = "llama"
    del weights["model.transformer.blocks.1.ff_proj.weight"]
    with pytest.raises(FormatError, match="missing"):
        DiffusionLM.from_pretrained(write(tmp_path / "y", weights, config))


@pytest.mark.parametrize(
    "arch,model_type,native,extra,expect",
    [
        ("DreamModel", "Dream", "qwen2", {}, {"shift": 1, "attention": "full", "policy": "dream"}),
        (
            "Fast_dLLM_QwenForCausalLM",
            "Fast_dLLM_Qwen",
            "qwen2",
            {"bd_size": 8},
            {"shift": 1, "attention": "block_causal", "block_size": 8, "sub_block": 8, "first_token": "ar"},
        ),
        (
            "SDARForCausalLM",
            "sdar",
            "qwen3",
            {"block_size": 4},
            {"shift": 0, "attention": "block_causal", "block_size": 4},
        ),
        ("SDARMoeForCausalLM", "sdar_moe", "qwen3_moe", {"block_size": 4}, {"shift": 0, "block_size": 4}),
    ],
)
def test_same_keys_in_a_native_class(tmp_path, arch, model_type, native, extra, expect):
    torch.manual_seed(0)
    if native == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False))
    elif native == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=False))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SMALL,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                tie_word_embeddings=False,
            )
        )
    model.eval().save_pretrained(tmp_path / "m")  # public key names: experts one by one
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config.update(
        architectures=[arch], model_type=model_type, mask_token_id=MASK, eos_token_id=EOS, pad_token_id=PAD, **extra
    )
    config["auto_map"] = {"AutoModel": f"modeling.{arch}"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 37]}))
    lm = DiffusionLM.from_pretrained(str(tmp_path / "m"))
    assert type(lm.model) is type(model)
    for name, value in expect.items():
        assert getattr(lm.spec, name) == value
    assert lm.spec.mask_id == MASK and set(lm.spec.eos_ids) == {EOS, 37} and lm.spec.pad_id == PAD
    same_logits(lm, full_net(model), prompt(6))
    out = lm.generate(prompt(6), max_new_tokens=9, eos_token_id=(), return_dict_in_generate=True)
    assert out.sequences.shape == (1, 15) and not (out.sequences == MASK).any()
    # a block cache, where the family has one, changes nothing
    assert torch.equal(lm.generate(prompt(6), max_new_tokens=9, eos_token_id=(), cache="none"), out.sequences)


def llada2_forward(w, c, ids):
    """LLaDA2's forward from its public key names, with torch alone and full attention. ids [N] -> logits [N, V]."""

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]) * weight

    def mlp(x, p):
        return F.linear(
            F.silu(F.linear(x, w[p + "gate_proj.weight"])) * F.linear(x, w[p + "up_proj.weight"]),
            w[p + "down_proj.weight"],
        )

    heads, groups, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    rot = int(dim * c["partial_rotary_factor"])
    angle = torch.arange(len(ids))[:, None] / c["rope_theta"] ** (torch.arange(0, rot, 2) / rot)
    cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]

    def rope(x):
        a, b = x[..., : rot // 2], x[..., rot // 2 : rot]
        return torch.cat([x[..., :rot] * cos + torch.cat([-b, a], -1) * sin, x[..., rot:]], -1)

    x = w["model.word_embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"])
        qkv = F.linear(h, w[p + "attention.query_key_value.weight"]).view(len(ids), heads + 2 * groups, dim)
        q = rope(norm(qkv[:, :heads], w[p + "attention.query_layernorm.weight"]))
        k = rope(norm(qkv[:, heads : heads + groups], w[p + "attention.key_layernorm.weight"]))
        v = qkv[:, heads + groups :]
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        att = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim), -1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", att, v).reshape(len(ids), -1), w[p + "attention.dense.weight"])
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        if i < c["first_k_dense_replace"]:
            x = x + mlp(h, p + "mlp.")
            continue
        out = torch.zeros_like(x)
        for t in range(len(ids)):
            score = torch.sigmoid(w[p + "mlp.gate.weight"] @ h[t])
            biased = (score + w[p + "mlp.gate.expert_bias"]).view(c["n_group"], -1)
            good = biased.sort(-1).values[:, -2:].sum(-1).argsort(descending=True)[: c["topk_group"]].tolist()
            per = biased.shape[1]
            ranked = sorted(((g * per + j) for g in good for j in range(per)), key=lambda e: -float(biased.view(-1)[e]))
            chosen = ranked[: c["num_experts_per_tok"]]
            total = sum(score[e] for e in chosen)
            for e in chosen:
                out[t] += mlp(h[t], p + f"mlp.experts.{e}.") * score[e] / total * c["routed_scaling_factor"]
        x = x + out + mlp(h, p + "mlp.shared_experts.")
    return F.linear(norm(x, w["model.norm.weight"]), w["lm_head.weight"])


def llada2_checkpoint(folder):
    c = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "rope_theta": 600000.0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "use_qk_norm": True,
        "norm_topk_prob": True,
        "pad_token_id": EOS,
        "eos_token_id": EOS,
        "mask_token_id": MASK,
        "block_size": 8,
    }
    g = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=g) * 0.3

    w = {
        "model.word_embeddings.weight": rand(VOCAB, 32),
        "model.norm.weight": 1 + rand(32),
        "lm_head.weight": rand(VOCAB, 32),
    }

    def mlp(p, inner):
        w.update(
            {
                p + "gate_proj.weight": rand(inner, 32),
                p + "up_proj.weight": rand(inner, 32),
                p + "down_proj.weight": rand(32, inner),
            }
        )

    for i in range(2):
        p = f"model.layers.{i}."
        w[p + "input_layernorm.weight"], w[p + "post_attention_layernorm.weight"] = 1 + rand(32), 1 + rand(32)
        w[p + "attention.query_key_value.weight"], w[p + "attention.dense.weight"] = rand(64, 32), rand(32, 32)
        w[p + "attention.query_layernorm.weight"], w[p + "attention.key_layernorm.weight"] = 1 + rand(8), 1 + rand(8)
        if i == 0:
            mlp(p + "mlp.", 40)
        else:
            w[p + "mlp.gate.weight"], w[p + "mlp.gate.expert_bias"] = rand(8, 32), rand(8)
            mlp(p + "mlp.shared_experts.", 16)
            for e in range(8):
                mlp(p + f"mlp.experts.{e}.", 16)
    return write(folder, w, c), w, c


def test_llada2(tmp_path):
    path, w, c = llada2_checkpoint(tmp_path / "m")
    lm = DiffusionLM.from_pretrained(path)
    assert (lm.spec.name, lm.spec.block_size, lm.spec.mask_id, lm.spec.eos_ids) == ("llada2.0", 8, MASK, (EOS,))
    same_logits(lm, lambda ids: llada2_forward(w, c, ids), prompt(9))
    cached, plain = (lm.generate(prompt(11), max_new_tokens=13, eos_token_id=(), cache=k) for k in ("block", "none"))
    assert torch.equal(cached, plain)
    edited = DiffusionLM.from_pretrained(path, preset="llada2.1").generate(prompt(5), max_new_tokens=8, eos_token_id=())
    assert edited.shape == (1, 13)


def bd3lm_forward(w, c, ids):
    """BD3-LM's transformer with torch alone, sigma = 0, full attention."""
    size, heads = c["hidden_dim"], c["n_heads"]
    time = torch.cat([torch.ones(128), torch.zeros(128)])
    p = "backbone.sigma_map.mlp."
    cond = F.silu(
        F.linear(F.silu(F.linear(time, w[p + "0.weight"], w[p + "0.bias"])), w[p + "2.weight"], w[p + "2.bias"])
    )
    dim = size // heads
    angle = torch.arange(len(ids))[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]

    def rope(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def norm(x, weight):
        return F.layer_norm(x, [size]) * weight

    x = w["backbone.vocab_embed.embedding"][ids]
    for i in range(c["n_blocks"]):
        p = f"backbone.blocks.{i}."
        m = F.linear(cond, w[p + "adaLN_modulation.weight"], w[p + "adaLN_modulation.bias"]).chunk(6)
        qkv = F.linear(norm(x, w[p + "norm1.weight"]) * (1 + m[1]) + m[0], w[p + "attn_qkv.weight"]).view(
            len(ids), 3, heads, dim
        )
        q, k, v = rope(qkv[:, 0]), rope(qkv[:, 1]), qkv[:, 2]
        att = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim), -1)
        x = x + m[2] * F.linear(torch.einsum("hqk,khd->qhd", att, v).reshape(len(ids), -1), w[p + "attn_out.weight"])
        h = norm(x, w[p + "norm2.weight"]) * (1 + m[4]) + m[3]
        h = F.gelu(F.linear(h, w[p + "mlp.0.weight"], w[p + "mlp.0.bias"]), approximate="tanh")
        x = x + m[5] * F.linear(h, w[p + "mlp.2.weight"], w[p + "mlp.2.bias"])
    p = "backbone.output_layer."
    m = F.linear(cond, w[p + "adaLN_modulation.weight"], w[p + "adaLN_modulation.bias"]).chunk(2)
    return F.linear(
        norm(x, w[p + "norm_final.weight"]) * (1 + m[1]) + m[0], w[p + "linear.weight"], w[p + "linear.bias"]
    )


@pytest.mark.parametrize("arch", ["BD3LM", "MDLM"])
def test_bd3lm_and_mdlm(tmp_path, arch):
    c = {
        "architectures": [arch],
        "model_type": arch.lower(),
        "vocab_size": VOCAB,
        "block_size": 4,
        "hidden_dim": 32,
        "n_heads": 4,
        "n_blocks": 2,
        "cond_dim": 16,
        "model_length": 64,
        "adaln": True,
        "time_conditioning": False,
        "attn_backend": "sdpa",
    }
    g = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=g) * 0.3

    w = {"backbone.vocab_embed.embedding": rand(VOCAB, 32), "backbone.rotary_emb.inv_freq": torch.ones(4)}
    for name, shape in {
        "sigma_map.mlp.0": (16, 256),
        "sigma_map.mlp.2": (16, 16),
        "output_layer.linear": (VOCAB, 32),
        "output_layer.adaLN_modulation": (64, 16),
    }.items():
        w[f"backbone.{name}.weight"], w[f"backbone.{name}.bias"] = rand(*shape), rand(shape[0])
    w["backbone.output_layer.norm_final.weight"] = 1 + rand(32)
    for i in range(2):
        p = f"backbone.blocks.{i}."
        w[p + "attn_qkv.weight"], w[p + "attn_out.weight"] = rand(96, 32), rand(32, 32)
        w[p + "norm1.weight"], w[p + "norm2.weight"] = 1 + rand(32), 1 + rand(32)
        for name, shape in {"mlp.0": (128, 32), "mlp.2": (32, 128), "adaLN_modulation": (192, 16)}.items():
            w[p + name + ".weight"], w[p + name + ".bias"] = rand(*shape), rand(shape[0])
    lm = DiffusionLM.from_pretrained(write(tmp_path / "m", w, c))
    assert lm.spec.mask_id == VOCAB - 1
    assert lm.spec.attention == ("block_causal" if arch == "BD3LM" else "full")
    same_logits(lm, lambda ids: bd3lm_forward(w, c, ids), prompt(9))
    out = lm.generate(prompt(5), max_new_tokens=7, seed=1, temperature=1.0)
    assert out.shape == (1, 12)
    if arch == "BD3LM":
        assert torch.equal(out, lm.generate(prompt(5), max_new_tokens=7, seed=1, temperature=1.0, cache="none"))
    with pytest.raises(UnsupportedError, match="time"):
        DiffusionLM.from_pretrained(write(tmp_path / "x", w, {**c, "time_conditioning": True}))


def test_masked_lm_of_bert_type(tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
        initializer_range=0.3,
    )
    bert = BertForMaskedLM(config).eval()
    bert.save_pretrained(tmp_path / "m")
    tokenizer_files(tmp_path / "m", mask_id=30)
    lm = DiffusionLM.from_pretrained(str(tmp_path / "m"), forbidden_ids=())
    assert lm.spec.mask_id == 30
    ids = prompt(10)
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, 3:6] = True
    out = lm.infill(ids, hole, policy="any_order", order="left")
    x = ids[0].clone()
    x[3:6] = 30
    for i in (3, 4, 5):
        logits = bert(input_ids=x[None]).logits[0, i]
        logits[30] = -torch.inf
        x[i] = logits.argmax()
    assert out[0].tolist() == x.tolist()
    # padding has no effect
    padded = torch.cat([torch.full((1, 3), 5), ids], 1)
    mask = torch.tensor([[0] * 3 + [1] * 10])
    assert torch.equal(lm.infill(padded, F.pad(hole, (3, 0)), mask, policy="any_order", order="left")[:, 3:], out)
    with pytest.raises(UnsupportedError, match="positions"):
        lm.generate(prompt(38), max_new_tokens=5)
    with pytest.raises(UnsupportedError, match="cache"):
        lm.generate(prompt(5), max_new_tokens=5, cache="dual")


def test_a_masked_lm_of_another_vocabulary_says_its_own_ids(tmp_path):
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=40,
    )
    model = RobertaForMaskedLM(config)
    want = ((2,), (0, 1), 1)
    got = DiffusionLM(model, mask_id=199).spec
    assert (got.eos_ids, got.forbidden_ids, got.pad, got.mask_id) == (*want, 199)
    with pytest.raises(InvalidInputError, match="mask_id="):
        DiffusionLM(model)
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(InvalidInputError, match="mask_id="):
        DiffusionLM.from_pretrained(str(tmp_path / "m"))
    assert DiffusionLM.from_pretrained(str(tmp_path / "m"), mask_id=199).spec == got
    tokenizer_files(tmp_path / "t", mask_id=30)
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    tok = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, mask_token="<|mask|>", cls_token="w0", eos_token="w2", unk_token="w3"
    )
    lm = DiffusionLM.from_pretrained(str(tmp_path / "m"), tokenizer=tok)
    assert (lm.spec.eos_ids, lm.spec.forbidden_ids, lm.spec.pad, lm.spec.mask_id) == ((2,), (0, 1, 3), 1, 30)
    assert lm.tokenizer is tok
    # BERT's own ids stand where its config says nothing
    bert = BertForMaskedLM(BertConfig(vocab_size=200, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    spec = DiffusionLM(bert).spec
    assert (spec.eos_ids, spec.forbidden_ids, spec.pad, spec.mask_id) == ((102,), (0, 100, 101), 0, 103)


def test_a_native_moe_class_with_a_preset():
    """LLaDA-MoE: the same decoder on any native mixture-of-experts class."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )
    lm = DiffusionLM(model, preset="llada", mask_id=MASK, eos_ids=(), pad_id=0)
    out = lm.generate(prompt(5).repeat(2, 1), max_new_tokens=6, steps=3, return_dict_in_generate=True)
    assert out.stats.nfe == [3, 3] and torch.equal(out.sequences[0], out.sequences[1])


class TinyE2D2(torch.nn.Module):
    """A clean encoder and a smaller denoiser that reads the encoder's cache: the E2D2 contract."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.vocab_size, self.layers, self.sliding = VOCAB, 1, [None]
        self.embed = torch.nn.Embedding(VOCAB, 16)
        self.place = torch.nn.Embedding(64, 16)
        self.qkv = torch.nn.Linear(16, 48)
        self.small = torch.nn.Linear(16, 48)
        self.head = torch.nn.Linear(16, VOCAB)

    def split(self, layer, ids, positions):
        return [t[:, None] for t in layer(self.embed(ids) + self.place(positions)).chunk(3, -1)]

    def encode(self, ids, positions, masks, cache):
        _, k, v = self.split(self.qkv, ids, positions)
        cache.update(k, v, 0)

    def decode(self, ids, positions, masks, cache, conditioning, conditioned):
        q, k, v = self.split(self.small, ids, positions)
        layer = cache.layers[0]
        k, v = torch.cat([layer.keys, k], 2), torch.cat([layer.values, v], 2)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[None])[:, 0]
        return self.head(x * 8)


def test_e2d2_contract():
    model = TinyE2D2().eval()
    spec = DLMSpec(
        name="e2d2", mask_id=MASK, pad_id=PAD, attention="causal_context", block_size=4, commit="encoder", cache="block"
    )
    lm = DiffusionLM(model, spec)
    rows = [prompt(3)[0], prompt(6, 2)[0]]
    solo = [lm.generate(r[None], max_new_tokens=9)[0, -9:].tolist() for r in rows]
    ids, mask = torch.full((2, 6), PAD), torch.ones(2, 6)
    ids[0, 3:], ids[1], mask[0, :3] = rows[0], rows[1], 0
    assert lm.generate(ids, mask, max_new_tokens=9)[:, -9:].tolist() == solo
    with pytest.raises(UnsupportedError, match="encode"):
        DiffusionLM(torch.nn.Linear(2, 2), spec)
    with pytest.raises(UnsupportedError, match="cache"):
        lm.generate(ids, mask, max_new_tokens=4, cache="none")


def test_continuous_diffusion_and_strangers_are_refused_by_name(tmp_path):
    for arch, kind in (("PlaidModel", "plaid"), ("DiT", "dit"), ("DiffusionLM", "diffusion-lm")):
        path = write(tmp_path / kind, {"x": torch.zeros(1)}, {"architectures": [arch], "model_type": kind})
        with pytest.raises(UnsupportedError, match="continuous embedding diffusion"):
            DiffusionLM.from_pretrained(path)
    path = write(tmp_path / "z", {"x": torch.zeros(1)}, {"architectures": ["ZebraForCausalLM"], "model_type": "zebra"})
    with pytest.raises(UnsupportedError, match="ZebraForCausalLM"):
        DiffusionLM.from_pretrained(path)
    with pytest.raises(UnsupportedError, match="EncoderDecoder"):
        DiffusionLM.from_pretrained(
            write(tmp_path / "e", {"x": torch.zeros(1)}, {"architectures": ["E2D2"], "model_type": "e2d2"})
        )
    with pytest.raises(UnsupportedError, match="continuous"):
        DLMSpec(corruption="gaussian", mask_id=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="preset"):
        DiffusionLM(LlamaForCausalLM(LlamaConfig(**SMALL)))
    with pytest.raises(InvalidInputError, match="outside the model's vocabulary"):
        DiffusionLM(LlamaForCausalLM(LlamaConfig(**SMALL)), preset="llada")
