"""INT4 group sizes of single modules: which modules a recipe's key names, and what it gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fut_runtime.artifact.spec import MODULES

GROUP_SIZES: tuple[int, ...] = (32, 64, 128)

_NAMES = (*MODULES, "head")
_KIND = "|".join(MODULES)
#: `down`, `head`, `layers.3.down`, `layers.*.down`, `layers.3.*`.
_KEY = re.compile(rf"(?P<kind>{'|'.join(_NAMES)})|layers\.(?P<layer>0|[1-9]\d*|\*)\.(?P<module>{_KIND}|\*)")


def check_overrides(value: Any) -> dict[str, int]:
    """The value of `int4.group_size_overrides`, in one order whatever the user wrote.

    Raises:
        ValueError: says what is expected.
    """
    expected = (
        f"names and group sizes ({', '.join(map(str, GROUP_SIZES))}), as {{down: 32, layers.0.*: 32}}; a name is one "
        f"of {', '.join(_NAMES)}, or layers.N.MODULE with * for all"
    )
    if not isinstance(value, Mapping):
        raise ValueError(expected)
    for key, size in value.items():
        # YAML's true is not the number 1, nor would it be a size.
        if not isinstance(key, str) or _KEY.fullmatch(key) is None or type(size) is not int or size not in GROUP_SIZES:
            raise ValueError(f"{expected}; {key!r}: {size!r} is not that")
    return {key: value[key] for key in sorted(value)}


def overridden_size(overrides: Mapping[str, int], name: str) -> int | None:
    """Group size that the overrides give `layers.{i}.{module}` or `head`: the smallest of those that name it."""
    return min((size for key, size in overrides.items() if _names(key, name)), default=None)


def idle_overrides(overrides: Mapping[str, int], int4_modules: Iterable[str]) -> list[str]:
    """The keys that name none of the modules whose codes are chosen in INT4."""
    modules = list(int4_modules)
    return [key for key in overrides if not any(_names(key, name) for name in modules)]


def _names(key: str, name: str) -> bool:
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is no name of modules")
    layer, module = ("", name) if name == "head" else name.removeprefix("layers.").split(".")
    if match["kind"]:
        return match["kind"] == module
    return name != "head" and match["layer"] in ("*", layer) and match["module"] in ("*", module)
