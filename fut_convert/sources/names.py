"""The Hugging Face tensor names of a Llama-family decoder, and the shape each must have."""

from __future__ import annotations

from fut_runtime.artifact.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

#: The projections that each module of the artifact stacks along its output rows, in that order.
MODULE_PROJECTIONS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of one decoder layer."""
    rows = {
        "self_attn.q_proj": spec.q_size,
        "self_attn.k_proj": spec.kv_size,
        "self_attn.v_proj": spec.kv_size,
        "self_attn.o_proj": spec.hidden_size,
        "mlp.gate_proj": spec.intermediate_size,
        "mlp.up_proj": spec.intermediate_size,
        "mlp.down_proj": spec.hidden_size,
    }
    prefix = f"model.layers.{layer}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (spec.hidden_size,),
        f"{prefix}.post_attention_layernorm.weight": (spec.hidden_size,),
    }
    if spec.qk_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (spec.head_dim,)
    for module, projections in MODULE_PROJECTIONS.items():
        for projection in projections:
            shapes[f"{prefix}.{projection}.weight"] = (rows[projection], spec.module_shape(module)[1])
            if spec.module_bias(module):
                shapes[f"{prefix}.{projection}.bias"] = (rows[projection],)
    return shapes


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the checkpoint; a tied head has no tensor of its own."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        shapes.update(layer_tensors(spec, layer))
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes
