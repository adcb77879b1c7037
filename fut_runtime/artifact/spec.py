"""What an artifact says about the model's architecture: sizes, norms, rotary embedding, special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fut_runtime.artifact.fields import check_positive, read_fields
from fut_runtime.errors import ArtifactError

#: The four projections of a layer, in the order they run. `qkv` stacks q, k and v; `gate_up` stacks gate and up.
MODULES: tuple[str, ...] = ("qkv", "o", "gate_up", "down")

#: The RoPE scalings this version computes, named as in transformers.
ROPE_TYPES: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")

#: Limits that only a damaged or hostile manifest passes.
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 4096


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding parameters, named as in transformers' `rope_parameters`.

    `None` stands for a parameter that the checkpoint's config leaves out and the scaling then defaults or ignores.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A Llama-family decoder: sizes in elements, positions in tokens.

    `o_bias` and `qkv_bias` say whether those projections have a bias; `qk_norm` whether q and k pass through
    a per-head RMSNorm before RoPE (Qwen3).
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def q_size(self) -> int:
        """Rows of q_proj: heads times head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj: KV heads times head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def rotation_block(self) -> int:
        """Largest power of two that divides head_dim: the size of one Hadamard block of the KV rotation."""
        return self.head_dim & -self.head_dim

    def module_shape(self, module: str) -> tuple[int, int]:
        """True (out, in) shape of a projection: one of MODULES, or `head`."""
        shapes = {
            "qkv": (self.q_size + 2 * self.kv_size, self.hidden_size),
            "o": (self.hidden_size, self.q_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "head": (self.vocab_size, self.hidden_size),
        }
        return shapes[module]

    def module_bias(self, module: str) -> bool:
        """Whether a projection has a bias."""
        return {"qkv": self.qkv_bias, "o": self.o_bias}.get(module, False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, as it stands under `model` in the manifest."""
        data = asdict(self)
        data["eos_token_ids"] = list(self.eos_token_ids)
        data["rope"] = {k: v for k, v in data["rope"].items() if v is not None}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "fut_config.json") -> ModelSpec:
        """Read the `model` object of a manifest.

        Raises:
            ArtifactError: a key is missing or unknown, or a value is of the wrong type or makes no sense.
        """
        values = read_fields(cls, data, f"{where}: model")
        rope = RopeSpec(**read_fields(RopeSpec, values.pop("rope"), f"{where}: model.rope"))
        model = cls(rope=rope, **values)
        _check_model(model, f"{where}: model")
        return model


def _check_model(model: ModelSpec, where: str) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    check_positive({key: getattr(model, key) for key in (*sizes, "max_position_embeddings")}, where, _MAX_SIZE)
    check_positive({"num_layers": model.num_layers}, where, _MAX_LAYERS)
    check_positive({"rms_norm_eps": model.rms_norm_eps}, where, 1.0)
    if model.num_heads % model.num_kv_heads:
        raise ArtifactError(f"{where}: num_heads {model.num_heads} is no multiple of num_kv_heads {model.num_kv_heads}")
    if model.head_dim % 2 or model.hidden_size % 2:
        raise ArtifactError(
            f"{where}: head_dim {model.head_dim} and hidden_size {model.hidden_size}, expected even sizes"
        )
    rope = model.rope
    if rope.type not in ROPE_TYPES:
        raise ArtifactError(f"{where}.rope: type {rope.type!r}, expected one of {ROPE_TYPES}")
    check_positive({"theta": rope.theta, "factor": rope.factor}, f"{where}.rope")
    check_positive(
        {"original_max_position_embeddings": rope.original_max_position_embeddings}, f"{where}.rope", _MAX_SIZE
    )
    tokens = {"bos_token_id": (model.bos_token_id,), "pad_token_id": (model.pad_token_id,)}
    for key, ids in {**tokens, "eos_token_ids": model.eos_token_ids}.items():
        for token in ids:
            if token is not None and not 0 <= token < _MAX_SIZE:
                raise ArtifactError(f"{where}.{key}: found {token}, expected a token id")
