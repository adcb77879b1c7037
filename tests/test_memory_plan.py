"""The plan of a card's memory: what it counts, without a card, and how `fut-run info --memory` shows it."""

from __future__ import annotations

import json
import logging
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
from fut_runtime.cuda.prefill_plan import history_page_bytes, wanted_history_pages
from fut_runtime.cuda.prefill_weights import PrefillChoice, choose_prefill_mode
from fut_runtime.cuda.prompt_memory import PromptMemory
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
    plan = plan_memory(artifact, context_tokens=100, requests=3, prefill_mode="decode")
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
    wider = plan_memory(
        artifact, context_tokens=100, requests=3, decode_mode="bf16", kv_cache="bf16", prefill_mode="decode"
    )
    assert wider.weights_bytes > plan.weights_bytes and wider.page_bytes == 2 * 2 * 64 * 2 * 12 * 2
    assert plan_memory(artifact).context_tokens == 128


def test_counts_what_prompts_take_beside_it(artifact: Artifact) -> None:
    alone = plan_memory(artifact, context_tokens=100, requests=3, prefill_mode="decode")
    assert (alone.prefill_mode, alone.history_pages, alone.history_bytes) == ("decode", 0, 0)
    assert alone.prefill_workspace_bytes in (0, None)
    plan = plan_memory(artifact, context_tokens=100, requests=3)
    # The artifact has no E4M3 weights, so prompts read its BF16 ones.
    assert (plan.prefill_mode, plan.prefill_reason, plan.history_pages) == ("bf16", "", 6)
    assert plan.history_page_bytes == 2 * 2 * 64 * 2 * 2 * 12
    both = plan_memory(artifact, context_tokens=100, requests=3, decode_mode="bf16")
    assert plan.weights_bytes > both.weights_bytes > alone.weights_bytes
    run = plan.prefill_workspace_bytes or 0
    assert plan.total_bytes == alone.total_bytes + plan.weights_bytes - alone.weights_bytes + plan.history_bytes + run


def test_history_is_for_one_prompt_at_least_and_for_no_more_than_there_can_be() -> None:
    assert wanted_history_pages(100, 3) == 6
    assert wanted_history_pages(8192, 16) == 512
    assert wanted_history_pages(131072, 16) == 2048


def test_prompts_take_the_decode_path_where_nothing_else_goes() -> None:
    manifest = make_manifest(formats=("int4",))
    choice = choose_prefill_mode(manifest, None)
    assert choice.mode == "decode" and choice.weight_format is None
    assert choice.reason == "e4m3 needs every projection in e4m3; bf16 needs every projection in bf16"
    assert choose_prefill_mode(make_manifest(), None).mode == "e4m3"
    assert choose_prefill_mode(make_manifest(), "decode").reason == ""
    odd = replace(manifest, model=replace(manifest.model, hidden_size=12))
    assert "a hidden size that is a multiple of 8, not 12" in choose_prefill_mode(odd, None).reason
    with pytest.raises(UnsupportedError, match="prefill_mode bf16 needs every projection in bf16: choose prefill_mode"):
        choose_prefill_mode(manifest, "bf16")
    with pytest.raises(UnsupportedError, match="prefill_mode is 'fp4'"):
        choose_prefill_mode(manifest, "fp4")


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
    assert memory["prefill_mode"] == "bf16" and memory["history_bytes"] == 6 * memory["history_page_bytes"]
    text = CliRunner().invoke(main, command).stdout
    assert "memory of a card for 3 requests of 100 tokens" in text and "4 bits, 6 pages of" in text
    assert "int4, for prompts bf16" in text and "BF16, 6 pages of" in text and "prompts on CUDA" in text
    for wrong in (["info", "--memory"], ["info", str(artifact.path), "--context", "5"]):
        assert CliRunner().invoke(main, wrong).exit_code == 2
    result = CliRunner().invoke(main, [*command[:3], "--context", "129"])
    assert result.exit_code == 1 and "the model's positions" in result.stderr


def test_a_short_card_gets_a_short_history(caplog: pytest.LogCaptureFixture) -> None:
    manifest = make_manifest()
    page = history_page_bytes(manifest.model)
    memory = PromptMemory(PrefillChoice("e4m3"), manifest, 64, 2048, 0, "request")
    with caplog.at_level(logging.WARNING):
        assert memory.fit_history(3000 * page, 131072) == 2048 * page and not caplog.text
        assert memory.fit_history(100 * page + 5, 131072) == 100 * page
    assert "requests of more than 6400 tokens take the decode path" in caplog.text
    # One short prompt fits always; whether the card has that much is for the whole plan to say.
    assert memory.fit_history(-5, 131072) == 16 * page
