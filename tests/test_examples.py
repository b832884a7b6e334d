"""Every script of examples/ runs offline as it stands, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SAYS = {
    "wrap_a_model.py": ["same tokens as ar.generate: True"],
    "stream.py": ["-- a streamer", "-- an iterator"],
    "batch.py": ["What is 12 times 7?", "tokens, "],
    "sample_with_a_seed.py": ["repeated: True", "coupled equals plain decoding with that seed: True"],
    "inside_generate.py": ["oon"],
    "read_the_stats.py": ["tau", "acceptance by position"],
    "own_drafter.py": ["same tokens as ar.generate: True"],
}


def test_every_example_is_listed_here():
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name, model_pair, tmp_path):
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in SAYS[name]:
        assert text in done.stdout
    if name == "stream.py":
        first, second = done.stdout.split("-- an iterator; leaving the block early ends the generation\n")
        assert first.removeprefix("-- a streamer\n").strip() == second.strip()
