"""How far each layer on the card is from the reference on identical inputs, and both from FP32."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from card_layers import CardLayer  # noqa: E402

from fut_runtime.artifact.reader import Artifact  # noqa: E402
from fut_runtime.cuda.tensors import DECODE_FORMATS  # noqa: E402
from fut_runtime.reference.backend import ReferenceBackend  # noqa: E402
from fut_runtime.reference.model import ReferenceModel  # noqa: E402
from fut_runtime.reference.numerics import FP32, Numerics  # noqa: E402
from fut_runtime.rope import rope_tables  # noqa: E402
from kv_blocks import unpack_bf16, unpack_int4  # noqa: E402

#: The contract of docs/numerics.md, a layer at a time on identical inputs.
TOLERANCE = 2**-8
EQUAL_CODES = 0.999
#: Relative differences between the outputs of one layer: the card's, the reference's, the reference's with every sum
#: in FP64 (how far two right implementations may be apart), and the reference's without 16-bit activations.
PAIRS = {
    "card_reference": ("card", "reference"),
    "fp64_sums_reference": ("fp64_sums", "reference"),
    "card_fp32": ("card", "fp32"),
    "reference_fp32": ("reference", "fp32"),
}


@torch.inference_mode()
def layer_agreement(
    artifact: Artifact, loaded: ReferenceBackend, decode_mode: str, windows: Tensor, device: torch.device
) -> dict[str, list[float]]:
    """Figures [layers]: the relative differences of PAIRS, and `equal_codes`, the share of K's and V's codes that are
    the same (of a BF16 cache, of its numbers).

    A token's difference is relative to that token, and the RMS is taken over tokens: where a few tokens have outliers
    thousands of times the rest, as in SmolLM2 from its 12th layer on, a ratio of whole matrices sees these alone.

    Args:
        loaded: the artifact in the reference backend on the device, prompts through the decode path.
        windows: int64 [windows, tokens].

    Every layer is given what leaves the reference's layer before it.
    """
    count, tokens = windows.shape
    model = loaded.model
    models = {"reference": model, "fp32": replace(model, numerics=FP32)}
    models["fp64_sums"] = replace(model, numerics=Numerics(dtype=torch.float64))
    states = [model.embed[window.to(device)].to(model.numerics.dtype) for window in windows]
    found: dict[str, list[float]] = {name: [] for name in (*PAIRS, "equal_codes")}
    for index in range(model.spec.num_layers):
        card = CardLayer(artifact, index, DECODE_FORMATS[decode_mode], model.kv_cache, tokens, device)
        squares = dict.fromkeys(PAIRS, 0.0)
        equal = total = 0
        for window in range(count):
            outputs, kept = _references(models, index, states[window])
            outputs["card"] = card.run(states[window].to(torch.bfloat16))
            for name, (ours, base) in PAIRS.items():
                x, y = outputs[ours].double(), outputs[base].double()
                squares[name] += float(((x - y).square().sum(dim=1) / y.square().sum(dim=1)).sum())
            for ours, theirs in zip(_cached(card, tokens), kept, strict=True):
                equal += int((ours == theirs).sum())
                total += theirs.numel()
            states[window] = outputs["reference"]
        for name, square in squares.items():
            found[name].append((square / (count * tokens)) ** 0.5)
        found["equal_codes"].append(equal / total)
    return found


def _references(
    models: dict[str, ReferenceModel], index: int, h: Tensor
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """What leaves a layer by each arithmetic, and the K and V [tokens, kv_heads, head_dim] that the exact one keeps."""
    outputs, kept = {}, None
    for name, model in models.items():
        one = replace(model, spec=replace(model.spec, num_layers=1), decode=[model.decode[index]])
        cache = one.new_cache(len(h))
        rope = rope_tables(model.spec, torch.arange(len(h), device=h.device), model.planned_tokens)
        outputs[name] = one.forward_layer(cache, 0, h.to(model.numerics.dtype), rope, "decode")
        cache.advance(len(h))
        if name == "reference":
            kept = cache.stored(0)
    assert kept is not None
    return outputs, kept


def _cached(card: CardLayer, tokens: int) -> tuple[Tensor, Tensor]:
    """Codes, or BF16 numbers, of K and V that the card's cache holds: [tokens, kv_heads, head_dim]."""
    cache = card.cache
    blocks = cache.pool[card.pages[0].long(), 0]
    pages, kv_heads, _ = blocks.shape
    flat = blocks.flatten(0, 1).contiguous()
    both = unpack_int4(flat, cache.head_dim)[0] if cache.spec.bits == 4 else unpack_bf16(flat, cache.head_dim)
    heads = (x.view(pages, kv_heads, -1, cache.head_dim).transpose(1, 2).flatten(0, 1)[:tokens] for x in both)
    keys, values = heads
    return keys, values


def layer_faults(found: dict[str, list[float]]) -> list[str]:
    """What breaks the contract, in words."""
    faults = []
    for index, difference in enumerate(found["card_reference"]):
        if not difference <= TOLERANCE:
            noise = found["fp64_sums_reference"][index]
            faults.append(
                f"layer {index}: the card is {difference:.2e} from the reference, allowed {TOLERANCE:.2e} (FP64 sums "
                f"are {noise:.2e} from it)"
            )
    for index, share in enumerate(found["equal_codes"]):
        if share < EQUAL_CODES:
            faults.append(f"layer {index}: {share:.4%} of the cache's codes are equal, expected {EQUAL_CODES:.1%}")
    return faults
