"""The plan of a checkpoint of 405 billion weights, from headers alone: its shards are sparse files."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16384, 53248, 126, 128, 8, 128, 128256
SHARD_BYTES = 4_700_000_000
MOST_MEMORY_BYTES = 500_000_000


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_sparse_checkpoint(directory: Path) -> int:
    """Headers and holes; returns the number of shards."""
    directory.mkdir()
    shards: list[dict[str, object]] = [{}]
    ends = [0]
    for name, shape in tensors():
        size = 2 * math.prod(shape)
        if shards[-1] and ends[-1] + size > SHARD_BYTES:
            shards.append({})
            ends.append(0)
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [ends[-1], ends[-1] + size]}
        ends[-1] += size
    where = {}
    for number, (header, end) in enumerate(zip(shards, ends, strict=True), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        where |= dict.fromkeys(header, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return len(shards)


def test_the_plan_of_405b_reads_headers_only(tmp_path: Path) -> None:
    assert write_sparse_checkpoint(tmp_path / "405b") >= 191
    code = """
import json, sys
from fut_convert import plan_conversion
from fut_convert.memory import peak_host_bytes
plan = plan_conversion(sys.argv[1], sys.argv[2], overrides={"calibration.enabled": False})
found = {"input": plan.input_bytes, "output": plan.output_bytes, "peak": peak_host_bytes()}
print(json.dumps({**found, "problems": list(plan.errors)}))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "405b"), str(tmp_path / "out")]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["input"] == sum(2 * math.prod(shape) for _, shape in tensors())
    assert 600e9 < found["output"] < 640e9
    assert found["peak"] < MOST_MEMORY_BYTES
    # The disk that holds this test has no room for it, and that is all that stands in the way.
    assert all("are free there" in problem for problem in found["problems"])
