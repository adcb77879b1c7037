"""Times of a layer's four products with many rows, beside PyTorch's in the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.bench.timing import interleaved_us
from fut_runtime.cuda import gemm
from fut_runtime.cuda.gemm import E4M3, Scales, Tuning
from fut_runtime.cuda.structs import Accumulation, GemmTile

#: Several times the L2, so that weights come from memory.
_LEAST_BYTES = 256 << 20
REPEATS = 20
#: The peer of each of ours.
PEERS = {"fut_fp8": "torch_fp8", "fut_fp8_promoted": "torch_fp8", "fut_bf16": "torch_bf16"}


@dataclass(frozen=True)
class GemmResult:
    """One product: [m, k] times [n, k] transposed.

    Attributes:
        us: median microseconds of each contender.
        tiles: what the cost model chose for each of ours.
    """

    module: str
    m: int
    n: int
    k: int
    us: Mapping[str, float]
    tiles: Mapping[str, str]

    def teraflops(self, name: str) -> float:
        """10¹² operations a second, two for each product."""
        return 2 * self.m * self.n * self.k / self.us[name] / 1e6

    def ratio(self, ours: str) -> float:
        """How many times faster than its peer."""
        return self.us[PEERS[ours]] / self.us[ours]

    def to_json(self) -> dict[str, object]:
        """The line without the facts that all lines of a run share."""
        return {
            "module": self.module, "m": self.m, "n": self.n, "k": self.k,
            "us": {name: round(us, 2) for name, us in self.us.items()},
            "teraflops": {name: round(self.teraflops(name), 1) for name in self.us},
            "ratio": {name: round(self.ratio(name), 3) for name in PEERS},
            "tiles": dict(self.tiles),
        }  # fmt: skip


def measure(model: ModelSpec, rows: Sequence[int], device: torch.device) -> Iterator[GemmResult]:
    """Every module of a layer with each number of rows, in that order."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for module in MODULES:
        n, k = model.module_shape(module)
        for m in rows:
            us: dict[str, float] = {}
            for dtype in (E4M3, torch.bfloat16):
                us |= interleaved_us(_contenders(m, n, k, dtype, device), repeats=REPEATS)
                torch.cuda.empty_cache()
            copies = _copies(n, k)
            tiles = {
                "fut_fp8": _tile(gemm.plan(m, n, k, E4M3, multiprocessors)),
                "fut_fp8_promoted": _tile(gemm.plan(m, n, k, E4M3, multiprocessors, Accumulation.PROMOTED)),
                "fut_bf16": _tile(gemm.plan(m, n, k, torch.bfloat16, multiprocessors)),
            }
            yield GemmResult(module, m, n, k, {name: each / copies for name, each in us.items()}, tiles)


def _tile(tile: GemmTile) -> str:
    """Columns, and CTAs of a cluster."""
    return f"{tile.tile_n}x{tile.cluster}"


def _copies(n: int, k: int) -> int:
    return max(2, math.ceil(_LEAST_BYTES / (n * k)))


def _contenders(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], None]]:
    """Each multiplies one input with every copy of the weights."""
    generator = torch.Generator(device).manual_seed(m + n + k)

    def random(rows: int) -> Tensor:
        return torch.randn(rows, k, generator=generator, device=device).to(dtype)

    a = random(m)
    weights = [random(n) for _ in range(_copies(n, k))]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    if dtype == torch.bfloat16:
        return {
            "fut_bf16": partial(_ours, a, weights, out, Scales(), Tuning()),
            "torch_bf16": partial(_bf16, a, weights, out),
        }
    one = torch.ones(1, device=device)
    scales = Scales(a=one, channel=torch.ones(n, device=device))
    return {
        "fut_fp8": partial(_ours, a, weights, out, scales, Tuning()),
        "fut_fp8_promoted": partial(_ours, a, weights, out, scales, Tuning(Accumulation.PROMOTED)),
        "torch_fp8": partial(_fp8, a, weights, out, one),
    }


def _ours(a: Tensor, weights: Sequence[Tensor], out: Tensor, scales: Scales, tuning: Tuning) -> None:
    for b in weights:
        gemm.store(a, b, out, scales, tuning)


def _bf16(a: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
    for b in weights:
        torch.matmul(a, b.T, out=out)


def _fp8(a: Tensor, weights: Sequence[Tensor], out: Tensor, one: Tensor) -> None:
    """cuBLASLt's product with one scale a tensor and sums in the tensor cores, the fastest that PyTorch offers."""
    for b in weights:
        torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)
