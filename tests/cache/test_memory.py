"""B50: what a long prompt costs in memory, beside plain generate. Each measurement is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from specdiff import SpecDiff
from specdiff.testing import RandomDrafter

config = LlamaConfig(vocab_size=50000, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
sd = SpecDiff(model, RandomDrafter(50000, block_size=8), fast="off")
ids = torch.randint(5, 50000, (1, 4000))
run = {"generate": model.generate, "specdiff": sd.generate}[sys.argv[1]]
run(ids[:, :8], max_new_tokens=2, do_sample=False)
def peak(word):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(word))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = peak("VmRSS")
began = time.perf_counter()
run(ids, max_new_tokens=int(sys.argv[2]), do_sample=False)
print((peak("VmHWM") - before) / 1024, time.perf_counter() - began)
"""


def measure(what: str, new: int = 8) -> tuple[float, float]:
    """MiB above the state before the call, and seconds."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, what, str(new)], capture_output=True, text=True, check=True)
    memory, seconds = map(float, done.stdout.split()[-2:])
    return memory, seconds


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_b50_peak_memory_stays_near_generates():
    plain, ours = measure("generate")[0], measure("specdiff")[0]
    whole = 4000 * 50000 * 4 / 2**20  # float32 logits of the whole prompt, which neither may hold
    assert plain < whole and ours < whole / 4
    assert ours < 1.25 * plain + 32, (ours, plain)
