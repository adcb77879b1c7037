"""Times of decode steps, their floors from the bytes they must read, and the peers' times in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fut_runtime.artifact.manifest import KVCacheSpec, Manifest
from fut_runtime.artifact.reader import Artifact
from fut_runtime.backend import Draw
from fut_runtime.bench.model import BenchModel, step_bytes
from fut_runtime.bench.shapes import with_layers
from fut_runtime.bench.timing import interval_ms
from fut_runtime.cuda.decoder import Decoder, Row
from fut_runtime.errors import FutError

#: How the steps choose their tokens.
SAMPLINGS: dict[str, Draw] = {
    "greedy": Draw(),
    "filtered": Draw(temperature=0.8, top_k=50, top_p=0.95, uniform=0.5),
}
REPEATS = 60
WARM_UP = 8
#: Layers of the smaller of the two models whose difference is the time of a layer.
FEW_LAYERS = 2


@dataclass(frozen=True)
class DecodePlan:
    """What is to be measured: a model, and every pair of batch and context.

    Attributes:
        name: of the model, for the lines.
        mode: `int4`, `fp8` or `bf16`, as `--decode-mode` names the weights; `weight_format` as artifacts do.
        sampling: a key of SAMPLINGS.
        artifact: where weights come from; None makes random ones.
    """

    name: str
    manifest: Manifest
    mode: str
    weight_format: str
    cache: KVCacheSpec
    batches: Sequence[int]
    contexts: Sequence[int]
    sampling: str = "greedy"
    artifact: Artifact | None = None


@dataclass(frozen=True)
class DecodeResult:
    """One line: a step of so many requests with so many tokens each.

    Attributes:
        step_ms: from step to step on the card, sampling included, none waiting for the host.
        host_ms: the same as a program sees it that waits for every step's tokens.
        floor_ms: the bytes the step must read, at the read bandwidth of this run.
        layer_us: time of one layer, from the difference of two depths; None where that was not asked for.
    """

    batch: int
    context: int
    layers: int
    step_ms: float
    host_ms: float
    weight_bytes: int
    cache_bytes: int
    read_bytes_per_s: float
    layer_us: float | None = None
    layer_bytes: int | None = None
    peers_layer_us: dict[str, float] = field(default_factory=dict)

    @property
    def floor_ms(self) -> float:
        """Milliseconds that reading the step's bytes takes at least."""
        return (self.weight_bytes + self.cache_bytes) / self.read_bytes_per_s * 1e3

    @property
    def fraction(self) -> float:
        """The floor over the time: 1 is as fast as memory allows."""
        return self.floor_ms / self.step_ms

    @property
    def layer_fraction(self) -> float | None:
        """The same for a layer."""
        if self.layer_us is None or self.layer_bytes is None:
            return None
        return self.layer_bytes / self.read_bytes_per_s * 1e6 / self.layer_us

    def to_json(self) -> dict[str, object]:
        """The line without the facts that all lines of a run share."""
        line: dict[str, object] = {
            "batch": self.batch,
            "context": self.context,
            "layers": self.layers,
            "step_ms": round(self.step_ms, 4),
            "host_ms": round(self.host_ms, 4),
            "floor_ms": round(self.floor_ms, 4),
            "fraction": round(self.fraction, 3),
            "tokens_per_s": round(self.batch / self.step_ms * 1e3, 1),
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "read_GB_per_s": round(self.read_bytes_per_s / 1e9, 1),
        }
        if self.layer_us is not None:
            line |= {"layer_us": round(self.layer_us, 2), "layer_bytes": self.layer_bytes}
            line["layer_fraction"] = round(self.layer_fraction or 0.0, 3)
        for peer, layer_us in self.peers_layer_us.items():
            line[peer] = {"layer_us": round(layer_us, 2), "layers_ms": round(layer_us * self.layers / 1e3, 4)}
            if self.layer_us is not None:
                line[peer] |= {"times_slower": round(layer_us / self.layer_us, 2)}  # type: ignore[operator]
        return line


def measure(
    plan: DecodePlan, read_bytes_per_s: float, *, per_layer: bool, device: torch.device
) -> Iterator[DecodeResult]:
    """Measure every case of a plan, contexts inside batches.

    Args:
        per_layer: also measure with FEW_LAYERS layers and take the difference.

    Raises:
        FutError: too few layers to take a difference, or the model gives logits that are not finite.
    """
    layers = plan.manifest.model.num_layers
    if per_layer and layers <= FEW_LAYERS:
        raise FutError(f"the time of a layer takes more than {FEW_LAYERS} layers, the model has {layers}")
    model = BenchModel(
        plan.manifest,
        plan.weight_format,
        plan.cache,
        batch=max(plan.batches),
        context=max(plan.contexts),
        device=device,
        artifact=plan.artifact,
    )
    try:
        with model.decoder(layers) as decoder:
            for batch in plan.batches:
                for context in plan.contexts:
                    step_ms, host_ms = _time(model, decoder, batch, context, plan.sampling)
                    need = step_bytes(plan.manifest, plan.weight_format, plan.cache, batch, context)
                    layer_us = layer_bytes = None
                    if per_layer:
                        with model.decoder(FEW_LAYERS) as few:
                            few_ms, _ = _time(model, few, batch, context, plan.sampling)
                        layer_us = (step_ms - few_ms) / (layers - FEW_LAYERS) * 1e3
                        layer_bytes = one_layer_bytes(plan, batch, context)
                    yield DecodeResult(
                        batch=batch,
                        context=context,
                        layers=layers,
                        step_ms=step_ms,
                        host_ms=host_ms,
                        weight_bytes=need.weights,
                        cache_bytes=need.cache,
                        read_bytes_per_s=read_bytes_per_s,
                        layer_us=layer_us,
                        layer_bytes=layer_bytes,
                    )
    finally:
        model.release()


def one_layer_bytes(plan: DecodePlan, batch: int, context: int) -> int:
    """Bytes that one layer must read, as the difference of two depths."""
    two, one = (
        step_bytes(with_layers(plan.manifest, n), plan.weight_format, plan.cache, batch, context).total for n in (2, 1)
    )
    return two - one


def _time(model: BenchModel, decoder: Decoder, batch: int, context: int, sampling: str) -> tuple[float, float]:
    """Median milliseconds of a step on the card, and as the host sees it."""
    for slot in range(batch):
        decoder.set_pages(slot, model.slot_pages(slot, context))
    vocab = model.manifest.model.vocab_size
    rows = [Row(token=(7919 * slot + 1) % vocab, position=context - 1, slot=slot) for slot in range(batch)]
    draws = [SAMPLINGS[sampling]] * batch

    def step() -> None:
        decoder.step(rows, range(batch), draws)

    step_ms = interval_ms(step, repeats=REPEATS, warm_up=WARM_UP)
    if min(decoder.tokens(batch)) < 0:
        raise FutError("a step of the benchmark gave logits that are not finite: its time would mean nothing")
    host = []
    for _ in range(REPEATS // 2):
        begin = time.perf_counter()
        step()
        decoder.tokens(batch)
        host.append(time.perf_counter() - begin)
    return step_ms, statistics.median(host) * 1e3
