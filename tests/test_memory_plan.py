"""The plan of a card's memory: what it counts, without a card, and how `fut-run info --memory` shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.cli import main
from fut_runtime.cuda.arena import TENSOR_ALIGN
from fut_runtime.cuda.library import library
from fut_runtime.cuda.memory_plan import block_bytes, choose_cache, page_bytes, plan_memory
from fut_runtime.errors import FutError, UnsupportedError
from tiny_artifact import MODEL, make_manifest, write_artifact

LLAMA_8B = replace(MODEL, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return Artifact.open(write_artifact(tmp_path / "out", make_manifest(formats=("int4", "bf16"))))


def test_the_cache_of_an_8b_model_takes_34_8_kb_a_token() -> None:
    assert page_bytes(LLAMA_8B, KVCacheSpec()) == 64 * 34816
    assert page_bytes(LLAMA_8B, KVCacheSpec(bits=16)) == 64 * 2 * 2 * 32 * 8 * 128


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("bits", [4, 16])
def test_the_library_lays_blocks_out_as_planned(head_dim: int, bits: int) -> None:
    try:
        functions = library()
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert functions.fut_kv_block_bytes(bits, head_dim) == block_bytes(bits, head_dim)


def test_counts_weights_cache_and_tables(artifact: Artifact) -> None:
    plan = plan_memory(artifact, context_tokens=100, requests=3)
    assert (plan.decode_mode, plan.cache_bits, plan.pages) == ("int4", 4, 6)
    # 12 channels a head: 64 tokens of codes, scales and zero points for K and V, in 2 layers of 2 KV heads.
    assert plan.page_bytes == 2 * 2 * 64 * (2 * 12 // 2 + 2 * 4)
    assert plan.cache_bytes == 6 * plan.page_bytes
    assert plan.rope_bytes == 2 * 100 * 6 * 4
    stored = sum(
        artifact.spec(name).nbytes
        for name in (place.spec.name for places in artifact.shards.values() for place in places)
        if name == "embed" or name == "final_norm" or ".int4" in name
    )
    assert stored <= plan.weights_bytes <= stored + 40 * TENSOR_ALIGN
    assert plan.total_bytes >= plan.weights_bytes + plan.cache_bytes + plan.rope_bytes + 64 * 50 * 4
    wider = plan_memory(artifact, context_tokens=100, requests=3, decode_mode="bf16", kv_cache="bf16")
    assert wider.weights_bytes > plan.weights_bytes and wider.page_bytes == 2 * 2 * 64 * 2 * 12 * 2
    assert plan_memory(artifact).context_tokens == 128


def test_the_cache_may_be_another_than_the_artifacts() -> None:
    manifest = make_manifest()
    wide = replace(manifest, kv_cache=KVCacheSpec(bits=16, rotation=False, zero_point=False))
    symmetric = replace(manifest, kv_cache=KVCacheSpec(zero_point=False))
    assert choose_cache(manifest, None) == choose_cache(wide, "int4") == KVCacheSpec()
    assert choose_cache(symmetric, "int4") == symmetric.kv_cache
    assert choose_cache(manifest, "bf16") == choose_cache(wide, None) == wide.kv_cache
    with pytest.raises(UnsupportedError, match="kv_cache is 'int8'"):
        choose_cache(manifest, "int8")


def test_refuses_what_cannot_be(artifact: Artifact) -> None:
    for options in ({"context_tokens": 129}, {"context_tokens": 0}, {"requests": 0}):
        with pytest.raises(FutError, match="expected at least one request of 1 to 128 tokens"):
            plan_memory(artifact, **options)
    with pytest.raises(UnsupportedError, match="decode_mode fp8 needs every projection in e4m3"):
        plan_memory(artifact, decode_mode="fp8")


def test_info_prints_the_plan(artifact: Artifact) -> None:
    command = ["info", str(artifact.path), "--memory", "--context", "100", "--batch", "3"]
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code == 0, result.stderr
    memory = json.loads(result.stdout)["memory"]
    assert memory["pages"] == 6 and memory["cache_bytes"] == 6 * memory["page_bytes"]
    text = CliRunner().invoke(main, command).stdout
    assert "memory of a card for 3 requests of 100 tokens" in text and "4 bits, 6 pages of" in text
    for wrong in (["info", "--memory"], ["info", str(artifact.path), "--context", "5"]):
        assert CliRunner().invoke(main, wrong).exit_code == 2
    result = CliRunner().invoke(main, [*command[:3], "--context", "129"])
    assert result.exit_code == 1 and "the model's positions" in result.stderr
