"""`fut-run bench prefill` without a card: what its lines, tables and plot say, and where its prompts lie."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from fut_runtime.bench.prefill import FirstTokenResult, LayerResult, layer_bytes, layer_operations
from fut_runtime.bench.prefill_model import DeepPrefill
from fut_runtime.bench.shapes import SHAPES
from fut_runtime.cli import main
from fut_runtime.commands.bench_prefill import PACKED, case_text, print_first_tokens, print_layers, roofline
from fut_runtime.cuda.prefill import Chunk

US = {"fut_fp8": 650.0, "torch_fp8": 780.0, "fut_bf16": 1200.0, "torch_bf16": 1320.0}


def result(lengths: list[int]) -> LayerResult:
    model = SHAPES["8b"]
    sizes = {"fut_fp8": layer_bytes(model, sum(lengths), 1), "fut_bf16": layer_bytes(model, sum(lengths), 2)}
    return LayerResult(lengths, US, layer_operations(model, lengths), sizes)


def test_operations_of_a_layer() -> None:
    """Llama-3.1-8B's layer has 218 million weights; attention over 2048 tokens is half of 2048² pairs, twice."""
    model = SHAPES["8b"]
    weights = 4096 * (6144 + 4096 + 2 * 14336 + 14336)
    assert layer_operations(model, [2048]) == 2 * 2048 * weights + 2 * 4096 * 2048 * 2049
    assert layer_operations(model, [100, 7]) == 2 * 107 * weights + 2 * 4096 * (100 * 101 + 7 * 8)
    assert layer_bytes(model, 0, 1) == weights and layer_bytes(model, 0, 2) == 2 * weights
    # E4M3 in and out of four products, the residual stream four times, Q, K and V twice in BF16.
    assert layer_bytes(model, 1, 1) - weights == 2 * (2 * 4096 + 4096 + 14336) + 2 * 4 * 4096 + 4 * 6144


def test_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    line = result([2048]).to_json()
    assert line["ratio"] == {"fut_fp8": 1.2, "fut_bf16": 1.1} and line["kind"] == "layer" and json.dumps(line)
    assert LayerResult([5], {"fut_fp8": 1.0}, 10, {}).to_json()["ratio"] == {}
    print_layers("8b", "NVIDIA H200", [result([2048]), *map(result, PACKED)])
    first = FirstTokenResult(32, 2048, {"fut_fp8": 25.6})
    assert first.to_json()["tokens_per_s"] == {"fut_fp8": 80000}
    print_first_tokens("8b", [first])
    shown = " ".join(capsys.readouterr().out.split())
    assert "8b, one layer; NVIDIA H200" in shown and "2048 650.0 780.0 1200.0 1320.0" in shown and "1.20" in shown
    assert "8 × 2048" in shown and "2048 + 7 × 128" in shown and "2048 25.60 80,000" in shown
    assert case_text([5, 7, 5]) == "2 × 5 + 7"


def test_the_plot_is_a_picture() -> None:
    picture = roofline("8b", [result([512]), result([2048])], 4.3e12)
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


class Recorder:
    """Stands in for a decoder and a prefill."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}
        self.given: dict[str, object] = {}

    def set_pages(self, slot: int, pages: range) -> None:
        self.pages[slot] = list(pages)

    def run(self, chunks: list[Chunk], **given: object) -> None:
        self.given = given


def test_prompts_have_pages_of_their_own() -> None:
    prefill, decoder = Recorder(), Recorder()
    deep = DeepPrefill(prefill, decoder, 50)  # type: ignore[arg-type]
    chunks = deep.chunks([65, 3, 64])
    assert prefill.pages == decoder.pages == {0: [0, 1], 1: [2], 2: [3]}
    assert [(c.slot, c.position, len(c.ids)) for c in chunks] == [(0, 0, 65), (1, 0, 3), (2, 0, 64)]
    deep.run(chunks)
    assert prefill.given == {"ended": [0, 1, 2], "heads": (), "logits": None}
    logits = torch.empty(3, 50)
    deep.run(chunks, logits)
    assert prefill.given["logits"] is logits and list(prefill.given["heads"]) == [0, 1, 2]  # type: ignore[call-overload]


def test_unknown_shapes_and_numbers_are_refused() -> None:
    run = CliRunner().invoke(main, ["bench", "prefill", "--shape", "9b"])
    assert run.exit_code == 1 and "'9b', expected one of 1b, 8b, 70b, 405b" in run.output
    assert "no list of whole numbers" in CliRunner().invoke(main, ["bench", "prefill", "--tokens", "x"]).output
