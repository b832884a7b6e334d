"""The Triton kernels. Their cases run in a process of their own: the interpreter must be on before triton loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdiff.verify import Noise, Proposal, kernels, row_seeds, verify
from specdiff.verify.kernels import available, inverse_ids

HERE = Path(__file__).parent


needs_triton = pytest.mark.skipif(not available(), reason="triton is not installed (it is on Linux x86_64 only)")


@needs_triton
@pytest.mark.parametrize(
    ("selection", "at_least"),
    [("not slow", 30), pytest.param("slow", 250, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_kernels_equal_their_twins_in_the_interpreter(selection, at_least):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-m", selection]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(HERE / "kernel_cases.py")], env=environment, capture_output=True, text=True, timeout=3000
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    summary = run.stdout.strip().splitlines()[-1]
    assert int(re.search(r"(\d+) passed", summary)[1]) >= at_least
    assert "skipped" not in summary


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_a_gpu():
    """Down to machine code for compute capability 9.0; needs no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "kernel_compile.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    sizes = [int(line.split()[-1]) for line in run.stdout.strip().splitlines()]
    assert len(sizes) == 16
    assert min(sizes) > 0


def test_triton_is_not_needed_to_import():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import specdiff.verify, specdiff.verify.kernels as k\n"
        "import specdiff.verify.audit\n"
        "assert 'transformers' not in sys.modules\n"
        "assert 'specdiff.verify.kernels.launch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_inverse_ids():
    assert inverse_ids(torch.tensor([3, 0, 9, -1]), 5).tolist() == [1, -1, -1, 0, -1]


class FakeScores:
    dtype = torch.float32

    def __init__(self, is_cuda):
        self.is_cuda = is_cuda


def test_kernels_serve_cuda_tensors_alone(monkeypatch):
    noise = Noise(row_seeds(0, 1)).round(torch.tensor([3]))
    monkeypatch.setattr(kernels, "available", lambda: True)
    assert kernels.serve(FakeScores(True), noise)
    assert not kernels.serve(FakeScores(False), noise)
    assert not kernels.serve(FakeScores(True), object())  # somebody's own noise is not the counter hash
    monkeypatch.setenv("SPECDIFF_KERNELS", "off")
    assert not kernels.serve(FakeScores(True), noise)
    monkeypatch.delenv("SPECDIFF_KERNELS")
    monkeypatch.setattr(FakeScores, "dtype", torch.float64)
    assert not kernels.serve(FakeScores(True), noise)


def test_kernels_that_do_not_start_leave_the_work_to_torch(monkeypatch, caplog):
    noise = Noise(row_seeds(0, 1)).round(torch.tensor([3]))
    scores = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(torch.tensor([[1, 2]]), torch.tensor([2]))
    right = verify("block", scores, proposal, noise)
    tried = []

    def broken(*_):
        tried.append(1)
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(kernels, "_refused", set())
    monkeypatch.setattr(kernels, "fused_verify", broken)
    monkeypatch.setattr(kernels, "serve", lambda *_: not kernels._refused)
    for _ in range(2):
        found = verify("block", scores, proposal, noise)
        assert torch.equal(found.next_token, right.next_token) and torch.equal(found.accepted, right.accepted)
    assert tried == [1] and "Failed to find C compiler" in caplog.text
