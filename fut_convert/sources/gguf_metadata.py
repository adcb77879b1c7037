"""The types that values in a GGUF file's metadata must have, checked once for all that read them.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fut_runtime.artifact.json_text import excerpt


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _all(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_flag(value: Any) -> bool:
    # Some converters write 0 and 1.
    return value in (True, False) and isinstance(value, (bool, int))


def _is_size(value: Any) -> bool:
    """One number, or one a layer; what else it is its reader says."""
    return not isinstance(value, list) or all(type(item) in (int, bool) for item in value)


#: Pattern of keys -> check, and what passes it. The first that matches decides; other keys are not read.
_TYPES: tuple[tuple[re.Pattern[str], Callable[[Any], bool], str], ...] = tuple(
    (re.compile(pattern), check, expected)
    for pattern, check, expected in (
        (r"general\.alignment|split\.count", _is_whole, "a whole number"),
        (r"general\.(architecture|type)|tokenizer\.ggml\.(model|pre)", _is_text, "a text"),
        (r"tokenizer\.chat_template", _is_text, "a text"),
        (r"tokenizer\.ggml\.(tokens|merges)", _all(_is_text), "an array of texts"),
        (r"tokenizer\.ggml\.token_type", _all(_is_whole), "an array of whole numbers"),
        (r"tokenizer\.ggml\.scores", _all(_is_number), "an array of finite numbers"),
        (r"tokenizer\.ggml\.\w+_token_id", _is_whole, "a whole number"),
        (r"tokenizer\.ggml\.add_\w+", _is_flag, "true or false"),
        (r"\w+\.rope\.scaling\.type", _is_text, "a text"),
        (r"\w+\.rope\.(freq_base|scale_linear|scaling\.\w+)", _is_number, "a finite number"),
        (r"\w+\.(context_length|attention\.sliding_window)", _is_size, "a whole number"),
        (r"\w+\.(embedding_length|block_count|feed_forward_length)", _is_size, "a whole number"),
        (r"\w+\.attention\.(head_count|head_count_kv|key_length|value_length)", _is_size, "a whole number"),
        (r"\w+\.rope\.dimension_count", _is_size, "a whole number"),
    )
)


def check_types(metadata: Mapping[str, Any]) -> None:
    """Check every value that is read somewhere.

    Raises:
        ValueError: names the key, what was found and what was expected.
    """
    for key, value in metadata.items():
        found = next((entry for entry in _TYPES if entry[0].fullmatch(key)), None)
        if found is not None and not found[1](value):
            raise ValueError(f"{key} is {excerpt(value)}, expected {found[2]}")
