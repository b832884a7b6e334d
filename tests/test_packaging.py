"""What is shipped, what importing costs, and that the folders stay on their floors."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from readme import setup_commands

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"specdiff": "specdiff", "specdiff/drafters": "drafters", "specdiff/verify": "verify"}
"""Place in the package: folder in the checkout."""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def sources(root: Path = ROOT, suffixes: tuple[str, ...] = (".py",)) -> dict[str, Path]:
    """Every Python file of the package: place in the package, file in the checkout."""
    found = {}
    for place, folder in FOLDERS.items():
        for path in (root / folder).rglob("*"):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                found[f"{place}/{path.relative_to(root / folder).as_posix()}"] = path
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[list[str], Path]:
    """Names in the wheel and the folder it was built from: ``SPECDIFF_WHEEL`` of this checkout, else one of a copy."""
    wheel, root = os.environ.get("SPECDIFF_WHEEL"), ROOT
    if not wheel:
        root = tmp_path_factory.mktemp("source")
        for name in ("specdiff", "drafters", "verify"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, root / name)
        out = tmp_path_factory.mktemp("dist")
        options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(out)]
        command = [sys.executable, "-m", "pip", "wheel", *options, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        wheel = str(next(out.glob("*.whl")))
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist(), root


def test_specdiff_is_the_only_top_level_name(built):
    tops = {name.split("/")[0] for name in built[0]}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specdiff"}


def test_every_module_is_in_the_wheel(built):
    names, root = built
    modules = set(sources(root))
    assert len(modules) > 50 and modules - set(names) == set()


def test_data_and_licence_are_in_the_wheel(built):
    names, root = built
    wanted = {"specdiff/py.typed", *sources(root, (".json", ".jsonl", ".safetensors", ".md"))}
    assert wanted - set(names) == set()
    assert any(re.fullmatch(r"specdiff-[^/]+\.dist-info/licenses/LICENSE", name) for name in names)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_verify_loads_torch_but_not_transformers():
    loaded = run_python("import sys, specdiff.verify; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert loaded.split() == ["True", "False"]


def test_importing_specdiff_loads_neither():
    loaded = run_python("import sys, specdiff; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert loaded.split() == ["False", "False"]


def test_the_command_lists_its_commands_without_loading_torch():
    code = (
        "import sys\nfrom specdiff.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    assert run_python(code).splitlines()[-1] == "0 False"


def test_every_public_name_can_be_loaded():
    code = "import specdiff\nfor name in specdiff.__all__: getattr(specdiff, name)\nprint(len(dir(specdiff)))"
    assert int(run_python(code)) > 10


SHARED = ("linear", "norm", "recording", "uploads")
"""Of ``specdiff.fast``: what drafters use too."""
TORCH_ONLY = ("specdiff/arguments.py", "specdiff/errors.py", *(f"specdiff/fast/{name}.py" for name in SHARED))
"""Files that import nothing of specdiff but errors, so that any floor may use them."""
GROUND = ("specdiff.arguments", "specdiff.errors", *(f"specdiff.fast.{name}" for name in SHARED), "specdiff.verify")
FLOORS = {
    "specdiff/verify/": GROUND,
    "specdiff/diffusion/": (*GROUND, "specdiff.diffusion"),
    "specdiff/drafters/": (*GROUND, "specdiff.diffusion", "specdiff.drafters"),
}
UPWARD = {
    ("specdiff/diffusion/lm.py", "specdiff.drafters.block_lm"): "inside the method that turns the model into a drafter",
}
"""Imports that do look up, and why that is harmless."""


def imported(path: Path) -> set[str]:
    """Names of specdiff modules that a file imports, those for type checkers aside."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(names if node.module == "specdiff" else [node.module])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return {name for name in found if name.split(".")[0] == "specdiff"}


def below(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == floor or name.startswith(floor + ".") for floor in allowed)


def test_nothing_imports_upward():
    places = sources()
    wrong = {
        (place, name)
        for place, path in places.items()
        for floor, allowed in FLOORS.items()
        if place.startswith(floor)
        for name in imported(path)
        if not below(name, allowed)
    }
    assert wrong == set(UPWARD)
    for place in TORCH_ONLY:
        assert imported(places[place]) <= {"specdiff.errors"}


def test_no_pickle_anywhere():
    banned = re.compile(r"\b(torch\.load|torch\.save|pickle\.loads?|pickle\.dumps?)\(")
    assert [place for place, path in sources().items() if banned.search(path.read_text(encoding="utf-8"))] == []


def test_the_offline_model_needs_no_extra():
    """transformers reads GGUF files with these; README's first line installs the package alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in project["dependencies"]}
    assert {"accelerate", "gguf", "safetensors", "transformers"} <= names


def test_constraints_lie_within_the_declared_ranges():
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pinned[name.lower().replace("_", "-")] = version
    declared = project()["project"]
    groups = [declared["dependencies"], *declared["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        if requirement.name == "specdiff":
            continue
        assert requirement.name in pinned, f"{requirement.name} has no tested version in constraints.txt"
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_a_library_pins_nothing_exactly():
    for text in project()["project"]["dependencies"]:
        assert "==" not in text.split(";")[0]


def test_changelog_knows_this_version():
    assert f"## {project()['project']['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_version_is_said_once():
    import specdiff

    assert specdiff.__version__ == project()["project"]["version"]


def test_readme_has_two_one_line_commands():
    commands = setup_commands()
    assert commands["demo"].endswith("specdiff demo")
    for command in commands.values():
        assert "-c constraints.txt" in command and "\n" not in command


def test_readme_names_every_command():
    from specdiff.cli import COMMANDS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `specdiff {name}" not in text] == []


@pytest.mark.parametrize(
    ("listed", "strict", "code"), [("", "1", 1), ("test_it.py::test_s*  # why", "1", 0), ("", "", 0)]
)
def test_a_skip_that_is_not_listed_fails_in_ci(listed, strict, code, tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "allowed_skips.txt").write_text(listed + "\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_skips(): pytest.skip('no reason')\ndef test_runs(): pass\n"
        "@pytest.mark.xfail\ndef test_expected(): assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "SPECDIFF_STRICT_SKIPS": strict}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert ("test_it.py::test_skips: " in done.stdout) == (code == 1)


def test_licence_is_apache():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and len(text) > 11_000
