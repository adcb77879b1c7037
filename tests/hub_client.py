"""Makes huggingface_hub take the tests' own Hub for the only one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub.file_download
from huggingface_hub import constants

_TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


def client_settings(address: str, directory: Path) -> list[tuple[Any, str, Any]]:
    """Module, name and value of what to set for a Hub at `address`, with a cache in `directory` and no token."""
    return [
        (constants, "ENDPOINT", address),
        # Older versions import the template by name.
        *((m, "HUGGINGFACE_CO_URL_TEMPLATE", address + _TEMPLATE) for m in (constants, huggingface_hub.file_download)),
        (constants, "HF_HUB_CACHE", str(directory / "hub-cache")),
        (constants, "HF_TOKEN_PATH", str(directory / "no-token")),
        (constants, "HF_HUB_DISABLE_XET", True),
        (constants, "HF_HUB_OFFLINE", False),
        (constants, "HF_HUB_DISABLE_PROGRESS_BARS", True),
    ]


def use_hub(address: str, directory: Path) -> None:
    """Set it in this process, for good."""
    os.environ["NO_PROXY"] = "127.0.0.1"
    for module, name, value in client_settings(address, directory):
        setattr(module, name, value)
