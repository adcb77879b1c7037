"""Commands, options, targets and links that the documentation names exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest

from repository import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PROGRAMS = ("fut-convert", "fut-run", "fut-artifact")
#: A heading that is a message, in the page that is keyed by them.
MESSAGE = re.compile(r"^### `([^`]+)`$", flags=re.M)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def code_blocks(page: Path, language: str) -> Iterator[str]:
    """Contents of a page's fenced blocks of one language."""
    pattern = rf"^```{language}\n(.*?)^```"
    yield from re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.M | re.S)


def commands(page: Path) -> Iterator[str]:
    """Commands in a page's `console` blocks, lines that end in a backslash joined to the next."""
    for block in code_blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield line[2:].split("  #")[0].strip()


def documented(prefixes: tuple[str, ...]) -> list[object]:
    """Every command in the documentation that starts with one of the words, as a test parameter."""
    return [
        pytest.param(command, id=f"{page.name}: {command}")
        for page in PAGES
        for command in dict.fromkeys(commands(page))
        if command.split()[0] in prefixes
    ]


@pytest.mark.parametrize("command", documented(PROGRAMS))
def test_program_takes_the_documented_options(command: str) -> None:
    words = shlex.split(command, comments=True)
    words = words[: next((i for i, w in enumerate(words) if w in ("|", ">", "&&", ";")), len(words))]
    scripts = metadata.distribution("futransformer").entry_points.select(group="console_scripts")
    module, function = scripts[words.pop(0)].value.split(":")
    target = getattr(importlib.import_module(module), function)
    while isinstance(target, click.Group):
        name = words.pop(0)
        if name == "--help":
            return
        context = click.Context(target)
        assert name in target.list_commands(context), f"{name}: no such command"
        target = target.get_command(context, name)
    known = {option for parameter in target.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.split("=")[0] for word in words if word.startswith("--")}
    assert used <= known | {"--help"}


@pytest.mark.parametrize("command", documented(("make",)))
def test_make_has_the_documented_target(command: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = [w for w in shlex.split(command)[1:] if "=" not in w and not w.startswith("-")]
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.M), f"make has no target {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    missing = [
        target
        for target in LINK.findall(text)
        if "://" not in target and not target.startswith("#") and not (page.parent / target.split("#")[0]).exists()
    ]
    assert not missing


def texts_of_the_source() -> set[str]:
    """Every string in the packages; what is filled in when the program runs is `…`."""
    texts = set()
    for package in ("fut_convert", "fut_runtime"):
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
                elif isinstance(node, ast.JoinedStr):
                    texts.add("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
    return texts


def says(text: str, message: str) -> bool:
    """Whether a text of the source holds the fixed parts of a message, in their order."""
    return re.search(".*".join(map(re.escape, message.split("…"))), text, flags=re.S) is not None


def test_messages_that_troubleshooting_quotes_are_the_programs() -> None:
    messages = MESSAGE.findall((REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    texts = texts_of_the_source()
    assert len(messages) > 40 and len(set(messages)) == len(messages)
    assert [m for m in messages if not any(says(text, m) for text in texts)] == []
    assert not any(says(text, "is a Git LFS pointer, … the code") for text in texts)


def test_the_site_has_every_page() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M)
    assert sorted(listed) == sorted(p.name for p in (REPOSITORY / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_python_examples_are_python(page: Path) -> None:
    for block in code_blocks(page, "python"):
        compile(block, str(page), "exec")


def test_readme_example_runs(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_checkpoint("checkpoint", layers=1)
    monkeypatch.chdir(tmp_path)
    for block in code_blocks(REPOSITORY / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "artifact" / "fut_config.json").is_file()
    assert capsys.readouterr().out
