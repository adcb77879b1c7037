"""Runs one window of tokens: through a reference model by one of the three protocols, or through another backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fut_runtime.backend import Backend, ScoresPrompts
from fut_runtime.errors import FutError
from fut_runtime.reference.activation_scale import ActivationScales
from fut_runtime.reference.model import ReferenceModel

#: `decode`: every token through the decode path. `prefill`: every token through the prefill path.
#: `serve`: the first half of the window prefilled, the rest decoded, as a server would.
PROTOCOLS: tuple[str, ...] = ("decode", "prefill", "serve")


class WindowRunner(Protocol):
    """Maps a window to the model's final residual stream, and that to logits."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """Residual stream [tokens, hidden] after the last layer."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [tokens, vocab]."""
        ...


@runtime_checkable
class LogitsRunner(Protocol):
    """Maps a window to logits, where there is no residual stream to keep."""

    def window_logits(self, tokens: Tensor, rows: int) -> Iterator[Tensor]:
        """FP32 logits after every token, `rows` tokens at a time (the last time fewer), each good until the next."""
        ...


def window_logits(runner: WindowRunner | LogitsRunner, tokens: Tensor, rows: int) -> Iterator[Tensor]:
    """FP32 logits [up to rows, vocab] of a window's tokens but the last, which has no token to predict; in order."""
    if isinstance(runner, LogitsRunner):
        yield from runner.window_logits(tokens[:-1], rows)
        return
    for hidden in runner.hidden(tokens)[:-1].split(rows):
        yield runner.logits(hidden).float()


class BackendRunner:
    """A backend under a protocol: a window is a request, its prompt read in one chunk."""

    def __init__(self, backend: Backend, protocol: str = "decode") -> None:
        """Wrap a loaded backend; for `decode`, one whose prompts take the decode path.

        Raises:
            FutError: it does not give the logits after every token.
        """
        if not isinstance(backend, ScoresPrompts):
            raise FutError(f"{type(backend).__name__} gives no logits within a prompt: choose the reference backend")
        self._backend: Backend = backend
        self._scores: ScoresPrompts = backend
        self._protocol = protocol

    def window_logits(self, tokens: Tensor, rows: int) -> Iterator[Tensor]:
        """See `LogitsRunner`."""
        request = self._backend.open_request(tokens.numel())
        try:
            gathered, used = None, 0
            for found in self._logits(request, tokens.tolist()):
                for part in found.split(rows):
                    if gathered is None:
                        gathered = torch.empty(rows, part.shape[1], dtype=part.dtype, device=part.device)
                    taken = min(len(part), rows - used)
                    gathered[used : used + taken] = part[:taken]
                    used += taken
                    if used == rows:
                        yield gathered
                        used = len(part) - taken
                        gathered[:used] = part[taken:]
            if gathered is not None and used:
                yield gathered[:used]
        finally:
            self._backend.close_request(request)

    def _logits(self, request: int, ids: list[int]) -> Iterator[Tensor]:
        """Logits after every token, some at a time. `serve` prefills half of the window, the last token included."""
        first = (len(ids) + 1) // 2 if self._protocol == "serve" else len(ids)
        if first:
            yield from self._scores.prompt_logits(request, ids[:first])
        if first < len(ids):
            # A decode step ends the request's prefill: what follows goes the way of decoding, however many tokens.
            yield self._backend.decode([(request, ids[first])])
        if first + 1 < len(ids):
            yield from self._scores.prompt_logits(request, ids[first + 1 :])


@dataclass
class ReferenceRunner:
    """A reference model under a protocol.

    Positions of the decode path run in parallel: all K and V of a window are quantised, then every query attends to
    its past. That equals decoding step by step up to the order of FP32 sums (tests hold it), because no position's
    cache entry depends on a later one.

    Attributes:
        new_scales: makes the E4M3 state, or None where the model needs none.
        keep_scales: one state for all windows (`delayed`), instead of one a window (`request`, `frozen`).
        serve_prefill_tokens: tokens that `serve` prefills; None means half the window.
    """

    model: ReferenceModel
    protocol: str
    new_scales: Callable[[], ActivationScales] | None = None
    keep_scales: bool = False
    serve_prefill_tokens: int | None = None
    saturated: int = 0
    quantized: int = 0
    _kept: ActivationScales | None = field(default=None, repr=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        cache = self.model.new_cache(tokens.numel())
        count = tokens.numel()
        first = {"prefill": count, "decode": 0}.get(self.protocol)
        if first is None:
            first = count // 2 if self.serve_prefill_tokens is None else min(self.serve_prefill_tokens, count)
        parts = []
        if first:
            scales = self.scales()
            with self.counted(scales):
                parts.append(self.model.forward(cache, tokens[:first], "prefill", scales))
        if first < count:
            parts.append(self.model.forward(cache, tokens[first:], "decode"))
        return torch.cat(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    @contextmanager
    def counted(self, scales: ActivationScales | None) -> Iterator[None]:
        """One prefill call: counts what saturates in it, and ends it for the state of the scales."""
        if scales is None:
            yield
            return
        before = int(scales.saturated.sum()), int(scales.elements.sum())
        yield
        scales.next_call()
        self.saturated += int(scales.saturated.sum()) - before[0]
        self.quantized += int(scales.elements.sum()) - before[1]

    def scales(self) -> ActivationScales | None:
        """E4M3 state for the next window or request, or None where the model needs none."""
        if self.new_scales is None or not self.model.eight_bit:
            return None
        if not self.keep_scales:
            return self.new_scales()
        if self._kept is None:
            self._kept = self.new_scales()
        return self._kept
