"""Seventeen checkpoints that differ where implementations of Llama-family models tend to differ.

Each is small and random: what counts is that two implementations agree on its logits. The reference is
transformers in eager mode, BF16 weights, FP32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from synthetic_checkpoint import SPECIAL_TOKENS, CheckpointShape, write_checkpoint

VOCAB_SIZE = 1024
TOKENS = 96
SEED = 17

_BASE = CheckpointShape(
    hidden=256, intermediate=768, heads=4, kv_heads=2, head_dim=64, vocab_size=VOCAB_SIZE, seed=SEED
)
#: A Llama-3.1 scaling whose original length is short enough to change angles within TOKENS positions.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class OddCheckpoint:
    """A shape, and what is done to its random weights before they are written."""

    shape: CheckpointShape
    change: Callable[[dict[str, Tensor]], None] | None = None


def _k_outliers(tensors: dict[str, Tensor]) -> None:
    """Some channels of K thirty times as large: what a KV quantiser finds in real models."""
    for layer, rows in ((0, (3, 35, 50, 81)), (1, (7, 81, 113))):
        weight = tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
        for row in rows:
            weight[row] = (weight[row].float() * 30).to(weight.dtype)


def _k_outliers_balanced(tensors: dict[str, Tensor]) -> None:
    """The same, with q scaled down by what k is scaled up.

    The factors are powers of two and cover both halves of a rotary pair, so that the model computes the same function
    to the last bit of the weights: only a quantiser of K notices.
    """
    head_dim, half = _BASE.head_dim, _BASE.head_dim // 2
    for layer, channels in ((0, (3, 18)), (1, (7, 17, 30))):
        q = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        k = tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
        for channel in (c + offset for c in channels for offset in (0, half)):
            k[channel::head_dim] *= 32
            q[channel::head_dim] /= 32


def _odd(change: Callable[[dict[str, Tensor]], None] | None = None, **sizes: object) -> OddCheckpoint:
    return OddCheckpoint(replace(_BASE, **sizes), change)  # type: ignore[arg-type]


ODD_CHECKPOINTS: dict[str, OddCheckpoint] = {
    "untied_head_dim_128_gqa_4": _odd(hidden=512, intermediate=1408, kv_heads=1, head_dim=128),
    "tied_head_dim_64": _odd(tied=True),
    "qwen2_biases": _odd(family="qwen2"),
    "rope_llama3": _odd(rope=_LLAMA3_ROPE),
    "rope_llama3_config_style_4": _odd(rope=_LLAMA3_ROPE, config_style=4),
    "head_dim_not_hidden_over_heads": _odd(hidden=384, head_dim=128),
    "three_shards": _odd(shards=3),
    "pickled_only": _odd(pickled=True),
    "as_many_kv_heads": _odd(kv_heads=4),
    "intermediate_1568": _odd(intermediate=1568),
    "qwen3_qk_norm": _odd(family="qwen3", head_dim=128, tied=True, rms_norm_eps=1e-6),
    "head_dim_80": _odd(hidden=320, head_dim=80),
    "head_dim_96": _odd(hidden=384, head_dim=96),
    "gqa_3_hidden_960": _odd(hidden=960, intermediate=2560, heads=15, kv_heads=5, tied=True),
    "k_outliers": _odd(_k_outliers),
    "k_outliers_balanced": _odd(_k_outliers_balanced),
    "base": _odd(),
}


def write_odd_checkpoint(name: str, directory: Path) -> Path:
    """Write the checkpoint called `name` into `directory`."""
    odd = ODD_CHECKPOINTS[name]
    return write_checkpoint(directory, odd.shape, odd.change)


def odd_input_ids() -> Tensor:
    """The tokens to compare logits on: int64 [1, TOKENS], none of them special."""
    ids = np.random.default_rng(SEED).integers(len(SPECIAL_TOKENS), VOCAB_SIZE, size=(1, TOKENS))
    return torch.from_numpy(ids)


def reference_logits(directory: Path, input_ids: Tensor) -> Tensor:
    """Logits that transformers computes from a checkpoint directory: float32 [1, tokens, vocab_size].

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids).logits
    return logits
