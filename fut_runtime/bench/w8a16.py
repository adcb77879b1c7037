"""Times of products of E4M3 weights with 16-bit activations, beside PyTorch's ways to the same result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fut_runtime.bench.timing import interleaved_us
from fut_runtime.cuda import w8a16
from fut_runtime.cuda.gemm import E4M3
from fut_runtime.cuda.w8a16 import W8A16Plan
from fut_runtime.ops import mm_bf16_fp8, mm_bf16_fp8_workspace_bytes

#: Several times the L2, so that weights come from memory.
_LEAST_BYTES = 256 << 20
REPEATS = 20
_HOST_CALLS = 200
#: All tiles that there are: channels and tokens.
TILES = [(128, 16), (128, 32), (128, 64), (128, 128), (128, 256), (64, 16), (64, 32), (64, 64)]


@dataclass(frozen=True)
class W8A16Result:
    """One product: BF16 [m, k] times E4M3 [n, k] transposed.

    Attributes:
        us: median microseconds: ours as the cost model plans it (`fut`), weights cast to BF16 before a BF16 product
            (`cast`), and a product of weights that are in BF16 already (`bf16`).
        tile: what the cost model chose, as channels x tokens / parts of k.
        tactics: median microseconds of every tactic that was asked for, by the same name.
        read_share: the weights' bytes over the time of ours, as a share of the read bandwidth.
        host_us: what a call takes on the host.
    """

    m: int
    n: int
    k: int
    us: Mapping[str, float]
    tile: str
    tactics: Mapping[str, float]
    read_share: float
    host_us: float

    def to_json(self) -> dict[str, object]:
        """The line without the facts that all lines of a run share."""
        return {
            "m": self.m, "n": self.n, "k": self.k, "us": {name: round(us, 2) for name, us in self.us.items()},
            "tile": self.tile, "tactics": {name: round(us, 2) for name, us in self.tactics.items()},
            "read_share": round(self.read_share, 4), "host_us": round(self.host_us, 2),
            "times_faster": {name: round(self.us[name] / self.us["fut"], 3) for name in ("cast", "bf16")},
        }  # fmt: skip


def measure(
    sizes: Sequence[tuple[int, int]], rows: Sequence[int], device: torch.device, bandwidth: float, *, tactics: bool
) -> Iterator[W8A16Result]:
    """Every size (n, k) with each number of rows.

    Args:
        bandwidth: bytes a second that the card reads.
        tactics: time every tile and a few splits as well, to hold the cost model against.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for n, k in sizes:
        for m in rows:
            product = _Product(m, n, k, device)
            plan = w8a16.plan(m, n, k, multiprocessors)
            works = {"fut": product.ours(plan), "cast": product.cast, "bf16": product.bf16}
            us = {name: each / product.copies for name, each in interleaved_us(works, repeats=REPEATS).items()}
            found: dict[str, float] = {}
            if tactics:
                others = {_name(p): product.ours(p) for p in _plans(m, n, k, multiprocessors)}
                found = {name: each / product.copies for name, each in interleaved_us(others, repeats=7).items()}
            share = n * k / (us["fut"] * 1e-6) / bandwidth
            yield W8A16Result(m, n, k, us, _name(plan), found, share, product.host_us())
            del product, works
            torch.cuda.empty_cache()


def _plans(m: int, n: int, k: int, multiprocessors: int) -> Iterator[W8A16Plan]:
    """Tiles that are not far too wide, each with a few numbers of parts."""
    stages = -(-k // 64)
    for channels, tokens in TILES:
        if tokens >= 4 * max(m, 16) or (m > 256 and tokens < 128):
            continue
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            if splits == 1 or -(-stages // splits) * (splits - 1) < stages:
                yield w8a16.plan(m, n, k, multiprocessors, channels, tokens, splits)


def _name(plan: W8A16Plan) -> str:
    return f"{plan.channels}x{plan.tokens}/{plan.splits}"


class _Product:
    """One input and as many copies of the weights as fill the L2 several times."""

    def __init__(self, m: int, n: int, k: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(m + n + k)
        self.copies = max(2, math.ceil(_LEAST_BYTES / (n * k)))
        self.a = torch.randn(m, k, generator=generator, device=device).to(torch.bfloat16)
        wide = [torch.randn(n, k, generator=generator, device=device) for _ in range(self.copies)]
        self.weights = [w.to(E4M3) for w in wide]
        self.wide = [w.to(torch.bfloat16) for w in wide]
        self.alpha = torch.full((n,), 0.01, device=device)
        self.scale = torch.full((n,), 0.01, device=device, dtype=torch.bfloat16)
        self.out = torch.empty(m, n, dtype=torch.bfloat16, device=device)

    def ours(self, plan: W8A16Plan) -> Callable[[], None]:
        workspace = torch.zeros(plan.workspace_bytes, dtype=torch.uint8, device=self.a.device)
        return partial(self._ours, plan, workspace if plan.workspace_bytes else None)

    def _ours(self, plan: W8A16Plan, workspace: Tensor | None) -> None:
        for b in self.weights:
            w8a16.multiply(self.a, b, self.alpha, None, self.out, plan, workspace)

    def cast(self) -> None:
        """What PyTorch offers without a kernel of its own: a BF16 copy of the weights for each product."""
        for b in self.weights:
            torch.mul(torch.matmul(self.a, b.to(torch.bfloat16).T), self.scale, out=self.out)

    def bf16(self) -> None:
        """A product with weights of twice the bytes."""
        for b in self.wide:
            torch.matmul(self.a, b.T, out=self.out)

    def host_us(self) -> float:
        """Median microseconds of a call of the operator, workspace and output given, on a card that keeps up."""
        (m, n), k = self.out.shape, self.a.shape[1]
        nbytes = mm_bf16_fp8_workspace_bytes(m, n, k, device=self.a.device.index)
        workspace = torch.zeros(max(16, nbytes), dtype=torch.uint8, device=self.a.device)
        times = []
        for _ in range(_HOST_CALLS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            mm_bf16_fp8(self.a, self.weights[0], self.alpha, out=self.out, workspace=workspace)
            times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return statistics.median(times) * 1e6
