"""Times of prompts' attention, packed and paged, beside PyTorch's scaled dot product attention in the same run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fut_runtime.bench.timing import interleaved_us
from fut_runtime.cuda import prefill_attention
from fut_runtime.cuda.gemm import E4M3, History, Quantized
from fut_runtime.cuda.prefill_attention import Prompts
from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.errors import FutError

#: Several times the L2, so that Q, K and V come from memory.
_LEAST_BYTES = 256 << 20
REPEATS = 20
#: Name in the lines → PyTorch's backend.
PEERS = {"torch_cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION}
OURS = ("fut_bf16", "fut_e4m3")
#: What PyTorch says where a backend is missing, or does not take the inputs.
_REFUSALS = ("No available kernel", "No viable backend")
_CASE = re.compile(r"(?:(\d+)x)?(\d+)")


def parse_case(text: str) -> list[int]:
    """`2048+7x128` → the tokens of eight prompts.

    Raises:
        FutError: it is written otherwise, or a length is 0.
    """
    lengths: list[int] = []
    for part in text.split("+"):
        match = _CASE.fullmatch(part)
        if match is None or int(match[2]) == 0 or match[1] == "0":
            raise FutError(f"{text!r} is no batch of prompts such as 2048, 4x2048 or 2048+7x128")
        lengths += [int(match[2])] * int(match[1] or 1)
    return lengths


@dataclass(frozen=True)
class Heads:
    """Heads of a layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionResult:
    """One batch of prompts.

    Attributes:
        case: as it was asked for; PyTorch pads it to its longest prompt.
        us: median microseconds of each contender that runs here.
        expanded: contenders that got K and V once for each query head, for they refuse fewer.
    """

    case: str
    heads: Heads
    us: Mapping[str, float]
    expanded: Sequence[str] = ()

    @property
    def operations(self) -> float:
        """Of both products, below the diagonal alone."""
        return 2 * self.heads.heads * self.heads.head_dim * sum(length**2 for length in parse_case(self.case))

    def teraflops(self, name: str) -> float:
        """10¹² operations a second; a padded batch counts as the prompts in it."""
        return self.operations / self.us[name] / 1e6

    def ratio(self, ours: str, peer: str) -> float:
        """How many times faster than a peer."""
        return self.us[peer] / self.us[ours]

    def to_json(self) -> dict[str, object]:
        """The line without the facts that all lines of a run share."""
        return {
            "case": self.case, "heads": self.heads.heads, "kv_heads": self.heads.kv_heads,
            "head_dim": self.heads.head_dim,
            "us": {name: round(us, 2) for name, us in self.us.items()},
            "teraflops": {name: round(self.teraflops(name), 1) for name in self.us},
            "ratio": {
                f"{ours}/{peer}": round(self.ratio(ours, peer), 3) for ours in OURS for peer in PEERS if peer in self.us
            },
            "expanded": list(self.expanded),
        }  # fmt: skip


def measure(heads: Heads, cases: Sequence[str], device: torch.device) -> Iterator[AttentionResult]:
    """Every batch, in that order."""
    for case in cases:
        lengths = parse_case(case)
        tokens = sum(lengths)
        copies = max(2, math.ceil(_LEAST_BYTES / (2 * tokens * (heads.heads + 2 * heads.kv_heads) * heads.head_dim)))
        generator = torch.Generator(device).manual_seed(tokens)
        works = _ours(heads, lengths, copies, generator, device)
        expanded = []
        for name, backend in PEERS.items():
            for times in dict.fromkeys((1, heads.heads // heads.kv_heads)):
                inputs = _padded(heads, lengths, copies, times, generator, device)
                work = partial(_peer, inputs, backend)
                if _runs(work):
                    works[name] = work
                    expanded += [name] * (times > 1)
                    break
        us = interleaved_us(works, repeats=REPEATS)
        yield AttentionResult(case, heads, {name: each / copies for name, each in us.items()}, expanded)
        del works, work, inputs
        torch.cuda.empty_cache()


def _normal(*shape: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)


def _ours(
    heads: Heads, lengths: Sequence[int], copies: int, generator: torch.Generator, device: torch.device
) -> dict[str, Callable[[], None]]:
    """Prompts in pages of no order, BF16 and E4M3 outputs."""
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    pages = torch.randperm(sum(counts), generator=generator, device=device).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
    for slot, part in enumerate(pages.split(counts)):
        table[slot, : counts[slot]] = part
    prompts = Prompts.of([(0, length) for length in lengths], range(len(lengths)), device)
    normal = partial(_normal, generator=generator, device=device)
    shape = (sum(counts), heads.kv_heads, PAGE_TOKENS, heads.head_dim)
    inputs = [
        (normal(sum(lengths), heads.heads, heads.head_dim), History(normal(*shape), normal(*shape), table))
        for _ in range(copies)
    ]
    out = torch.empty(sum(lengths), heads.heads * heads.head_dim, dtype=torch.bfloat16, device=device)
    quantized = Quantized(
        torch.empty_like(out, dtype=E4M3),
        torch.full((len(lengths),), 0.01, device=device),
        torch.zeros(len(lengths), device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    workspace = prefill_attention.workspace(device)

    def attend(out: Tensor | None, quantized: Quantized | None) -> None:
        for q, history in inputs:
            prefill_attention.attend(q, history, prompts, out, quantized, workspace)

    return {"fut_bf16": partial(attend, out, None), "fut_e4m3": partial(attend, None, quantized)}


def _padded(
    heads: Heads, lengths: Sequence[int], copies: int, times: int, generator: torch.Generator, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Q, K and V [prompts, heads, longest, head_dim], a token's heads side by side as a projection leaves them."""

    def normal(count: int) -> Tensor:
        shape = (len(lengths), max(lengths), count, heads.head_dim)
        return _normal(*shape, generator=generator, device=device).transpose(1, 2)

    kv_heads = heads.kv_heads * times
    return [(normal(heads.heads), normal(kv_heads), normal(kv_heads)) for _ in range(copies)]


def _peer(inputs: Sequence[tuple[Tensor, Tensor, Tensor]], backend: SDPBackend) -> None:
    with sdpa_kernel(backend), torch.no_grad():
        for q, k, v in inputs:
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _runs(work: Callable[[], None]) -> bool:
    try:
        work()
    except RuntimeError as error:
        if not any(words in str(error) for words in _REFUSALS):
            raise
        return False
    return True
