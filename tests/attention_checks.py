"""What prompts' attention must fulfil, for tests on a card and for tests in the emulation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.cuda import prefill_attention
from fut_runtime.cuda.gemm import History, Quantized
from fut_runtime.cuda.prefill_attention import Prompts
from fut_runtime.cuda.structs import PAGE_TOKENS
from gemm_matrices import E4M3, close, device, poisoned, relative, untouched, vector

BF16 = torch.bfloat16
#: Of a row, relative to its length: P and the output are rounded to BF16, 2^-9 at most each.
TOLERANCE = 2**-8


@dataclass(frozen=True)
class Setting:
    """Requests with a history. Whatever nobody wrote is NaN: tails of pages, pages of nobody, what lies below Q.

    Attributes:
        chunks: first position and tokens of each request's chunk.
        keys, values: of each request, BF16 [tokens, kv_heads, head_dim].
    """

    chunks: list[tuple[int, int]]
    q: Tensor
    history: History
    prompts: Prompts
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def random(cls, chunks: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> Setting:
        """Requests in slots and pages of no order; scores of up to about 10, so that few keys weigh much."""
        lengths = [first + tokens for first, tokens in chunks]
        pages = [-(-length // PAGE_TOKENS) for length in lengths]
        width = max(pages) + 2
        order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(sum(lengths)))
        slots = torch.randperm(len(chunks) + 1, generator=torch.Generator().manual_seed(1))[: len(chunks)].tolist()
        # A page of nobody: what comes from it is NaN.
        table = torch.full((len(chunks) + 1, width), int(order[-1]), dtype=torch.int32)
        taken = 0
        for slot, count in zip(slots, pages, strict=True):
            table[slot, :count] = order[taken : taken + count]
            taken += count
        history = History.empty(table.to(device()), sum(pages) + 3, kv_heads, head_dim)
        generator = torch.Generator(device()).manual_seed(head_dim + sum(lengths))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device())

        keys, values = [], []
        for slot, length in zip(slots, lengths, strict=True):
            keys.append((1.7 * normal(length, kv_heads, head_dim)).to(BF16))
            values.append((normal(length, kv_heads, head_dim) + 0.5).to(BF16))
            position = torch.arange(length)
            page, place = table[slot, position // PAGE_TOKENS].to(device()), (position % PAGE_TOKENS).to(device())
            history.keys[page, :, place], history.values[page, :, place] = keys[-1], values[-1]
        rows = sum(tokens for _, tokens in chunks)
        whole = torch.full((rows + 64, heads, head_dim), torch.nan, dtype=BF16, device=device())
        whole[:rows] = normal(rows, heads, head_dim).to(BF16)
        prompts = Prompts.of(chunks, slots, device())
        return cls(list(chunks), whole[:rows], history, prompts, keys, values)

    @property
    def columns(self) -> int:
        return self.q.shape[1] * self.q.shape[2]

    def run(self, requests: Sequence[int] | None = None, *, parts: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """BF16 [rows, heads · head_dim] of some requests, or of parts of them: of each chunk tokens begin to end."""
        chosen = list(range(len(self.chunks)) if requests is None else requests)
        spans = parts or [(0, self.chunks[i][1]) for i in chosen]
        first_row = self.prompts.first_row.tolist()
        rows = torch.cat(
            [torch.arange(first_row[i] + a, first_row[i] + b) for i, (a, b) in zip(chosen, spans, strict=True)]
        )
        chunks = [(self.chunks[i][0] + a, b - a) for i, (a, b) in zip(chosen, spans, strict=True)]
        slots = [int(self.prompts.slot[i]) for i in chosen]
        out = poisoned(len(rows), self.columns, BF16)
        workspace = prefill_attention.workspace(device())
        prompts = Prompts.of(chunks, slots, device())
        q = self.q[rows.to(device())].contiguous()
        prefill_attention.attend(q, self.history, prompts, out, None, workspace)
        assert untouched(out) and not workspace.any()
        return out

    def expected(self, request: int, tokens: Tensor | None = None) -> Tensor:
        """FP64 [tokens, heads · head_dim] of a request's chunk, or of some of its tokens."""
        first, count = self.chunks[request]
        chosen = torch.arange(count, device=device()) if tokens is None else tokens
        k, v = (x[request].double().transpose(0, 1) for x in (self.keys, self.values))
        begin = int(self.prompts.first_row[request])
        q = self.q[begin + chosen].double().unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)
        scores = q @ k[:, None].transpose(2, 3) * self.q.shape[2] ** -0.5
        hidden = torch.arange(k.shape[1], device=device()) > (first + chosen)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1)


def check_rows(setting: Setting, found: Tensor) -> None:
    """Every row of every head against FP64."""
    head_dim = setting.q.shape[2]
    for i, (first, tokens) in enumerate(setting.chunks):
        if tokens == 0:
            continue
        begin = int(setting.prompts.first_row[i])
        error = relative(
            found[begin : begin + tokens].unflatten(1, (-1, head_dim)),
            setting.expected(i).unflatten(1, (-1, head_dim)),
        )
        assert error <= TOLERANCE, f"request {i}: {tokens} tokens from {first} on: {error}"


def check_attention(chunks: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> None:
    """Requests of so many tokens, each from its first position on, side by side."""
    setting = Setting.random(chunks, heads, kv_heads, head_dim)
    check_rows(setting, setting.run())


def check_some_rows(chunks: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, count: int) -> None:
    """So many tokens of each request, the first and the last among them."""
    setting = Setting.random(chunks, heads, kv_heads, head_dim)
    found = setting.run()
    for i, (first, tokens) in enumerate(chunks):
        chosen = torch.linspace(0, tokens - 1, min(count, tokens), device=device()).long()
        rows = found[int(setting.prompts.first_row[i]) + chosen]
        error = relative(*(x.unflatten(1, (-1, head_dim)) for x in (rows, setting.expected(i, chosen))))
        assert error <= TOLERANCE, f"request {i}: {tokens} tokens from {first} on: {error}"


def check_company(heads: int, kv_heads: int, head_dim: int, length: int, cuts: Sequence[int]) -> None:
    """A row is the same, bit for bit, alone, beside others, and in chunks; `cuts` are where they begin."""
    setting = Setting.random([(0, length), (5, 40), (130, 3)], heads, kv_heads, head_dim)
    found = setting.run()
    check_rows(setting, found)
    assert torch.equal(setting.run([0]), found[:length])
    assert torch.equal(setting.run([2, 0])[3:], found[:length])
    parts = [setting.run([0], parts=[span]) for span in itertools.pairwise([0, *cuts, length])]
    assert torch.equal(torch.cat(parts), found[:length])


def check_quantized(chunks: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> None:
    """The output in E4M3 with maxima of each request and a count, beside BF16 and alone."""
    setting = Setting.random(chunks, heads, kv_heads, head_dim)
    rows, requests = setting.q.shape[0], len(chunks)
    scale = vector(requests, 3) * 0.004
    found = []
    for out in (poisoned(rows, setting.columns, BF16), None):
        amax = torch.zeros(requests, device=device())
        saturated = torch.zeros(1, dtype=torch.int64, device=device())
        copy = Quantized(poisoned(rows, setting.columns, E4M3), scale, amax, saturated)
        prefill_attention.attend(
            setting.q, setting.history, setting.prompts, out, copy, prefill_attention.workspace(device())
        )
        if out is not None:
            assert torch.equal(out, setting.run())
        assert untouched(copy.data)
        found.append((copy.data, amax, saturated))
    (data, amax, saturated), again = found
    assert torch.equal(data.view(torch.uint8), again[0].view(torch.uint8))
    assert torch.equal(amax, again[1]) and torch.equal(saturated, again[2])
    beyond = 0
    for i, (_, tokens) in enumerate(setting.chunks):
        begin = int(setting.prompts.first_row[i])
        expected, most = setting.expected(i), 448 * float(scale[i])
        # Half a unit in the last of E4M3's places, below 2^-6 of a fixed size, and what P's rounding does.
        length = expected.unflatten(1, (-1, head_dim)).norm(dim=-1).repeat_interleave(head_dim, 1)
        allowed = expected.abs() * 2**-4 + float(scale[i]) * 2**-10 + length * TOLERANCE
        values = data[begin : begin + tokens].double() * float(scale[i])
        assert close(values, expected.clamp(-most, most), allowed), f"request {i}"
        largest = float(expected.abs().max())
        assert abs(float(amax[i]) - largest) <= 2**-7 * largest
        beyond += int((expected.abs() > most).sum())
    assert abs(int(saturated) - beyond) <= 2 + 0.02 * beyond


def check_infinite_values() -> None:
    """What follows a row's position in its own step of keys is masked, infinite scores included."""
    setting = Setting.random([(0, 100)], 2, 1, 64)
    before = setting.run()
    page = setting.history.page_table[int(setting.prompts.slot[0]), 1]
    setting.history.keys[page, :, 20:36] = torch.inf
    assert torch.equal(setting.run()[:84], before[:84])
