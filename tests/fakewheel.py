"""A tiny Llama in a GGUF file inside a wheel: the offline default's whole way, in a second and without a network."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from specdiff.hub.wheel import WheelFile

HIDDEN, HEADS, LAYERS, FEED = 32, 2, 2, 64
PROJECT, VERSION, MEMBER = "specdiff-fake-model", "1.0", "specdiff_fake_model/tiny.gguf"


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(extra)) for b in range(256)]


def write_gguf(path: Path) -> None:
    """A random two-layer Llama with a byte-level tokenizer whose one merge joins two spaces."""
    letters = _byte_letters()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, letters[32] * 2]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1_000_000)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges([f"{letters[32]} {letters[32]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.1).astype(np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", FEED, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED)
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(folder: Path) -> WheelFile:
    """Write the wheel into ``folder`` and say what it should look like."""
    gguf = folder / "tiny.gguf"
    write_gguf(gguf)
    content = gguf.read_bytes()
    gguf.unlink()
    name = PROJECT.replace("-", "_")
    wheel = folder / f"{name}-{VERSION}-py3-none-any.whl"
    info = f"{name}-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    packed = wheel.read_bytes()
    return WheelFile(
        project=PROJECT,
        version=VERSION,
        wheel_sha256=hashlib.sha256(packed).hexdigest(),
        wheel_bytes=len(packed),
        member=MEMBER,
        member_sha256=hashlib.sha256(content).hexdigest(),
    )
