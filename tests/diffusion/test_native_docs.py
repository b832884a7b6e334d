"""The docs name what exists: every test in docs/systems.md, every policy and cache in docs/native.md."""

from __future__ import annotations

import re
from pathlib import Path

from specdiff.diffusion.caches import CACHES
from specdiff.diffusion.checkpoints.registry import FAMILIES
from specdiff.diffusion.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_named_in_the_table_of_systems_exists():
    text = (ROOT / "docs" / "systems.md").read_text()
    missing, last, count = [], None, 0
    for name in re.findall(r"`([\w/]*(?:\.py)?(?:::\w+)?)`", text):
        if not (".py" in name or name.startswith("::")):
            continue
        file, _, test = name.partition("::")
        if file:
            last = ROOT / (file if "/" in file else f"tests/diffusion/{file}")
        count += 1
        assert last is not None
        if not last.is_file() or (test and f"def {test}(" not in last.read_text()):
            missing.append(name)
    assert not missing
    assert count > 40


def test_the_tables_of_native_mode_are_complete():
    text = (ROOT / "docs" / "native.md").read_text()
    for name in [*POLICIES, *CACHES, *FAMILIES]:
        assert f"`{name}`" in text or name == "LLaDA2MoeForCausalLM", name
