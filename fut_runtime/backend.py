"""The border between the token loop and the arithmetic: what a backend offers, which work here, and loading one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from fut_runtime.artifact.spec import ModelSpec


class Backend(Protocol):
    """A loaded model that turns tokens into logits, with one KV cache a request.

    Implementations never import each other, and the token loop knows nothing else of them. Requests are independent:
    the logits of one do not depend on which others share a call (a backend in `delayed` scale mode may break this,
    and says so). Calls are not thread-safe.
    """

    @property
    def spec(self) -> ModelSpec:
        """Architecture of the loaded model."""
        ...

    @property
    def vocab(self) -> int:
        """Number of logits a row, V."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Most tokens one request may hold."""
        ...

    def open_request(self, capacity_tokens: int) -> int:
        """Reserve a KV cache for `capacity_tokens` tokens and return its handle.

        Raises:
            FutError: the capacity exceeds `max_context_tokens`, or memory is short.
        """
        ...

    def prefill(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Append each (request, token ids) chunk to its request, several tokens at once.

        A request appears at most once a call and continues where it stopped. Ids are in 0..V-1.

        Returns:
            float32 [len(chunks), V]: the logits after the last token of each chunk.
        """
        ...

    def decode(self, tokens: Sequence[tuple[int, int]]) -> Tensor:
        """Append one token to each of several (request, token id) pairs.

        Returns:
            float32 [len(tokens), V]: the logits after each token.
        """
        ...

    def close_request(self, request: int) -> None:
        """Free the KV cache of a request; its handle is no longer valid."""
        ...

    def release(self) -> None:
        """Free the model. No other call may follow."""
        ...


@runtime_checkable
class ReportsActivations(Protocol):
    """A backend that exposes the E4M3 activation scales it uses and how often a conversion saturated."""

    def activation_report(self) -> Sequence[Mapping[str, Any]]:
        """One entry a site: `layer` (int), `site` (str), `scale` (float), `saturated` and `elements` (int)."""
        ...
