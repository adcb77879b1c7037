"""Reading typed fields of a checkpoint's config, with errors that name file, key, value and what was expected."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fut_convert.errors import CheckpointError
from fut_runtime.artifact.json_text import excerpt

#: Largest number a config may give: no size or count of a model comes near it.
MOST = 2**40


class Fields:
    """A JSON object of a config file. `where` names it in messages, as in `config.json` or `config.json: rope_scaling`.

    A key whose value is null counts as absent, as it does in transformers.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def optional_int(self, key: str) -> int | None:
        """An integer of at least 1, or None.

        Raises:
            CheckpointError: it is anything else.
        """
        value = self.data.get(key)
        if value is None:
            return None
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 1:
            raise self.error(key, "a positive integer")
        if value > MOST:
            raise self.error(key, f"a positive integer, at most {MOST}")
        return int(value)

    def required_int(self, key: str) -> int:
        """An integer of at least 1 that must be there."""
        value = self.optional_int(key)
        if value is None:
            raise CheckpointError(f"{self.where}: {key} is missing, and nothing can stand in for it")
        return value

    def optional_float(self, key: str) -> float | None:
        """A positive finite number, or None."""
        value = self.data.get(key)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:
            raise self.error(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested object, or None; an empty one counts as absent."""
        value = self.data.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them. Ids outside the vocabulary (-1 is common) can never occur and are dropped."""
        value = self.data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))

    def error(self, key: str, expected: str) -> CheckpointError:
        """The error for a key whose value is not what it must be."""
        return CheckpointError(f"{self.where}: {key} is {excerpt(self.data.get(key))}, expected {expected}")
