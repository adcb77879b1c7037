"""`fut-run bench attention` as far as it goes without a card: batches, contenders, lines and the table."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from fut_runtime.bench import attention as attention_bench
from fut_runtime.bench.attention import AttentionResult, Heads, parse_case
from fut_runtime.cli import main
from fut_runtime.commands import bench_attention
from fut_runtime.cuda import prefill_attention
from fut_runtime.cuda.gemm import History, Quantized
from fut_runtime.cuda.prefill_attention import Prompts
from fut_runtime.errors import FutError


def test_batches_of_prompts() -> None:
    assert parse_case("2048") == [2048]
    assert parse_case("2048+7x128") == [2048, *[128] * 7]
    for text in ("", "0", "2x", "x3", "2x0", "0x5", "3+", "1.5"):
        with pytest.raises(FutError, match="is no batch of prompts such as"):
            parse_case(text)
    run = CliRunner().invoke(main, ["bench", "attention", "--kv-heads", "5"])
    assert run.exit_code == 1 and "--kv-heads is 5, expected a divisor of the 32 heads" in run.output


def test_attention_is_told_in_operations_and_beside_its_peers(capsys: pytest.CaptureFixture[str]) -> None:
    us = {"fut_bf16": 80.0, "fut_e4m3": 84.0, "torch_flash": 200.0}
    found = AttentionResult("2048+2x64", Heads(32, 8, 128), us, ["torch_flash"])
    line = found.to_json()
    operations = 4 * 32 * 128 * (2048**2 + 2 * 64**2) / 2
    assert line["teraflops"]["fut_bf16"] == round(operations / 80e-6 / 1e12, 1)  # type: ignore[index]
    assert line["ratio"] == {"fut_bf16/torch_flash": 2.5, "fut_e4m3/torch_flash": 2.381}
    assert line["expanded"] == ["torch_flash"] and json.dumps(line)
    bench_attention.print_table("NVIDIA H200", [found])
    output = " ".join(capsys.readouterr().out.split())
    assert "32 heads, 8 KV heads, head_dim 128; NVIDIA H200" in output
    assert "2048+2x64 80.0 84.0 – 200.0 430 – 2.50" in output


def test_every_contender_attends_to_every_copy_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card FlashAttention runs and cuDNN does not."""
    seen: list[tuple[int, torch.dtype]] = []

    def attend(q: Tensor, history: History, prompts: Prompts, out: Tensor | None, copy: object, _: Tensor) -> None:
        pages = [row[: -(-length // 64)] for row, length in zip(history.page_table, (100, 64, 64), strict=True)]
        assert torch.cat(pages).sort().values.tolist() == list(range(history.keys.shape[0])) == [0, 1, 2, 3]
        assert (prompts.rows, prompts.max_chunk, q.shape) == (228, 100, (228, 4, 64))
        assert prompts.first_row.tolist() == [0, 100, 164, 228]
        assert (out is None) == isinstance(copy, Quantized)
        seen.append((q.data_ptr(), torch.bfloat16 if out is not None else torch.float8_e4m3fn))

    def once(works: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
        for work in works.values():
            work()
        return dict.fromkeys(works, 30.0)

    monkeypatch.setattr(prefill_attention, "attend", attend)
    monkeypatch.setattr(attention_bench, "interleaved_us", once)
    monkeypatch.setattr(attention_bench, "_LEAST_BYTES", 3 * 2 * 228 * 8 * 64)
    (found,) = attention_bench.measure(Heads(4, 2, 64), ["100+2x64"], torch.device("cpu"))
    assert found.us == {"fut_bf16": 10.0, "fut_e4m3": 10.0, "torch_flash": 10.0}
    assert [dtype for _, dtype in seen] == [torch.bfloat16] * 3 + [torch.float8_e4m3fn] * 3
    assert len({place for place, _ in seen}) == 3
