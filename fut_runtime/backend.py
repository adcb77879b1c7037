"""The border between the token loop and the arithmetic: what a backend offers, which work here, and loading one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
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


#: Backends in order of preference. Each module has `load(artifact, *, device=…, **options) -> Backend`.
_MODULES = {"cuda": "fut_runtime.cuda.backend", "reference": "fut_runtime.reference.backend"}
BACKENDS: tuple[str, ...] = tuple(_MODULES)


def available_backends() -> list[BackendStatus]:
    """Every backend this version knows, in order of preference, and whether it works here."""
    return [_cuda_status(), _reference_status()]


def load_backend(artifact: Artifact, name: str = "auto", *, device: str | None = None, **options: object) -> Backend:
    """Load an artifact into a backend.

    Args:
        artifact: an open artifact.
        name: `auto` (the first that works here), `cuda` or `reference`.
        device: torch device; None lets the backend's status decide (a CUDA card where there is one).
        **options: modes that the backend understands; None leaves the choice to the backend.

    Raises:
        UnsupportedError: no such backend or device, or it does not work here; the message says why.
    """
    statuses = {status.name: status for status in available_backends()}
    if name == "auto":
        name = next((s.name for s in statuses.values() if s.available), "reference")
    if name not in statuses:
        raise UnsupportedError(f"backend is {name!r}, expected auto, {' or '.join(statuses)}")
    if not statuses[name].available:
        raise UnsupportedError(f"the {name} backend does not work here: {statuses[name].detail}")
    device = device or _default_device()
    check_device(device)
    given = {key: value for key, value in options.items() if value is not None}
    backend: Backend = import_module(_MODULES[name]).load(artifact, device=device, **given)
    return backend


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

    reasons = []
    if torch.version.cuda is None:
        reasons.append(f"PyTorch {torch.__version__} is built without CUDA")
    elif not torch.cuda.is_available():
        reasons.append("PyTorch sees no CUDA device")
    elif (capability := torch.cuda.get_device_capability()) != (9, 0):
        card = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
        reasons.append(f"the kernels need a Hopper card (compute capability 9.0), this is {card}")
    if not _exists(_MODULES["cuda"]):
        reasons.append("this build has no CUDA library")
    detail = "; ".join(reasons) or torch.cuda.get_device_name()
    return BackendStatus("cuda", not reasons, detail)


def _reference_status() -> BackendStatus:
    import torch

    if not _exists(_MODULES["reference"]):
        return BackendStatus("reference", False, "this build has no reference backend")
    where = torch.cuda.get_device_name() if _default_device() == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return BackendStatus("reference", True, f"PyTorch {torch.__version__}, {where}")


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing too
        return False
