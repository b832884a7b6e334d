"""What the documents show must exist: imports, files that links name, commands and their options."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("drafters/zoo/*/README.md")]
)
ids = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(text: str, *languages: str) -> list[str]:
    """Contents of the fenced blocks of these languages ("" for none given)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_imports_of_examples_resolve(page):
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "specdiff":
                module = importlib.import_module(node.module)
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_to_files_resolve(page):
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_options_exist(page, capsys):
    from specdiff.cli import main

    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(text, "sh", "bash", "console", "") for line in block.splitlines()]
    lines += re.findall(r"`(specdiff [^`\n]+)`", text)
    for line in lines:
        words = line.split("#")[0].split()
        if len(words) < 2 or words[0] != "specdiff" or not words[1].isalpha() or not words[1].islower():
            continue
        with pytest.raises(SystemExit) as stop:
            main([words[1], "--help"])
        known = capsys.readouterr().out
        assert stop.value.code == 0, line
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", line.split("#")[0]):
            assert re.search(rf"{option}\b", known), f"{line!r}: no option {option}"
