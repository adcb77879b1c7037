"""config.json in every style -> ModelSpec, with transformers' own config classes as the independent opinion."""

from __future__ import annotations

from typing import Any

import pytest

from fut_convert.errors import CheckpointError, ConvertError, UnsupportedModelError
from fut_convert.sources.config import ARCHITECTURES, model_spec
from fut_runtime.artifact.spec import ModelSpec, RopeSpec

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    return model_spec(config, generation, "some-model")


def llama(**changes: Any) -> dict[str, Any]:
    """LLAMA with keys changed; a key given as `...` is left out."""
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    return llama(architectures=[architecture], model_type=ARCHITECTURES[architecture].model_type, **changes)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """A config of nothing but sizes gives what transformers' config class fills in."""
    transformers = pytest.importorskip("transformers")
    known = ARCHITECTURES[architecture]
    theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))()
    assert theirs.model_type == known.model_type
    assert theirs.max_position_embeddings == known.max_position_embeddings
    assert theirs.rms_norm_eps == known.rms_norm_eps
    assert theirs.tie_word_embeddings == known.tie_word_embeddings
    assert theirs.num_key_value_heads == (known.num_kv_heads or theirs.num_attention_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert head_dim == (known.head_dim or theirs.hidden_size // theirs.num_attention_heads)
    assert theirs.bos_token_id == known.bos_token_id
    assert theirs.eos_token_id == known.eos_token_id
    assert theirs.pad_token_id is None
    assert theirs.hidden_act == "silu"
    assert not getattr(theirs, "attention_bias", False)
    assert not getattr(theirs, "mlp_bias", False)
    assert not getattr(theirs, "use_sliding_window", False)
    window = theirs.sliding_window if hasattr(theirs, "sliding_window") else None
    # Qwen's window needs the flag, without which its config class drops it.
    assert window == (None if known.sliding_by_flag else known.sliding_window)
    rope = getattr(theirs, "rope_parameters", None) or {"rope_theta": theirs.rope_theta}
    assert rope["rope_theta"] == RopeSpec().theta


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"num_key_value_heads": ..., "head_dim": ...}),
        ("LlamaForCausalLM", {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
        ("MistralForCausalLM", {"sliding_window": None, "num_key_value_heads": ...}),
        ("MistralForCausalLM", {"sliding_window": 4096, "max_position_embeddings": 4096, "head_dim": None}),
        ("Qwen2ForCausalLM", {"head_dim": ...}),
        ("Qwen3ForCausalLM", {"head_dim": ..., "tie_word_embeddings": True}),
    ],
)
def test_sizes_agree_with_transformers(architecture: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = of(architecture, **changes)
    theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**config)
    ours = spec_of(config)
    assert ours.architecture == architecture
    for mine, their in (
        (ours.num_layers, theirs.num_hidden_layers),
        (ours.num_heads, theirs.num_attention_heads),
        (ours.num_kv_heads, theirs.num_key_value_heads),
        (ours.head_dim, getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads),
        (ours.rms_norm_eps, theirs.rms_norm_eps),
        (ours.max_position_embeddings, theirs.max_position_embeddings),
        (ours.tie_word_embeddings, theirs.tie_word_embeddings),
        (ours.bos_token_id, theirs.bos_token_id),
    ):
        assert mine == their


def test_biases_and_norms_of_each_architecture() -> None:
    assert not spec_of(LLAMA).qkv_bias and not spec_of(LLAMA).o_bias and not spec_of(LLAMA).qk_norm
    biased = spec_of(llama(attention_bias=True))
    assert biased.qkv_bias and biased.o_bias
    qwen2 = spec_of(of("Qwen2ForCausalLM"))
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    qwen3 = spec_of(of("Qwen3ForCausalLM", attention_bias=True))
    assert qwen3.qk_norm and qwen3.qkv_bias and qwen3.o_bias


def test_model_type_stands_in_for_architectures() -> None:
    assert spec_of(llama(architectures=...)).architecture == "LlamaForCausalLM"


def test_token_ids_of_both_files_are_kept() -> None:
    spec = spec_of(
        llama(bos_token_id=1, eos_token_id=[9, 8], pad_token_id=-1), {"eos_token_id": [7, 8, 7], "bos_token_id": 3}
    )
    assert spec.eos_token_ids == (7, 8, 9)
    assert spec.bos_token_id == 3
    assert spec.pad_token_id is None


def test_token_ids_default_as_in_transformers_unless_null() -> None:
    assert spec_of(LLAMA).eos_token_ids == (2,)
    assert spec_of(llama(eos_token_id=None, bos_token_id=None)).eos_token_ids == ()
    assert spec_of(llama(bos_token_id=None)).bos_token_id is None
    assert spec_of(of("Qwen2ForCausalLM")).eos_token_ids == ()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"rope_type": "default"}, RopeSpec(theta=5e5)),
        ({"rope_type": "linear", "factor": 2}, RopeSpec("linear", 5e5, factor=2.0)),
        ({"rope_type": "dynamic", "factor": 4.0}, RopeSpec("dynamic", 5e5, factor=4.0)),
        (
            LLAMA3,
            RopeSpec(
                "llama3",
                5e5,
                factor=8.0,
                original_max_position_embeddings=8192,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "mscale": 0},
            RopeSpec("yarn", 5e5, factor=4.0, original_max_position_embeddings=512, beta_fast=32.0),
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 512, "attention_factor": 1.2, "truncate": False},
            RopeSpec(
                "yarn", 5e5, factor=4.0, original_max_position_embeddings=512, attention_factor=1.2, truncate=False
            ),
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.8},
            RopeSpec("yarn", 5e5, factor=2.0, original_max_position_embeddings=2048, mscale=1.0, mscale_all_dim=0.8),
        ),
    ],
)
def test_rope_in_both_styles(section: dict[str, Any], expected: RopeSpec) -> None:
    new = llama(rope_parameters={**section, "rope_theta": 5e5})
    old = llama(rope_theta=500000, rope_scaling=section)
    oldest = llama(rope_theta=500000, rope_scaling={"type" if k == "rope_type" else k: v for k, v in section.items()})
    assert spec_of(new).rope == spec_of(old).rope == spec_of(oldest).rope == expected


def test_rope_without_any_section() -> None:
    assert spec_of(llama(rope_scaling=None)).rope == RopeSpec()
    assert spec_of(llama(rope_theta=1e6)).rope == RopeSpec(theta=1e6)


def test_original_length_beside_the_section() -> None:
    section = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    spec = spec_of(llama(rope_scaling=section, original_max_position_embeddings=1024))
    assert spec.rope.original_max_position_embeddings == 1024


REFUSED: list[tuple[str, dict[str, Any], type[ConvertError], str]] = [
    ("another architecture", llama(architectures=["GPT2LMHeadModel"]), UnsupportedModelError, "GPT2LMHeadModel"),
    (
        "a mixture of experts",
        llama(architectures=["MixtralForCausalLM"], num_local_experts=8),
        UnsupportedModelError,
        "mixture of experts",
    ),
    ("experts in a Llama", llama(num_local_experts=8), UnsupportedModelError, "num_local_experts"),
    (
        "a multimodal model",
        llama(architectures=["LlavaForConditionalGeneration"], vision_config={}, text_config={"hidden_size": 1}),
        UnsupportedModelError,
        "multimodal",
    ),
    ("a text config", llama(text_config={"hidden_size": 1}), UnsupportedModelError, "text_config"),
    (
        "code in the checkpoint",
        llama(architectures=["InternLM2ForCausalLM"], auto_map={"AutoModelForCausalLM": "m.InternLM2"}),
        UnsupportedModelError,
        "never executed",
    ),
    ("no architecture at all", llama(architectures=..., model_type=...), UnsupportedModelError, "model_type"),
    ("two opinions", llama(model_type="mistral"), UnsupportedModelError, "cannot be told"),
    ("biases in the MLP", llama(mlp_bias=True), UnsupportedModelError, "mlp_bias"),
    ("another activation", llama(hidden_act="gelu"), UnsupportedModelError, "hidden_act"),
    (
        "attention biases in Mistral",
        of("MistralForCausalLM", sliding_window=None, attention_bias=True),
        CheckpointError,
        "attention_bias",
    ),
    (
        "a sliding window",
        of("MistralForCausalLM", sliding_window=1024),
        UnsupportedModelError,
        "sliding_window is 1024",
    ),
    (
        "Mistral's default window",
        of("MistralForCausalLM", max_position_embeddings=32768),
        UnsupportedModelError,
        "sliding_window is absent",
    ),
    (
        "Qwen's window turned on",
        of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=128, max_window_layers=1),
        UnsupportedModelError,
        "sliding_window",
    ),
    (
        "sliding layers",
        of("Qwen3ForCausalLM", layer_types=["full_attention", "sliding_attention"]),
        UnsupportedModelError,
        "layer_types",
    ),
    ("partial rotation", llama(partial_rotary_factor=0.5), UnsupportedModelError, "partial_rotary_factor"),
    (
        "partial rotation in the section",
        llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        UnsupportedModelError,
        "partial_rotary_factor",
    ),
    (
        "longrope",
        llama(rope_scaling={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
        UnsupportedModelError,
        "longrope",
    ),
    ("an unknown scaling", llama(rope_scaling={"type": "magic", "factor": 2.0}), UnsupportedModelError, "magic"),
    (
        "multimodal positions",
        llama(rope_scaling={"type": "default", "mrope_section": [16, 24, 24]}),
        UnsupportedModelError,
        "mrope",
    ),
    (
        "scaling by kind of layer",
        llama(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        UnsupportedModelError,
        "kind of layer",
    ),
    (
        "two names for the scaling",
        llama(rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0}),
        CheckpointError,
        "remove one",
    ),
    ("a factor that is missing", llama(rope_scaling={"type": "linear"}), CheckpointError, "factor is missing"),
    (
        "Llama 3 without its fields",
        llama(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        CheckpointError,
        "low_freq_factor",
    ),
    (
        "Llama 3 with its ramp upside down",
        llama(rope_scaling={**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        CheckpointError,
        "smaller than",
    ),
    (
        "two lengths before scaling",
        llama(rope_scaling=LLAMA3, original_max_position_embeddings=1024),
        CheckpointError,
        "remove the wrong one",
    ),
    ("heads of 48", llama(head_dim=48), UnsupportedModelError, "64, 80, 96, 128"),
    ("heads of 256", llama(head_dim=256), UnsupportedModelError, "256"),
    ("heads that do not divide", llama(hidden_size=500, head_dim=...), CheckpointError, "hidden_size 500"),
    ("KV heads that do not divide", llama(num_key_value_heads=3), CheckpointError, "num_key_value_heads 3"),
    (
        "too many heads to a KV head",
        llama(num_attention_heads=32, num_key_value_heads=1),
        UnsupportedModelError,
        "32 to one",
    ),
    ("a size that is missing", llama(intermediate_size=...), CheckpointError, "intermediate_size is missing"),
    ("a size that is none", llama(hidden_size=-4), CheckpointError, "positive integer"),
    ("a size beyond all memory", llama(hidden_size=1e308), CheckpointError, "at most 1099511627776"),
    ("layers beyond all counting", llama(num_hidden_layers=10**9), CheckpointError, "at most 10000"),
    ("kinds of layers that are no list", llama(layer_types=1.5), CheckpointError, "expected a list with"),
    ("a size that is infinite", llama(hidden_size=float("inf")), CheckpointError, "positive integer"),
    ("a flag that is none", llama(tie_word_embeddings="yes"), CheckpointError, "true or false"),
    ("an epsilon that is none", llama(rms_norm_eps=0), CheckpointError, "rms_norm_eps"),
    ("token ids that are none", llama(eos_token_id="</s>"), CheckpointError, "eos_token_id"),
    ("a section that is none", llama(rope_scaling=2.0), CheckpointError, "rope_scaling"),
]


@pytest.mark.parametrize(("config", "error", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_the_reason(config: dict[str, Any], error: type[ConvertError], reason: str) -> None:
    with pytest.raises(error, match=r"some-model: config\.json") as caught:
        spec_of(config)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"bits": 4, "group_size": 128}, "GPTQ"),
        ({"quant_method": "awq"}, "AWQ"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "fp8"}, "FP8"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "brand_new"}, "brand_new"),
    ],
)
def test_quantized_checkpoint_is_named(section: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"quantized already \({name}\)"):
        spec_of(llama(quantization_config=section))


def test_settings_that_change_nothing_are_accepted() -> None:
    expected = spec_of(of("Qwen2ForCausalLM"))
    assert spec_of(of("Qwen2ForCausalLM", use_sliding_window=False, sliding_window=128)) == expected
    assert spec_of(of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=128, max_window_layers=2)) == expected
    assert spec_of(of("Qwen2ForCausalLM", layer_types=["full_attention"] * 2)) == expected
    assert spec_of(llama(sliding_window=4096, hidden_act="swish", partial_rotary_factor=1.0)) == spec_of(LLAMA)
    assert spec_of(llama(auto_map={"AutoModelForCausalLM": "m.M"}, quantization_config={})) == spec_of(LLAMA)
