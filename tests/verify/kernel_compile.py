"""Compile every kernel for a GPU, without one; ``test_kernels.py`` runs this. (The interpreter is the laxer one.)"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdiff.verify.kernels import fused, sample

POINTERS = {
    "logits": "bf16", "target": "bf16", "draft": "fp32", "row_states": "i64", "lengths": "i64", "round_lengths": "i64",
    "ids": "i64", "tokens": "i64", "accepted": "i64", "next_token": "i64", "bad": "i32", "best_column": "i32",
    "broken": "i32", "one_hot": "i32", "usable_length": "i32", "forced": "i32", "inverse": "i32", "rest_id": "i32",
    "full_id": "i32",
}  # fmt: skip
FLOATS = {"inverse_temperature", "draft_inverse_temperature"}
NUMBERS = {"slots", "vocab", "width", "splits", "target_splits", "draft_splits"}
STRIDES = {f"{who}_{axis}" for who in ("target", "draft") for axis in "bsv"}
FLAGS = {"PURPOSE": 2, "TILE": 4096, "SPLITS": 16, "TARGET_SPLITS": 16, "DRAFT_SPLITS": 16}


def compile_for(kernel, arch: int, on: bool) -> int:
    """Size of the machine code of ``kernel`` with all its flags on or off."""
    signature, constants = {}, {}
    for name in kernel.arg_names:
        if name.isupper():
            signature[name], constants[name] = "constexpr", FLAGS.get(name, on)
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name in NUMBERS or name.startswith("stride_") or name in STRIDES:
            signature[name] = "i32"
        elif name == "bad" and kernel is sample.sample_finish:
            signature[name] = "*i1"
        else:
            signature[name] = "*" + POINTERS.get(name, "fp32")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"])


KERNELS = [
    sample.sample_tiles, sample.sample_finish, fused.row_statistics, fused.decide_prefix, fused.mass_tiles,
    fused.accept, fused.draw_tiles, fused.draw_finish,
]  # fmt: skip

if __name__ == "__main__":
    for kernel in KERNELS:
        for on in (True, False):
            print(kernel.__name__, on, compile_for(kernel, 90, on))
