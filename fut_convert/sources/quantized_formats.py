"""Finding the format of a quantized checkpoint by its config, wherever the tool that made it has put that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fut_convert.errors import UnsupportedModelError
from fut_convert.sources.awq_format import AwqFormat
from fut_convert.sources.compressed_format import compressed_format
from fut_convert.sources.fields import Fields
from fut_convert.sources.fp8_format import Fp8Format
from fut_convert.sources.gptq_format import GptqFormat
from fut_convert.sources.quantized import quantization_method, refusal
from fut_convert.sources.stored_format import StoredFormat

#: Key of config.json, and files that held its contents before it was agreed on.
_CONFIG_KEY = "quantization_config"
_CONFIG_FILES: tuple[str, ...] = ("quantize_config.json", "quant_config.json")

#: Name of the format, as `quantization_method` gives it -> its reader.
_READERS: dict[str, Callable[[Fields], StoredFormat]] = {
    "GPTQ": GptqFormat.from_config,
    "AWQ": AwqFormat.from_config,
    "compressed-tensors": compressed_format,
    "FP8": Fp8Format.from_config,
    "FP8 (FBGEMM)": Fp8Format.from_config,
    "FP8 (fine-grained)": Fp8Format.from_config,
}


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what it says about quantization: that of the model which was quantized."""
    return {key: value for key, value in config.items() if key != _CONFIG_KEY}


def stored_format(
    config: Mapping[str, Any], read_file: Callable[[str], Mapping[str, Any] | None], where: str
) -> StoredFormat | None:
    """The format of a checkpoint's quantized matrices, or None where nothing says that there are any.

    Args:
        config: contents of config.json.
        read_file: gives a JSON file of the checkpoint, None where it does not exist.
        where: name of the checkpoint, for messages.

    Raises:
        UnsupportedModelError: a format that cannot be read, or settings of it that cannot.
        CheckpointError: a config with senseless values.
    """
    section = Fields(config, f"{where}: config.json").section(_CONFIG_KEY)
    older = next(((name, data) for name in _CONFIG_FILES if (data := read_file(name))), None)
    if section is None and older is None:
        return None
    if section is None and older is not None:
        section = Fields(older[1], f"{where}: {older[0]}")
    elif section is not None and older is not None:
        # Config.json's section is the younger one; but some tools left out of it what they had not thought of.
        section = Fields({**older[1], **section.data}, section.where)
    assert section is not None
    method = quantization_method(section.data)
    if method not in _READERS:
        raise UnsupportedModelError(refusal(section.where, method))
    return _READERS[method](section)
