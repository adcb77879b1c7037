"""`Engine`: an artifact loaded into a backend, ready to generate."""

from __future__ import annotations

from fut_runtime.backend import Backend, ReportsActivations

__all__ = ["Backend", "ReportsActivations"]
