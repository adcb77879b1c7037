"""FuTransformer's runtime: load a converted artifact and generate from it.

    from fut_runtime import Engine, SamplingParams

    with Engine("out/llama-3.1-8b") as engine:
        for event in engine.stream("Once upon a time", SamplingParams(max_new_tokens=64)):
            print(event.text, end="", flush=True)

Names are resolved when first used, so that importing the package (or `fut_runtime.artifact`) does not load PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fut_runtime.backend import Backend as Backend
    from fut_runtime.backend import BackendStatus as BackendStatus
    from fut_runtime.backend import available_backends as available_backends
    from fut_runtime.conversation import Conversation as Conversation
    from fut_runtime.engine import Engine as Engine
    from fut_runtime.errors import FutError as FutError
    from fut_runtime.results import Completion as Completion
    from fut_runtime.results import TokenEvent as TokenEvent
    from fut_runtime.sampling import SamplingParams as SamplingParams
    from fut_runtime.tokenizer import Tokenizer as Tokenizer

try:
    __version__ = version("futransformer")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

_HOME = {
    "Backend": "fut_runtime.backend",
    "BackendStatus": "fut_runtime.backend",
    "available_backends": "fut_runtime.backend",
    "Conversation": "fut_runtime.conversation",
    "Engine": "fut_runtime.engine",
    "FutError": "fut_runtime.errors",
    "Completion": "fut_runtime.results",
    "TokenEvent": "fut_runtime.results",
    "SamplingParams": "fut_runtime.sampling",
    "Tokenizer": "fut_runtime.tokenizer",
}

__all__ = [
    "Backend",
    "BackendStatus",
    "Completion",
    "Conversation",
    "Engine",
    "FutError",
    "SamplingParams",
    "TokenEvent",
    "Tokenizer",
    "__version__",
    "available_backends",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
