"""The Triton kernels. Their cases run in a process of their own: the interpreter must be on before triton loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
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


class Compilation(Exception):
    """Stands for triton's own."""

    __module__ = "triton.compiler.errors"


def raised_in(module: str, error: Exception) -> Callable[..., None]:
    """A function of ``module`` that raises."""
    space = {"__name__": module, "error": error}
    exec("def fail(*_):\n    raise error", space)
    return space["fail"]


@pytest.fixture
def attempts(monkeypatch):
    """``attempts(fail) -> verdicts``: two calls of verify whose kernels fail so, and the verdict without kernels."""
    noise = Noise(row_seeds(0, 1)).round(torch.tensor([3]))
    scores = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(torch.tensor([[1, 2]]), torch.tensor([2]))
    right = verify("block", scores, proposal, noise)
    monkeypatch.setattr(kernels, "_refused", set())
    monkeypatch.setattr(kernels, "serve", lambda *_: not kernels._refused)

    def run(fail: Callable[..., None] | None) -> int:
        tried = []
        launch = fail or kernels.fused_verify
        monkeypatch.setattr(kernels, "fused_verify", lambda *a: tried.append(1) or launch(*a))
        for _ in range(2):
            found = verify("block", scores, proposal, noise)
            assert torch.equal(found.next_token, right.next_token) and torch.equal(found.accepted, right.accepted)
        return len(tried)

    return run


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (raised_in("triton.runtime.build", RuntimeError("Failed to find C compiler\nmore")), "C compiler ... more"),
        (raised_in(__name__, Compilation("at 5:10:\nsource\nno such thing")), "no such thing"),
        (raised_in("subprocess", subprocess.CalledProcessError(1, ["gcc"])), "CalledProcessError"),
        (raised_in("subprocess", FileNotFoundError("/opt/cc")), "/opt/cc"),
        (raised_in("triton", ImportError("libtriton.so: undefined symbol", name="triton._C.libtriton")), "libtriton"),
    ],
)
def test_kernels_that_do_not_start_leave_the_work_to_torch(attempts, caplog, fail, words):
    assert attempts(fail) == 1
    assert len(caplog.records) == 1 and words in caplog.text


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="triton starts where there is a GPU")
def test_triton_without_a_driver_leaves_the_work_to_torch(attempts, caplog):
    assert attempts(None) == 1
    assert "RuntimeError" in caplog.text and "driver" in caplog.text


@pytest.mark.parametrize(
    "fail",
    [
        raised_in("specdiff.verify.kernels.launch", RuntimeError("The size of tensor a (3) must match")),
        raised_in("specdiff.verify.kernels.launch", torch.OutOfMemoryError("CUDA out of memory")),
        raised_in("specdiff.verify.kernels.launch", ImportError("no name", name="specdiff.verify.prepare")),
        raised_in("triton.runtime.jit", KeyError("Keyword argument TILES was specified but unrecognised")),
        raised_in("specdiff.verify.kernels.launch", TypeError("missing 1 required positional argument")),
    ],
)
def test_faults_of_kernels_are_raised(attempts, fail):
    with pytest.raises((RuntimeError, ImportError, KeyError, TypeError)):
        attempts(fail)
    assert not kernels._refused
