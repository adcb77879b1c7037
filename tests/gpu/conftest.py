"""Tests in this folder need a Hopper card; elsewhere they skip with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs a Hopper card (sm_90); PyTorch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"needs a Hopper card (sm_90); found sm_{major}{minor}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def built() -> None:
    """Skips, with the reason, where the CUDA library is not built or does not load."""
    from fut_runtime.cuda.library import library
    from fut_runtime.errors import UnsupportedError

    try:
        library()
    except UnsupportedError as error:
        pytest.skip(str(error))
