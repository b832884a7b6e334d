"""Other programs with the zoo's plain drafter: stock transformers here, vLLM where there is an environment for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats.export import export
from specdiff.drafters.loading import locate, zoo
from specdiff.drafters.saving import load

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "smollm2-135m-instruct-plain"
TEXTS = ("What is the capital of France?", "Write one sentence about rain.", "Count from one to ten.")

sys.path.insert(0, str(ROOT / "benchmarks" / "clients"))


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def test_the_zoo_has_a_plain_drafter():
    """One that every layout of a plain block can hold."""
    assert PLAIN in zoo()
    drafter = load(locate(PLAIN))
    assert drafter.config.plain and drafter.draft_ids is None


@pytest.mark.slow
@pytest.mark.model
def test_stock_transformers_writes_the_same_text(model_pair, prompts, tmp_path):
    """``generate(speculation_type="dflash")`` with the export: our text, our accepted tokens."""
    import common
    from transformers_dflash import Stock

    model, tokenizer = model_pair
    folder = tmp_path / "muse"
    export(load(locate(PLAIN), target=model), folder, "muse", target=model)
    drafter = DFlashDrafter.from_pretrained(folder, model)
    asked = common.prompts(prompts, 3, tokenizer)
    found = common.compare(model, drafter, asked, 24, Stock(model, folder))["summary"]
    assert found["same_text"] == 3, found["mismatches"]
    assert found["ours"]["accepted"] > 0
    assert found["theirs"]["accepted"] == pytest.approx(found["ours"]["accepted"], abs=2)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif("SPECDIFF_VLLM_ENV" not in os.environ, reason="SPECDIFF_VLLM_ENV names no environment with vLLM")
def test_vllm_serves_the_same_text(prompts, tmp_path):
    """The script against a real server; greedy text equal, accepted tokens within a tenth."""
    out = tmp_path / "vllm.json"
    script = ROOT / "benchmarks" / "clients" / "vllm_cpu.py"
    subprocess.run(
        [sys.executable, script, "--env", os.environ["SPECDIFF_VLLM_ENV"], "--prompts", prompts, "--count", "3",
         "--max-new-tokens", "24", "--out", out],
        check=True,
    )  # fmt: skip
    found = json.loads(out.read_text())["summary"]
    assert found["same_text"] == 3, found["mismatches"]
    assert found["accepted_ratio"] == pytest.approx(1.0, abs=0.1)
