"""`fut-run bench` as far as it goes without a card: sizes, floors, random contents, lines, and options refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fut_runtime.artifact.layout import weight_tensors
from fut_runtime.artifact.manifest import KVCacheSpec, Manifest
from fut_runtime.artifact.spec import MODULES
from fut_runtime.bench import decode, model
from fut_runtime.bench import w8a16 as w8a16_bench
from fut_runtime.bench.decode import DecodePlan, DecodeResult, one_layer_bytes
from fut_runtime.bench.gemm import GemmResult
from fut_runtime.bench.machine import source_commit
from fut_runtime.bench.model import step_bytes
from fut_runtime.bench.random_tensors import fill_cache, fill_weights
from fut_runtime.bench.shapes import SHAPES, manifest_of, with_layers
from fut_runtime.bench.w8a16 import W8A16Result
from fut_runtime.cli import main
from fut_runtime.commands import bench
from fut_runtime.commands.bench_gemm import print_table
from fut_runtime.commands.bench_w8a16 import print_table as print_w8a16_table
from fut_runtime.cuda.arena import ArenaPlan
from fut_runtime.cuda.decoder import Row
from fut_runtime.cuda.structs import DecoderConfig
from fut_runtime.cuda.tensors import needed_tensors
from fut_runtime.cuda.w8a16 import W8A16Plan
from fut_runtime.errors import FutError
from w8a16_checks import TILES

SMALL = replace(
    SHAPES["1b"],
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=200,
)
FORMATS = ["int4", "e4m3", "bf16"]


def result(**changes: object) -> DecodeResult:
    values = {
        "batch": 8, "context": 1024, "layers": 32, "step_ms": 1.25, "host_ms": 1.5, "weight_bytes": 4_000_000_000,
        "cache_bytes": 500_000_000, "read_bytes_per_s": 4.5e12, **changes,
    }  # fmt: skip
    return DecodeResult(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_manifests_of_shapes_are_valid(shape: str, weight_format: str) -> None:
    manifest = manifest_of(SHAPES[shape], weight_format, KVCacheSpec())
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_an_8b_layer_is_what_the_design_counts() -> None:
    """218.1 million weights at half a byte, and two bytes for every 128 of them; an E4M3 head of 525 million."""
    manifest = manifest_of(SHAPES["8b"], "int4", KVCacheSpec())
    parameters = sum(math.prod(SHAPES["8b"].module_shape(m)) for m in MODULES)
    assert parameters == 218_103_808
    layer = [t for m in MODULES for t in weight_tensors(f"layers.0.{m}", manifest.weights[f"layers.0.{m}"]["int4"])]
    assert sum(t.nbytes for t in layer) == parameters * (1 / 2 + 2 / 128)
    found = step_bytes(manifest, "int4", KVCacheSpec(), batch=2, context=1024)
    assert found.cache == 2 * 1024 * 34816
    norms = 32 * 2 * 4096 * 4
    head = 128256 * 4096 + 128256 * 4
    assert found.weights == 32 * parameters * (1 / 2 + 2 / 128) + norms + head + 2 * 2 * 4096


def test_fewer_layers_need_fewer_bytes_and_leave_the_head() -> None:
    manifest = manifest_of(SHAPES["8b"], "bf16", KVCacheSpec())
    plan = DecodePlan("8b", manifest, "bf16", "bf16", KVCacheSpec(), batches=[1], contexts=[64])
    layer = one_layer_bytes(plan, 1, 64)
    few, more = (step_bytes(with_layers(manifest, n), "bf16", KVCacheSpec(), 1, 64).total for n in (3, 7))
    assert more - few == 4 * layer
    assert few - 3 * layer > 128256 * 4096


@pytest.mark.parametrize("weight_format", FORMATS)
def test_random_weights_keep_activations_at_their_size(weight_format: str) -> None:
    manifest = manifest_of(SMALL, weight_format, KVCacheSpec())
    plan = ArenaPlan.of(needed_tensors(manifest, weight_format))
    tensors = plan.views(torch.zeros(plan.nbytes, dtype=torch.uint8))
    fill_weights(tensors, manifest, torch.Generator().manual_seed(1))
    for name, tensor in tensors.items():
        assert bool(tensor.float().isfinite().all()), name
        assert tensor.float().unique().numel() > 8, name
    for module in MODULES:
        name = f"layers.1.{module}"
        columns = SMALL.module_shape(module)[1]
        if weight_format == "int4":
            nibbles = tensors[f"{name}.int4"].view(torch.uint8)
            rms = ((torch.cat([nibbles & 15, nibbles >> 4]).float() - 8) ** 2).mean().sqrt()
            rms = rms * tensors[f"{name}.int4_scale"].float().mean()
        elif weight_format == "e4m3":
            scale = tensors[f"{name}.e4m3_scale"]
            rms = tensors[f"{name}.e4m3"].float().pow(2).mean().sqrt() * scale.mean()
        else:
            rms = tensors[f"{name}.bf16"].float().pow(2).mean().sqrt()
        assert rms * columns**0.5 == pytest.approx(1, rel=0.15), name


def test_random_pages_are_small_positive_numbers_wherever_they_are_read() -> None:
    pool = torch.zeros(1 << 16, dtype=torch.uint8)
    fill_cache(pool, torch.Generator().manual_seed(1))
    numbers = pool.view(torch.bfloat16).float()
    assert numbers.min() > 0.007 and numbers.max() < 0.032 and numbers.unique().numel() == 256


class FakeDecoder:
    """Remembers what it was asked for; every layer of a step takes a millisecond, everything else five."""

    def __init__(self, library: object, config: DecoderConfig, device: object, about: str) -> None:
        self.config = config
        self.pages: dict[int, list[int]] = {}
        self.steps: list[list[Row]] = []
        assert all(config.layer[i].down.weight for i in range(config.layers))
        made.append(self)

    def set_pages(self, slot: int, pages: list[int]) -> None:
        self.pages[slot] = pages

    def step(self, rows: list[Row], head_rows: range, draws: list[object]) -> None:
        assert len(rows) == len(head_rows) == len(draws)
        self.steps.append(rows)
        stepped.append(self)

    def tokens(self, count: int) -> list[int]:
        return [3] * count

    def close(self) -> None:
        self.steps.append([])


made: list[FakeDecoder] = []
stepped: list[FakeDecoder] = []


def test_a_run_steps_every_case_and_takes_the_difference_of_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(model, "Decoder", FakeDecoder)
    monkeypatch.setattr(model, "library", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def interval_ms(work: Callable[[], object], *, repeats: int, warm_up: int) -> float:
        work()
        return stepped[-1].config.layers + 5.0

    monkeypatch.setattr(decode, "interval_ms", interval_ms)
    manifest = manifest_of(replace(SMALL, num_layers=6), "int4", KVCacheSpec())
    plan = DecodePlan("small", manifest, "int4", "int4", KVCacheSpec(), batches=[1, 3], contexts=[64, 200])
    found = list(decode.measure(plan, 1e9, per_layer=True, device=torch.device("cpu")))
    assert [(r.batch, r.context) for r in found] == [(1, 64), (1, 200), (3, 64), (3, 200)]
    assert all(r.step_ms == 11.0 and r.layer_us == pytest.approx(1000.0) for r in found)
    whole = made[0]
    assert whole.config.layers == 6 and {d.config.layers for d in made[1:]} == {2}
    assert all(d.steps[-1] == [] for d in made), "a decoder was left open"
    used = [page for pages in whole.pages.values() for page in pages]
    assert [len(pages) for pages in whole.pages.values()] == [4, 4, 4]
    assert len(set(used)) == 12 and max(used) < whole.config.cache.pages
    last = whole.steps[-2]
    assert [(row.position, row.slot) for row in last] == [(199, 0), (199, 1), (199, 2)]


def test_the_floor_is_bytes_over_bandwidth() -> None:
    line = result()
    assert line.floor_ms == pytest.approx(1.0)
    assert line.fraction == pytest.approx(0.8)
    assert line.layer_fraction is None
    assert result(layer_us=30.0, layer_bytes=112_500_000).layer_fraction == pytest.approx(25 / 30)


def test_lines_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifest_of(SHAPES["8b"], "int4", KVCacheSpec())
    plan = DecodePlan("8b", manifest, "int4", "int4", KVCacheSpec(), batches=[8], contexts=[1024])
    lines = [
        result(layer_us=30.0, layer_bytes=112_500_000, peers_layer_us={"torch_bf16": 150.0, "torch_int4": 90.0}),
        result(
            batch=1, layer_us=20.0, layer_bytes=112_500_000, peers_layer_us={"torch_bf16": 140.0, "torch_int4": 95.0}
        ),
    ]
    facts: dict[str, object] = {"card": "a card", "commit": "abc"}
    file = tmp_path / "lines.jsonl"
    for _ in range(2):
        bench._append(file, plan, facts, lines)
    read = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(read) == 4 and read[:2] == read[2:]
    first = read[0]
    assert (first["shape"], first["mode"], first["card"], first["random_weights"]) == ("8b", "int4", "a card", True)
    assert first["torch_bf16"] == {"layer_us": 150.0, "layers_ms": 4.8, "times_slower": 5.0}
    assert first["tokens_per_s"] == 6400.0
    bench._print(plan, facts, 4.5e12, lines)
    shown = " ".join(capsys.readouterr().out.split())
    assert "reads 4.50 TB/s" in shown and "1.250" in shown and "80%" in shown and "150.0" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1,x"], "such as 1,8,32"),
        (["--context", "0"], "such as 1,8,32"),
        (["--mode", "int8"], "int8"),
        (["--layers", "0"], "x>=1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    run = CliRunner().invoke(main, ["bench", "decode", *options])
    assert run.exit_code == 2
    assert message in run.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_so() -> None:
    run = CliRunner().invoke(main, ["bench", "decode"])
    assert run.exit_code == 1
    assert "cuda" in run.output and "Traceback" not in run.output


def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(FutError, match="the model has 32"):
        bench._plan("8B", 33, "int4", None)
    assert bench._plan("8B", 3, "fp8", "bf16").manifest.model.num_layers == 3


def test_a_folder_without_a_repository_has_no_commit(tmp_path: Path) -> None:
    assert source_commit(tmp_path) is None


def test_a_product_is_told_in_operations_and_beside_its_peer() -> None:
    us = {"fut_fp8": 80.0, "fut_fp8_promoted": 100.0, "torch_fp8": 90.0, "fut_bf16": 200.0, "torch_bf16": 190.0}
    found = GemmResult("qkv", 2048, 6144, 4096, us, {"fut_fp8": "128x2"})
    line = found.to_json()
    assert line["teraflops"]["fut_fp8"] == round(2 * 2048 * 6144 * 4096 / 80e-6 / 1e12, 1)  # type: ignore[index]
    assert line["ratio"] == {"fut_fp8": 1.125, "fut_fp8_promoted": 0.9, "fut_bf16": 0.95}
    assert line["tiles"] == {"fut_fp8": "128x2"} and json.dumps(line)


def test_products_of_an_unknown_shape_are_refused() -> None:
    run = CliRunner().invoke(main, ["bench", "gemm", "--shape", "9b"])
    assert run.exit_code == 1 and "'9b', expected one of 1b, 8b, 70b, 405b" in run.output
    assert "no list of whole numbers" in CliRunner().invoke(main, ["bench", "gemm", "--rows", "0"]).output


def test_a_w8a16_product_is_told_beside_its_peers_and_the_read_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    us = {"fut": 40.0, "cast": 700.0, "bf16": 64.0}
    found = W8A16Result(16, 28672, 4096, us, "64x16/3", {"128x16/1": 45.0, "64x16/3": 41.0}, 0.7, 9.5)
    line = found.to_json()
    assert line["times_faster"] == {"cast": 17.5, "bf16": 1.6} and line["tile"] == "64x16/3" and json.dumps(line)
    print_w8a16_table("NVIDIA H200", 4.2e12, [found])
    output = " ".join(capsys.readouterr().out.split())
    assert "reads 4200 GB/s" in output and "16 28672 4096 40.0 700.0 64.0 17.50 1.60 70 % 64x16/3 9.5" in output
    assert output.endswith("16 × 28672 × 4096: 64x16/3 41.0, 128x16/1 45.0")


def test_every_tactic_that_is_timed_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(w8a16_bench.TILES) == set(TILES)
    monkeypatch.setattr(w8a16_bench.w8a16, "plan", lambda m, n, k, sms, *tile: W8A16Plan(*tile, 0))
    names = Counter((p.channels, p.tokens) for p in w8a16_bench._plans(16, 4096, 320, 132))
    assert set(names) == {(128, 16), (128, 32), (64, 16), (64, 32)} and names[128, 16] == 3


def test_the_table_of_products_names_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    us = {"fut_fp8": 80.0, "fut_fp8_promoted": 100.0, "torch_fp8": 90.0, "fut_bf16": 200.0, "torch_bf16": 190.0}
    print_table("8b", "NVIDIA H200", [GemmResult("qkv", 2048, 6144, 4096, us, {})])
    output = " ".join(capsys.readouterr().out.split())
    assert "8b, one layer; NVIDIA H200" in output and "qkv 2048 80.0 100.0 90.0 200.0 190.0" in output
