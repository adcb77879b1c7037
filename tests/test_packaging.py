"""What the package says about itself, and what it ships, is true."""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest
from click.testing import CliRunner

from fut_convert.recipe import recipe_names
from repository import REPOSITORY

DISTRIBUTION = "futransformer"
PACKAGES = ("fut_convert", "fut_runtime")
DATA = REPOSITORY / "fut_convert" / "data"
#: Import name to distribution name, where they differ.
DISTRIBUTIONS = {"yaml": "pyyaml", "huggingface_hub": "huggingface-hub"}


def console_scripts() -> dict[str, str]:
    """Name to `module:function` of each installed program."""
    entry_points = metadata.distribution(DISTRIBUTION).entry_points
    return {e.name: e.value for e in entry_points if e.group == "console_scripts"}


def test_programs_are_the_documented_three() -> None:
    assert set(console_scripts()) == {"fut-convert", "fut-run", "fut-artifact"}


@pytest.mark.parametrize("value", console_scripts().values())
def test_program_exists(value: str) -> None:
    module, function = value.split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("value", console_scripts().values())
def test_program_states_the_version_of_the_package(value: str) -> None:
    module, function = value.split(":")
    result = CliRunner().invoke(getattr(importlib.import_module(module), function), ["--version"])
    assert result.exit_code == 0
    assert metadata.version(DISTRIBUTION) in result.output


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed(package: str) -> None:
    assert resources.files(package).joinpath("py.typed").is_file()


def test_recipes_are_found() -> None:
    shipped = {path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")}
    assert shipped
    assert set(recipe_names()) == shipped


def test_help_does_not_import_torch() -> None:
    """A program that takes seconds to print its help is one that people stop asking."""
    modules = [value.split(":")[0] for value in console_scripts().values()]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules!r}]; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_imports_are_declared_dependencies() -> None:
    """Whatever the packages import is in the standard library or declared, optional dependencies included."""
    requirements = metadata.requires(DISTRIBUTION) or []
    declared = {re.split(r"[^\w.-]", r, maxsplit=1)[0].lower().replace("_", "-") for r in requirements}
    undeclared = []
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for name in sorted(_imported(path)):
                if name in sys.stdlib_module_names or name in PACKAGES or name == "__future__":
                    continue
                if DISTRIBUTIONS.get(name, name).lower().replace("_", "-") not in declared:
                    undeclared.append(f"{path.relative_to(REPOSITORY)}: {name}")
    assert not undeclared


def test_runtime_does_not_load_the_converter() -> None:
    """The converter builds on the runtime; only a function that compares with a checkpoint may reach back."""
    wrong = [
        str(path)
        for path in (REPOSITORY / "fut_runtime").rglob("*.py")
        if "fut_convert" in _imported(path, everywhere=False)
    ]
    assert not wrong


def test_files_stay_readable() -> None:
    long = [
        f"{path.relative_to(REPOSITORY)}: {lines} lines"
        for folder in (*PACKAGES, "tests")
        for path in (REPOSITORY / folder).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 500
    ]
    assert not long


@pytest.mark.parametrize("name", ["calibration.txt", "heldout.txt"])
def test_text_is_the_one_whose_origin_is_documented(name: str) -> None:
    digest = hashlib.sha256((DATA / name).read_bytes()).hexdigest()
    assert digest in (DATA / "CALIBRATION.md").read_text(encoding="utf-8")


def test_texts_share_no_paragraph() -> None:
    calibration, heldout = (
        {p for p in (DATA / n).read_text(encoding="utf-8").split("\n\n") if len(p) > 80}
        for n in ("calibration.txt", "heldout.txt")
    )
    assert len(calibration) > 1000
    assert not calibration & heldout


def _imported(path: Path, everywhere: bool = True) -> set[str]:
    """First names of the modules that a file imports, inside functions too or as it is loaded only."""
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names
