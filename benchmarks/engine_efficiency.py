"""How much the engine loses: speed against what tau and the cost of passes allow, with a drafter that knows the text.

    python benchmarks/engine_efficiency.py [--target MODEL] [--new-tokens 96] [--fast auto|on|off] [--threads N]
    python benchmarks/engine_efficiency.py --shape 8b --dtype bfloat16 --device cuda --fast on

The second form takes random weights of a model of 8 billion parameters: speeds depend on shapes alone.

For each prompt, interleaved: Hugging Face ``generate``, specdiff's plain autoregressive decoding (K = 0), and replayed
texts of which one token per block of 8 is wrong, so that tau is known. Engine efficiency is

    measured speed-up over plain specdiff / (tau * t_step / (t_draft + t_verify))

with ``t_step`` a target pass over 1 input, ``t_verify`` one over 9, and ``t_draft`` a replayed proposal and its commit,
all measured beside the runs at the same context length. Speeds are decode speeds (prefill excluded).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from step_cost import cpu_name
from transformers import AutoModelForCausalLM, LlamaConfig

from specdiff import SpecDiff, load_target
from specdiff.bench.models import redrafted
from specdiff.testing import ReplayDrafter
from specdiff.tuning.measure import measure_cost

BLOCK = 8
PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived a clockmaker who",
    "The three most important causes of the French Revolution were",
    "def merge_sort(items):\n    '''Sort a list of numbers.'''\n",
    "Question: A train travels 60 km in 45 minutes. What is its average speed in km/h?\nAnswer:",
)


SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    },
}  # fmt: skip
"""Random models: ``8b`` is as large as Llama 3 8B, ``tiny`` tries the script."""


def random_model(shape: str, dtype: torch.dtype, device: str) -> Any:
    """A Llama of this shape with random weights, made where it will run."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape], eos_token_id=None), dtype=dtype).eval()


def decode_speed(wrapped: SpecDiff, ids: torch.Tensor, tokens: int) -> tuple[float, Any]:
    """Tokens per second after the prefill, and the output."""
    began = time.perf_counter()
    out = wrapped.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    spent = time.perf_counter() - began - out.stats.seconds["prefill"]
    return (tokens - 1) / spent, out


def stock_speed(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Tokens per second of plain ``generate`` after its prefill, which is timed as a request for one token."""
    spent = []
    for count in (1, tokens):
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
        spent.append(time.perf_counter() - began)
    return (tokens - 1) / (spent[1] - spent[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_of = parser.add_mutually_exclusive_group()
    model_of.add_argument("--target", help="folder or hub id; default: the offline default model")
    model_of.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a target")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="runs per prompt and arm")
    parser.add_argument("--taus", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--fast", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--threads", type=int, help="torch threads; default: as torch decides")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.shape:
        model, tokenizer = random_model(args.shape, dtype, args.device), None
    else:
        model, tokenizer = load_target(args.target, dtype=dtype)
        model.to(args.device)
    plain = SpecDiff(model, fast=args.fast)
    console = Console()
    console.print(f"{cpu_name()}, {torch.get_num_threads()} threads; torch {torch.__version__}, "
                  f"transformers {transformers.__version__}")  # fmt: skip
    stock: list[float] = []
    base: list[float] = []
    found: dict[int, dict[str, list[float]]] = {
        tau: {"tau": [], "speed": [], "speed_up": [], "possible": [], "efficiency": []} for tau in args.taus
    }
    for at, prompt in enumerate(PROMPTS):
        ids = torch.arange(at, at + 24)[None] if tokenizer is None else tokenizer(prompt, return_tensors="pt").input_ids
        ids = ids.to(model.device)
        _, out = decode_speed(plain, ids, args.new_tokens)
        text = out.sequences[:, ids.shape[1] :]
        pairs = {
            tau: redrafted(plain, ReplayDrafter(text, BLOCK, (tau - 1,) if tau <= BLOCK else ()), BLOCK)
            for tau in args.taus
        }
        context = ids.shape[1] + args.new_tokens // 2
        target, _ = plain.target_for(context + BLOCK + 2)
        for _ in range(args.repeats):
            stock.append(stock_speed(model, ids, args.new_tokens))
            for tau, pair in pairs.items():
                speed_plain, _ = decode_speed(plain, ids, args.new_tokens)
                speed, out = decode_speed(pair, ids, args.new_tokens)
                # In half precision passes over 9 inputs and over 1 round differently: near-ties then cost acceptance.
                assert dtype is not torch.float32 or torch.equal(out.sequences[:, ids.shape[1] :], text)
                cost = measure_cost(pair, target, inputs=(1, BLOCK + 1), context=context, repeats=3, budget=0.3)
                needed = cost.break_even()
                assert needed is not None
                base.append(speed_plain)
                measured = out.stats.tau
                values = (
                    measured,
                    speed,
                    speed / speed_plain,
                    measured / needed,
                    speed / speed_plain * needed / measured,
                )
                for name, value in zip(found[tau], values, strict=True):
                    found[tau][name].append(value)
    middle = statistics.median
    console.print(f"path: {out.stats.path}. Decode speed, tokens per second, medians: Hugging Face generate "
                  f"{middle(stock):.1f}, specdiff plain {middle(base):.1f} "
                  f"({middle(base) / middle(stock):.2f}x by kernels alone)")  # fmt: skip
    table = Table(title=f"replayed texts, blocks of {BLOCK}; medians over {len(PROMPTS)} prompts x {args.repeats} runs")
    for column in ("tau", "tokens/s", "over Hugging Face", "over plain specdiff", "possible", "engine efficiency"):
        table.add_column(column, justify="right")
    for rows in found.values():
        speed = middle(rows["speed"])
        table.add_row(
            f"{middle(rows['tau']):.2f}", f"{speed:.1f}", f"{speed / middle(stock):.2f}x",
            *(f"{middle(rows[name]):.2f}x" for name in ("speed_up", "possible")), f"{middle(rows['efficiency']):.3f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
