"""Reading checkpoints: whatever the format, `open_source` gives a model specification and named tensors."""

from __future__ import annotations
