"""``specdiff env``: what this installation runs on, for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from typing import Any

from specdiff.cli import codes

LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "gguf", "triton", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(args: argparse.Namespace) -> int:
    """Report."""
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
        return codes.OK
    for section, values in report.items():
        print(section)
        for name, value in values.items():
            print(f"  {name:<18} {'-' if value is None else value}")
    return codes.OK


def collect() -> dict[str, dict[str, Any]]:
    """The report, as plain JSON types by section."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "torch": _torch(),
        "files": _files(),
    }


def _versions() -> dict[str, Any]:
    from specdiff import __version__

    found: dict[str, Any] = {"specdiff": __version__, "python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine: dict[str, Any] = {"system": platform.platform(), "processor": _processor(), "usable cores": cores}
    if importlib.util.find_spec("psutil"):
        import psutil

        machine["memory GB"] = round(psutil.virtual_memory().total / 1e9, 1)
    return machine


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _torch() -> dict[str, Any]:
    import torch

    report: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "quantised engines": ", ".join(torch.backends.quantized.supported_engines),
        "cuda": torch.version.cuda,
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        report[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    return report


def _files() -> dict[str, Any]:
    from specdiff.hub.default import RECIPE, default_folder
    from specdiff.hub.store import cache_folder, damage

    folder = default_folder()
    if not folder.is_dir():
        state = "not there yet; made at first use"
    else:
        problem = damage(folder, RECIPE)
        state = "ready" if problem is None else f"made again at next use: {problem}"
    return {"cache": str(cache_folder()), "offline model": state}
