"""The border between the token loop and the arithmetic: what a backend offers, which work here, and loading one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fut_runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from fut_runtime.artifact.reader import Artifact
    from fut_runtime.artifact.spec import ModelSpec


class Backend(Protocol):
    """A loaded model that turns tokens into logits, with one KV cache a request.

    Implementations never import each other, and the token loop knows nothing else of them. Requests are independent:
    the logits of one do not depend on which others share a call (a backend in `delayed` scale mode may break this,
    and says so). Calls are not thread-safe.
    """

    @property
    def spec(self) -> ModelSpec:
        """Architecture of the loaded model; its `vocab_size` is V, the number of logits a row."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Most tokens one request may hold."""
        ...

    def open_request(self, capacity_tokens: int) -> int:
        """Reserve a KV cache for `capacity_tokens` tokens and return its handle.

        Raises:
            CacheFullError: other requests hold the memory; it can be opened once some of them are closed.
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


@dataclass(frozen=True)
class Draw:
    """How a token is to be chosen from a row of logits: filters as in `SamplingParams`, and a number in [0, 1).

    Temperature 0 takes the most probable token, of equals the one with the lowest id.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


@runtime_checkable
class DrawsTokens(Protocol):
    """A backend that chooses tokens where the logits are, so that a step need not hand them over."""

    def decode_and_draw(
        self, tokens: Sequence[tuple[int, int]], draws: Sequence[Draw | None]
    ) -> tuple[Sequence[int | None], Tensor]:
        """`decode`, and the choice of the next token of every request that has a draw.

        Returns:
            The chosen tokens, and float32 [len(tokens), V], the logits, good until the next call. A token is None where
            there is no draw, where the logits are not finite, or where the backend leaves the choice to the caller.
        """
        ...


@runtime_checkable
class ScoresPrompts(Protocol):
    """A backend that gives the logits after every token of a prompt, not only after the last."""

    def prompt_logits(self, request: int, ids: Sequence[int]) -> Iterator[Tensor]:
        """Append a chunk to a request; float32 [some, V] after each of its tokens, some tokens at a time, in order.

        Each tensor is good until the next is asked for. The request holds the chunk once all have been taken.
        """
        ...


@runtime_checkable
class ReportsActivations(Protocol):
    """A backend that exposes the E4M3 activation scales it uses and how often a conversion saturated."""

    def activation_report(self) -> Mapping[str, object]:
        """Scales in force and saturation so far.

        Keys: `scale_mode`, `sites` (names, in the order of the inner lists), and lists [layers][sites] under
        `initial_scale`, `scale`, `saturated` and `elements`; `ignored_maxima` counts maxima that were not finite.
        """
        ...


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend works on this machine; `detail` says with what, or why not."""

    name: str
    available: bool
    detail: str


_LOG = logging.getLogger(__name__)

#: Backends in order of preference. Each module has `load(artifact, *, device=…, **options) -> Backend`.
_MODULES = {"cuda": "fut_runtime.cuda.load", "reference": "fut_runtime.reference.backend"}
BACKENDS: tuple[str, ...] = tuple(_MODULES)


def available_backends() -> list[BackendStatus]:
    """Every backend this version knows, in order of preference, and whether it works here."""
    return [_cuda_status(), _reference_status()]


def load_backend(artifact: Artifact, name: str = "auto", *, device: str | None = None, **options: object) -> Backend:
    """Load an artifact into a backend.

    Args:
        artifact: an open artifact.
        name: `cuda`, `reference`, or `auto`: the first that works here, on that device and with those options. Where
            another than the first that works here is taken, a warning says why.
        device: torch device; None lets the backend's status decide (a CUDA card where there is one).
        **options: modes that the backend understands; None leaves the choice to the backend.

    Raises:
        UnsupportedError: no such backend or device, or it does not work here; the message says why.
    """
    statuses = {status.name: status for status in available_backends()}
    if name != "auto" and name not in statuses:
        raise UnsupportedError(f"backend is {name!r}, expected auto, {' or '.join(statuses)}")
    if name != "auto" and not statuses[name].available:
        raise UnsupportedError(f"the {name} backend does not work here: {statuses[name].detail}")
    device = device or _default_device()
    check_device(device)
    given = {key: value for key, value in options.items() if value is not None}
    possible = [name] if name != "auto" else [s.name for s in statuses.values() if s.available]
    if name == "auto" and not device.startswith("cuda"):
        possible = [p for p in possible if p != "cuda"]
    for place, candidate in enumerate(possible):
        try:
            backend: Backend = import_module(_MODULES[candidate]).load(artifact, device=device, **given)
        except UnsupportedError as error:
            if place == len(possible) - 1:
                raise
            _LOG.warning("%s; taking the %s backend", error, possible[place + 1])
        else:
            return backend
    raise UnsupportedError(f"no backend works here: {'; '.join(f'{s.name}: {s.detail}' for s in statuses.values())}")


def check_device(name: str) -> None:
    """Make sure that PyTorch can compute on a device here.

    Raises:
        UnsupportedError: no such device, or this PyTorch cannot use it; the message says why.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnsupportedError(f"device is {name!r}, expected a torch device such as cpu, cuda or cuda:1") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UnsupportedError(f"device is {name!r}, but PyTorch sees {count} CUDA devices here")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch is built without this kind of device
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(f"device is {name!r}, which PyTorch cannot use here ({reason})") from error


def _cuda_status() -> BackendStatus:
    import torch

    from fut_runtime.cuda.library import library

    reasons = []
    if torch.version.cuda is None:
        reasons.append(f"PyTorch {torch.__version__} is built without CUDA")
    elif not torch.cuda.is_available():
        reasons.append("PyTorch sees no CUDA device")
    elif (capability := torch.cuda.get_device_capability()) != (9, 0):
        card = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
        reasons.append(f"the kernels need a Hopper card (compute capability 9.0), this is {card}")
    try:
        library()
    except UnsupportedError as error:
        reasons.append(str(error))
    detail = "; ".join(reasons) or torch.cuda.get_device_name()
    return BackendStatus("cuda", not reasons, detail)


def _reference_status() -> BackendStatus:
    import torch

    where = torch.cuda.get_device_name() if _default_device() == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return BackendStatus("reference", True, f"PyTorch {torch.__version__}, {where}")


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
