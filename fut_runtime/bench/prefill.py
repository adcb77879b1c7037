"""Times of prompts: a layer beside PyTorch's, whole models to their first token, packed prompts of unequal lengths."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.bench.prefill_model import BenchPrompts, DeepPrefill
from fut_runtime.bench.prefill_peers import peer_layers
from fut_runtime.bench.shapes import manifest_of, with_layers
from fut_runtime.cuda.prefill_weights import PREFILL_FORMATS
from fut_runtime.errors import FutError

#: A layer's time is the difference of two depths: what runs once a call is in both.
FEW_LAYERS = 1
MANY_LAYERS = 4
REPEATS = 15
#: Ours and its peer.
MODES: dict[str, str] = {"fut_fp8": "e4m3", "fut_bf16": "bf16"}
PEER_OF = {"fut_fp8": "torch_fp8", "fut_bf16": "torch_bf16"}


@dataclass(frozen=True)
class LayerResult:
    """One layer over prompts of these lengths.

    Attributes:
        lengths: tokens of each prompt.
        us: microseconds of each contender; a peer pads all prompts to the longest.
        operations, bytes: of ours: two for each product, causal attention's half included; and what has to be read and
            written at least, with E4M3 and with BF16 weights.
    """

    lengths: Sequence[int]
    us: Mapping[str, float]
    operations: int
    bytes: Mapping[str, int]

    def teraflops(self, name: str) -> float:
        """10¹² operations a second of the true tokens."""
        return self.operations / self.us[name] / 1e6

    def ratio(self, ours: str) -> float | None:
        """How many times faster than the peer, if that ran."""
        peer = PEER_OF[ours]
        return self.us[peer] / self.us[ours] if peer in self.us and ours in self.us else None

    def to_json(self) -> dict[str, object]:
        """The line without what all lines of a run share."""
        ratios = {name: self.ratio(name) for name in MODES}
        return {
            "kind": "layer", "lengths": list(self.lengths), "us": {n: round(us, 2) for n, us in self.us.items()},
            "teraflops": {name: round(self.teraflops(name), 1) for name in self.us},
            "ratio": {name: round(ratio, 3) for name, ratio in ratios.items() if ratio is not None},
            "operations": self.operations, "bytes": dict(self.bytes),
        }  # fmt: skip


@dataclass(frozen=True)
class FirstTokenResult:
    """A whole model from a prompt's tokens on the host to its last token's logits.

    Attributes:
        tokens: of the prompt.
        ms: milliseconds as the host sees it, by mode.
    """

    layers: int
    tokens: int
    ms: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The line without what all lines of a run share."""
        return {
            "kind": "first_token", "layers": self.layers, "tokens": self.tokens,
            "ms": {name: round(ms, 3) for name, ms in self.ms.items()},
            "tokens_per_s": {name: round(self.tokens / ms * 1e3) for name, ms in self.ms.items()},
        }  # fmt: skip


def layer_operations(model: ModelSpec, lengths: Sequence[int]) -> int:
    """Two for each product of a layer's matrices and of causal attention."""
    matrices = 2 * sum(math.prod(model.module_shape(m)) for m in MODULES) * sum(lengths)
    return matrices + sum(2 * model.q_size * length * (length + 1) for length in lengths)


def layer_bytes(model: ModelSpec, rows: int, element_bytes: int) -> int:
    """Weights once, activations of every product in and out, K and V: what a layer moves at least."""
    weights = element_bytes * sum(math.prod(model.module_shape(m)) for m in MODULES)
    widths = 2 * model.hidden_size + model.q_size + model.intermediate_size
    # In BF16 whatever the weights: the residual stream twice in and out, Q, K and V out and in.
    sixteen = 2 * (4 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size))
    return weights + rows * (element_bytes * 2 * widths + sixteen)


def measure_layers(
    model: ModelSpec, cases: Sequence[Sequence[int]], device: torch.device, *, peers: bool, modes: Sequence[str]
) -> Iterator[LayerResult]:
    """One layer for every case of prompt lengths; ours and the peers take turns."""
    for lengths in cases:
        us: dict[str, float] = {}
        for name in modes:
            prompts = BenchPrompts(
                manifest_of(_of_depth(model, MANY_LAYERS), PREFILL_FORMATS[MODES[name]], KVCacheSpec()),
                MODES[name],
                tokens=sum(lengths),
                context=max(lengths),
                device=device,
            )
            peer = PEER_OF[name] if peers else None
            try:
                us |= _layer_us(prompts, lengths, name, peer, model, device)
            finally:
                prompts.release()
        sizes = {mode: layer_bytes(model, sum(lengths), 1 if MODES[mode] == "e4m3" else 2) for mode in modes}
        yield LayerResult(lengths, us, layer_operations(model, lengths), sizes)


def _of_depth(model: ModelSpec, layers: int) -> ModelSpec:
    return with_layers(manifest_of(model, "e4m3", KVCacheSpec()), layers).model


def _layer_us(
    prompts: BenchPrompts, lengths: Sequence[int], name: str, peer: str | None, model: ModelSpec, device: torch.device
) -> dict[str, float]:
    with prompts.deep(MANY_LAYERS) as many, prompts.deep(FEW_LAYERS) as few:
        works: dict[str, Callable[[], object]] = {
            "many": partial(many.run, many.chunks(lengths)),
            "few": partial(few.run, few.chunks(lengths)),
        }
        count = 1
        if peer is not None:
            graph, count = peer_layers(model, peer, len(lengths), max(lengths), device)
            works[peer] = graph.replay
        times = take_turns_us(works, repeats=REPEATS)
    us = {name: (times["many"] - times["few"]) / (MANY_LAYERS - FEW_LAYERS)}
    return us if peer is None else us | {peer: times[peer] / count}


def take_turns_us(works: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median microseconds on the card of works that take turns, each waited for; not captured into graphs."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 3):
        for name, work in works.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(float(begin.elapsed_time(end)) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_first_tokens(
    model: ModelSpec, tokens: Sequence[int], device: torch.device, *, modes: Sequence[str]
) -> Iterator[FirstTokenResult]:
    """The whole model, for every number of tokens."""
    found: dict[int, dict[str, float]] = {count: {} for count in tokens}
    for name in modes:
        manifest = manifest_of(model, PREFILL_FORMATS[MODES[name]], KVCacheSpec())
        prompts = BenchPrompts(manifest, MODES[name], tokens=max(tokens), context=max(tokens), device=device)
        try:
            with prompts.deep(model.num_layers) as deep:
                for count in tokens:
                    found[count][name] = _first_token_ms(deep, count, device)
        finally:
            prompts.release()
    for count, ms in found.items():
        yield FirstTokenResult(model.num_layers, count, ms)


def _first_token_ms(deep: DeepPrefill, tokens: int, device: torch.device) -> float:
    chunks = deep.chunks([tokens])
    logits = torch.empty(1, deep.vocab, dtype=torch.float32, device=device)
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        deep.run(chunks, logits)
        int(logits[0, :8].argmax())  # the host has to have something of it
        times.append(time.perf_counter() - begin)
    if not bool(logits.isfinite().all()):
        raise FutError("a run of the benchmark gave logits that are not finite: its time would mean nothing")
    return statistics.median(times) * 1e3
