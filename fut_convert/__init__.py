"""FuTransformer's converter: turn a Llama-family checkpoint into an artifact.

    from fut_convert import convert

    result = convert("meta-llama/Llama-3.1-8B", "out/llama-3.1-8b", recipe="llama-3.1-8b-paper", device="cuda")
    print(result.path, result.seconds, result.peak_memory_bytes)

Names are resolved when first used, so that importing the package does not load PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fut_convert.errors import ConvertError as ConvertError
    from fut_convert.pipeline import convert as convert
    from fut_convert.pipeline import plan_conversion as plan_conversion
    from fut_convert.plan import Plan as Plan
    from fut_convert.recipe import Recipe as Recipe
    from fut_convert.recipe import load_recipe as load_recipe
    from fut_convert.result import ConversionResult as ConversionResult

try:
    __version__ = version("futransformer")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"

_HOME = {
    "ConversionResult": "result",
    "ConvertError": "errors",
    "Plan": "plan",
    "Recipe": "recipe",
    "convert": "pipeline",
    "load_recipe": "recipe",
    "plan_conversion": "pipeline",
}
__all__ = ["ConversionResult", "ConvertError", "Plan", "Recipe", "convert", "load_recipe", "plan_conversion"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
