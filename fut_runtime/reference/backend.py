"""The reference backend: the engine's interface over the reference model, on any torch device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import MODULES
from fut_runtime.errors import FutError, UnsupportedError
from fut_runtime.reference.activation_scale import SCALE_MODES, ActivationScales
from fut_runtime.reference.cache import RequestCache
from fut_runtime.reference.memory import free_bytes
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.numerics import EXACT, FP32, Numerics
from fut_runtime.reference.weights import WeightLoader

DECODE_FORMATS: dict[str, str] = {"int4": "int4", "fp8": "e4m3", "bf16": "bf16"}
PREFILL_MODES: tuple[str, ...] = ("e4m3", "bf16", "decode")
COMPUTE: dict[str, Numerics] = {"exact": EXACT, "fp32": FP32}


class ReferenceBackend:
    """Runs requests one after another, so that a request's numbers cannot depend on its company.

    Attributes:
        spec: the model's architecture.
        max_context_tokens: the model's positions.
        scale_mode: `request`, `delayed` or `frozen`, see `ActivationScales`.
    """

    def __init__(self, model: ReferenceModel, initial_scale: Tensor, margin: float, scale_mode: str) -> None:
        self.model = model
        self.spec = model.spec
        self.max_context_tokens = model.spec.max_position_embeddings
        self.scale_mode = scale_mode
        self._initial = initial_scale.to(model.device)
        self._margin = margin
        self._shared = self.new_scales()
        self._latest = self._shared
        self._requests: dict[int, tuple[RequestCache, ActivationScales]] = {}
        self._next = 0
        self._totals = torch.zeros(2, *initial_scale.shape, dtype=torch.int64, device=model.device)
        self._ignored = 0

    def new_scales(self) -> ActivationScales:
        """Fresh E4M3 state that starts from the artifact's initial scales."""
        return ActivationScales(self._initial, self._margin, frozen=self.scale_mode == "frozen")

    def open_request(self, capacity_tokens: int) -> int:
        """Make room for a request of up to `capacity_tokens` tokens; returns its handle."""
        if not 1 <= capacity_tokens <= self.max_context_tokens:
            raise FutError(
                f"a request of {capacity_tokens} tokens does not fit this model's {self.max_context_tokens} positions"
            )
        handle = self._next
        self._next += 1
        scales = self.new_scales() if self.scale_mode == "request" else self._shared
        self._requests[handle] = (self.model.new_cache(capacity_tokens), scales)
        return handle

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Run a chunk of each request's prompt; FP32 logits [requests, vocab] after the last token of each."""
        rows = []
        used: list[ActivationScales] = []
        for request, tokens in chunks:
            cache, scales = self._request(request)
            h = self.model.forward(cache, tokens, "prefill", scales)
            rows.append(self.model.logits(h[-1:].contiguous()))
            if not any(scales is other for other in used):
                used.append(scales)
        for scales in used:
            scales.next_call()
            self._latest = scales
        return torch.cat(rows).float()

    @torch.inference_mode()
    def decode(self, tokens: Sequence[tuple[int, int]]) -> Tensor:
        """Append one token to each request; FP32 logits [requests, vocab]."""
        rows = []
        for request, token in tokens:
            cache, _ = self._request(request)
            rows.append(self.model.logits(self.model.forward(cache, [token], "decode")))
        return torch.cat(rows).float()

    def close_request(self, request: int) -> None:
        """Free a request's cache."""
        _, scales = self._request(request)
        if scales is not self._shared:
            self._totals += torch.stack((scales.saturated, scales.elements))
            self._ignored += scales.ignored
        del self._requests[request]

    def activation_report(self) -> dict[str, object]:
        """Scales that the latest prefill left, and saturation so far: lists [layers][4] for qkv, o, gate_up, down."""
        totals = self._totals.clone()
        ignored = self._ignored
        states = [self._shared, *(s for _, s in self._requests.values() if s is not self._shared)]
        for scales in states:
            totals += torch.stack((scales.saturated, scales.elements))
            ignored += scales.ignored
        return {
            "scale_mode": self.scale_mode,
            "sites": list(MODULES),
            "initial_scale": self._initial.tolist(),
            "scale": self._latest.scale.tolist(),
            "saturated": totals[0].tolist(),
            "elements": totals[1].tolist(),
            "ignored_maxima": ignored,
        }

    def release(self) -> None:
        """Drop every request. The weights go with the last reference to this backend."""
        self._requests.clear()

    def _request(self, request: int) -> tuple[RequestCache, ActivationScales]:
        try:
            return self._requests[request]
        except KeyError:
            raise FutError(f"request {request} is not open") from None


def load(
    artifact: Artifact,
    *,
    device: str | torch.device = "cpu",
    decode_mode: str = "int4",
    prefill_mode: str = "e4m3",
    kv_cache: str | None = None,
    scale_mode: str = "request",
    compute: str = "exact",
    planned_tokens: int | None = None,
    planned_requests: int | None = None,
) -> ReferenceBackend:
    """Load an artifact into a reference backend.

    Args:
        decode_mode: weights of the decode path: `int4`, `fp8` (E4M3 weights, 16-bit activations) or `bf16`.
        prefill_mode: `e4m3` (E4M3 weights and activations); `bf16` (16-bit activations, with BF16 weights where the
            artifact carries them, else with its E4M3 weights); `decode` (prompts take the decode path).
        kv_cache: `int4`, `bf16`, or None for what the artifact says.
        scale_mode: `request`, `delayed` or `frozen`.
        compute: `exact` (every rounding of the contract) or `fp32` (no rounding of activations to 16 bits).
        planned_tokens: longest context, where a dynamic RoPE fixes its base; None for the model's positions.
        planned_requests: without effect: memory is taken request by request.

    Raises:
        UnsupportedError: an unknown mode, or one that needs weights the artifact does not carry.
    """
    del planned_requests
    for name, value, allowed in (
        ("decode_mode", decode_mode, tuple(DECODE_FORMATS)),
        ("prefill_mode", prefill_mode, PREFILL_MODES),
        ("kv_cache", kv_cache or "int4", ("int4", "bf16")),
        ("scale_mode", scale_mode, SCALE_MODES),
        ("compute", compute, tuple(COMPUTE)),
    ):
        if value not in allowed:
            raise UnsupportedError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
    manifest, spec = artifact.manifest, artifact.manifest.model
    device = torch.device(device)
    stored = manifest.weights["layers.0.qkv"]
    decode_format = DECODE_FORMATS[decode_mode]
    prefill_formats = {"e4m3": "e4m3", "bf16": "bf16" if "bf16" in stored else "e4m3", "decode": decode_format}
    prefill_format = prefill_formats[prefill_mode]
    _check_stored(artifact, "decode_mode", decode_mode, DECODE_FORMATS)
    _check_stored(artifact, "prefill_mode", prefill_mode, prefill_formats)
    formats = {decode_format, prefill_format}
    weights = sum(n * k for n, k in (spec.module_shape(m) for m in MODULES)) * spec.num_layers
    head = spec.vocab_size * spec.hidden_size
    resident = 4 * (weights * len(formats) + head) < free_bytes(device) // 2
    loader = WeightLoader(artifact, device, resident)
    layers = {fmt: [loader.layer(i, fmt) for i in range(spec.num_layers)] for fmt in sorted(formats)}
    cache = manifest.kv_cache
    if kv_cache == "bf16":
        cache = KVCacheSpec(bits=16, rotation=False, zero_point=False)
    elif kv_cache == "int4" and cache.bits != 4:
        cache = KVCacheSpec()
    model = ReferenceModel(
        spec=spec,
        embed=loader.embed(),
        prefill=layers[prefill_format],
        decode=layers[decode_format],
        head=loader.head(),
        kv_cache=cache,
        numerics=COMPUTE[compute],
        eight_bit=prefill_mode == "e4m3",
        planned_tokens=planned_tokens,
    )
    scale = torch.stack([artifact.tensor(f"layers.{i}.activation_scale") for i in range(spec.num_layers)])
    return ReferenceBackend(model, scale, manifest.activation.margin, scale_mode)


def _check_stored(artifact: Artifact, option: str, mode: str, formats: Mapping[str, str]) -> None:
    """Refuse a mode whose weights the artifact does not carry, with those that would work."""
    stored = artifact.manifest.weights["layers.0.qkv"]
    if formats[mode] in stored:
        return
    possible = [name for name, weight_format in formats.items() if weight_format in stored]
    raise UnsupportedError(
        f"{artifact.path}: {option} {mode} needs weights in {formats[mode]}, and this artifact has "
        f"{' and '.join(sorted(stored))}: choose {option} {' or '.join(possible)}, or convert again with "
        f"--weights including {formats[mode]}"
    )
