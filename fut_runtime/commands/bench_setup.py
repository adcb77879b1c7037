"""What the commands of `fut-run bench` begin and end with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])

if TYPE_CHECKING:
    import torch

    from fut_runtime.artifact.spec import ModelSpec


def named_shape(shape: str) -> tuple[str, ModelSpec]:
    """A known model's name and sizes.

    Raises:
        FutError: there is none of this name.
    """
    from fut_runtime.bench.shapes import SHAPES
    from fut_runtime.errors import FutError

    name = shape.lower()
    if name not in SHAPES:
        raise FutError(f"--shape is {shape!r}, expected one of {', '.join(SHAPES)}")
    return name, SHAPES[name]


def card_and_facts() -> tuple[torch.device, dict[str, object]]:
    """The card that is measured, and what every line says about it.

    Raises:
        UnsupportedError: there is no Hopper card.
    """
    import torch

    from fut_runtime.backend import check_device
    from fut_runtime.bench.machine import machine_facts
    from fut_runtime.cuda.load import check_card

    check_device("cuda")
    device = check_card(torch.device("cuda"))
    return device, machine_facts(device)


def json_option(what: str) -> Callable[[Command], Command]:
    """`--json FILE`, given to the command as `json_file`; `what` has a line of its own there."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"Append a JSON line a {what}.",
    )


def append_line(file: Path | None, line: dict[str, object]) -> None:
    """Append a JSON line, where a file is given."""
    if file is None:
        return
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
