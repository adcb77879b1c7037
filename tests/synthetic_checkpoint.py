"""Small Llama-family checkpoints made of random numbers, in the layouts that people publish theirs in.

Weights depend on nothing but the tensor's name and the seed, so that a checkpoint is the same on every machine and
whatever its files look like.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS, EOS = 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class CheckpointShape:
    """Sizes and file layout of a synthetic checkpoint.

    Attributes:
        family: key of ARCHITECTURES; `qwen2` has biases on q, k and v, `qwen3` an RMSNorm on every q and k head.
        rope: `rope_parameters` as transformers 5 writes them.
        config_style: 5 writes `rope_parameters` and `dtype`, 4 writes `rope_theta`, `rope_scaling` and `torch_dtype`.
        shards: safetensors files; more than one come with an index.
        pickled: write `pytorch_model.bin` in place of safetensors.
        seed: chooses other weights for the same shape.
    """

    family: str = "llama"
    hidden: int = 128
    intermediate: int = 192
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    vocab_size: int = 384
    tied: bool = False
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048
    rope: Mapping[str, Any] | None = None
    config_style: int = 5
    shards: int = 1
    pickled: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name to shape of every tensor, in file order."""
        q, kv, h, f = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for i in range(self.layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (h,),
                "self_attn.q_proj.weight": (q, h),
                "self_attn.k_proj.weight": (kv, h),
                "self_attn.v_proj.weight": (kv, h),
                "self_attn.o_proj.weight": (h, q),
                "post_attention_layernorm.weight": (h,),
                "mlp.gate_proj.weight": (f, h),
                "mlp.up_proj.weight": (f, h),
                "mlp.down_proj.weight": (h, f),
            }
            if self.family == "qwen2":
                layer |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
            if self.family == "qwen3":
                layer |= {f"self_attn.{p}_norm.weight": (self.head_dim,) for p in ("q", "k")}
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (h,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        return shapes

    def config(self) -> dict[str, Any]:
        """Contents of `config.json`."""
        rope = dict(self.rope or {"rope_type": "default", "rope_theta": 10000.0})
        dtype = str(self.dtype).removeprefix("torch.")
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
        }
        # transformers' Qwen2 knows no head_dim of its own.
        if self.family != "qwen2":
            config["head_dim"] = self.head_dim
        if self.family in ("llama", "qwen3"):
            config["attention_bias"] = False
        if self.family == "mistral":
            config["sliding_window"] = None
        if self.config_style == 5:
            config |= {"rope_parameters": rope, "dtype": dtype, "transformers_version": "5.24.0"}
        else:
            theta = rope.pop("rope_theta")
            scaling = None if rope == {"rope_type": "default"} else rope
            config |= {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": dtype}
            config["transformers_version"] = "4.44.2"
        return config


def random_tensor(name: str, shape: tuple[int, ...], spec: CheckpointShape) -> Tensor:
    """Values of one tensor, FP32, at scales that keep activations and logits near those of a trained model.

    Projections N(0, 1/fan_in); embedding N(0, 1), tied N(0, 4/hidden); head N(0, 4/hidden); norm gains 1 + N(0, 0.04);
    biases N(0, 0.25).
    """
    x = np.random.default_rng([spec.seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if "norm" in name:
        x = 1 + 0.2 * x
    elif name.endswith("bias"):
        x = 0.5 * x
    elif "embed_tokens" in name:
        x = x * 2 / np.sqrt(shape[1]) if spec.tied else x
    elif "lm_head" in name:
        x = x * 2 / np.sqrt(shape[1])
    else:
        x = x / np.sqrt(shape[1])
    return torch.from_numpy(x.astype(np.float32))


def make_tensors(spec: CheckpointShape) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, in its storage type."""
    return {name: random_tensor(name, shape, spec).to(spec.dtype) for name, shape in spec.tensor_shapes().items()}


def write_checkpoint(
    directory: Path, spec: CheckpointShape, change: Callable[[dict[str, Tensor]], None] | None = None
) -> Path:
    """Write weights, config, generation config and tokenizer into `directory`; `change` may edit the tensors first."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors(spec)
    if change is not None:
        change(tensors)
    _write_weights(directory, tensors, spec)
    _write_json(directory / "config.json", spec.config())
    _write_json(
        directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS, 0], "pad_token_id": EOS}
    )
    (directory / "tokenizer.json").write_text(tokenizer_json(spec.vocab_size), encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[EOS],
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": spec.max_positions,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return directory


def _write_weights(directory: Path, tensors: dict[str, Tensor], spec: CheckpointShape) -> None:
    if spec.pickled:
        torch.save(tensors, directory / "pytorch_model.bin")
        return
    if spec.shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    per_shard = -(-len(names) // spec.shards)
    weight_map: dict[str, str] = {}
    for i in range(spec.shards):
        file = f"model-{i + 1:05d}-of-{spec.shards:05d}.safetensors"
        part = names[i * per_shard : (i + 1) * per_shard]
        save_file({n: tensors[n] for n in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@cache
def tokenizer_json(vocab_size: int) -> str:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries: three special tokens, 256 bytes, and merges.

    Raises:
        ValueError: the text below is too short to learn that many merges from.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).parent.parent / "fut_convert" / "data" / "heldout.txt"
    tokenizer.train_from_iterator(text.read_text(encoding="utf-8").split("\n\n"), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"learnt {tokenizer.get_vocab_size()} entries, expected {vocab_size}")
    return str(tokenizer.to_str(pretty=True))
