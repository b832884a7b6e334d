"""Measured curves by machine and pair: in memory for the process, in the cache folder for the next one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdiff.drafters.base import Drafter
from specdiff.errors import InvalidInputError
from specdiff.hub.store import cache_folder
from specdiff.target import Target
from specdiff.tuning.curve import CostCurve
from specdiff.tuning.measure import Judge, measure_cost

if TYPE_CHECKING:
    from specdiff.wrap import SpecDiff

log = logging.getLogger(__name__)

SCHEMA = 1
BATCHES = (1, 4, 16)
"""Batch sizes that are measured; others use the nearest."""
REPEATS, SECONDS = 3, 4.0
"""Measurements per size, and seconds after which a curve is cut short (one measurement of each size is always made)."""
CAREFUL_REPEATS, CAREFUL_SECONDS = 15, 30.0
"""The same when somebody asked for the measurement."""

_BY_NAME: dict[str, CostCurve] = {}


def curve_for(wrapped: SpecDiff, target: Target, rows: int, judge: Judge) -> tuple[CostCurve, str | None]:
    """The curve for a request, measured now if it is not known yet.

    Args:
        wrapped: the pair.
        target: the target path of the request.
        rows: its rows.
        judge: what follows its target passes.

    Returns:
        The curve, and what to say when it had to be measured.
    """
    assert wrapped.drafter is not None
    batch = min(BATCHES, key=lambda size: abs(size - rows))
    pair, kind = pair_name(wrapped), kind_name(target, batch, judge)
    held = _BY_NAME if pair is not None else wrapped.curves
    name = kind if pair is None else f"{pair}-{kind}"
    curve = held.get(name)
    if curve is None and pair is not None:
        curve = read(name)
    note = None
    if curve is None:
        began = time.perf_counter()
        curve = _measured(wrapped, target, batch, rows, judge, REPEATS, SECONDS)
        note = (
            f"measured what passes cost here in {time.perf_counter() - began:.1f} s, once; specdiff tune measures anew"
        )
        log.info("%s", note)
        if pair is not None:
            write(name, curve)
    held[name] = curve
    return curve, note


def measure(
    wrapped: SpecDiff, target: Target, batch: int, judge: Judge, repeats: int = REPEATS, seconds: float = SECONDS
) -> CostCurve:
    """A curve with the points that block lengths are chosen from, for the drafter's whole block."""
    assert wrapped.drafter is not None
    block = wrapped.drafter.block_size
    return measure_cost(
        wrapped,
        target,
        inputs=sorted({1, 2, 3, 4, 8, 16, block + 1} & set(range(1, block + 2))),
        batch_size=batch,
        block=block,
        repeats=repeats,
        budget=0.0,
        limit=seconds,
        judge=judge,
    )


def _measured(
    wrapped: SpecDiff, target: Target, batch: int, rows: int, judge: Judge, repeats: int, seconds: float
) -> CostCurve:
    """With the usual batch size near ``rows``, or with ``rows`` where a drafter insists on its number of rows."""
    try:
        return measure(wrapped, target, batch, judge, repeats, seconds)
    except InvalidInputError:
        if batch == rows:
            raise
        return measure(wrapped, target, rows, judge, repeats, seconds)


def measure_anew(wrapped: SpecDiff, target: Target, rows: int, judge: Judge) -> CostCurve:
    """As :func:`curve_for`, whatever is known already, and taking its time."""
    batch = min(BATCHES, key=lambda size: abs(size - rows))
    curve = _measured(wrapped, target, batch, rows, judge, CAREFUL_REPEATS, CAREFUL_SECONDS)
    pair, kind = pair_name(wrapped), kind_name(target, batch, judge)
    if pair is None:
        wrapped.curves[kind] = curve
        return curve
    _BY_NAME[f"{pair}-{kind}"] = curve
    write(f"{pair}-{kind}", curve)
    return curve


def forget(wrapped: SpecDiff) -> None:
    """Drop what is known about this pair, here and in the cache folder."""
    pair = pair_name(wrapped)
    if pair is None:
        wrapped.curves.clear()
        return
    for name in [name for name in _BY_NAME if name.startswith(pair)]:
        del _BY_NAME[name]
    for file in folder().glob(f"{pair}-*.json"):
        file.unlink(missing_ok=True)


def folder() -> Path:
    """Where curves are kept."""
    return cache_folder() / "tuning"


def pair_name(wrapped: SpecDiff) -> str | None:
    """A name for machine and pair, by what their cost depends on; None when the drafter does not describe itself."""
    described = describe(wrapped.drafter)
    if described is None:
        return None
    config = {key: value for key, value in wrapped.config.to_dict().items() if not key.startswith("_")}
    parts = {
        "schema": SCHEMA,
        "machine": machine(wrapped.device),
        "torch": torch.__version__,
        "target": [type(wrapped.ar).__name__, str(wrapped.dtype), config],
        "attention": wrapped.config._attn_implementation,
        "drafter": described,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def kind_name(target: Target, batch: int, judge: Judge) -> str:
    """A name for a kind of request."""
    rule = "ratio" if judge.rule in ("token", "block") else judge.rule
    warps = [] if judge.warp.needs_ids else [type(p).__name__ for p in judge.warp.processors]
    words = "+".join([target.name, rule, *warps])
    return f"{target.name}-{rule}-{batch}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def describe(drafter: Drafter | None) -> list[Any] | None:
    """What a drafter's cost depends on: its ``cost_key()`` if it has one."""
    key = getattr(drafter, "cost_key", None)
    found = key() if key is not None else None
    return None if found is None else [type(drafter).__name__, found]


def machine(device: torch.device) -> list[Any]:
    """Processor, threads, and the accelerator if ``device`` is one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return [_processor(), os.cpu_count(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), name]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())


def read(name: str) -> CostCurve | None:
    """The curve of that name in the cache folder; None when there is none, or none that can be read."""
    path = folder() / f"{name}.json"
    try:
        return CostCurve.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be used (%s: %s); measuring anew", path, type(error).__name__, error)
        return None


def write(name: str, curve: CostCurve) -> None:
    """Keep a curve for the next process; a folder that cannot be written costs only that."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder(), suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(curve.to_dict(), file, indent=1)
        os.replace(path, folder() / f"{name}.json")
    except OSError as error:
        log.warning("the measured costs cannot be kept in %s: %s", folder(), error)
