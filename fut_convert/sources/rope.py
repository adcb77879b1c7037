"""Rotary embedding parameters of a config.json, in the style of transformers 4 or of transformers 5.

Both spell the same values: `rope_theta` beside `rope_scaling` in the old style, all in `rope_parameters` in the new.
Precedence and defaults are those of transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

from fut_convert.errors import CheckpointError, UnsupportedModelError
from fut_convert.sources.fields import Fields
from fut_runtime.artifact.spec import ROPE_TYPES, RopeSpec

#: What transformers takes where neither style gives a base.
DEFAULT_THETA = 10000.0

#: Scalings known by name that cannot be computed, and why.
_UNSUPPORTED_TYPES: dict[str, str] = {
    "longrope": "its two sets of factors depend on the length of the text",
    "su": "an old name of longrope, whose two sets of factors depend on the length of the text",
    "mrope": "multimodal positions have three coordinates",
    "proportional": "only part of the head is rotated",
    "axial": "positions have two coordinates",
}


def rope_spec(config: Fields, max_position_embeddings: int) -> RopeSpec:
    """Rotary embedding of a model.

    Raises:
        UnsupportedModelError: a scaling this version does not compute, or a head that is rotated only in part.
        CheckpointError: a parameter is missing, of the wrong type, or contradicts another.
    """
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    section = old or new or Fields({}, f"{config.where}: rope_parameters")
    _refuse_partial(config)
    _refuse_partial(section)
    if any(isinstance(value, dict) for value in section.data.values()):
        raise UnsupportedModelError(
            f"{section.where} differs by kind of layer ({sorted(section.data)}); only one for all layers is supported"
        )
    kind = _rope_type(section)
    theta = section.optional_float("rope_theta") or config.optional_float("rope_theta") or DEFAULT_THETA
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeSpec(type=kind, theta=theta, factor=_required(section, kind, "factor"))
    original = _original_length(config, section) or max_position_embeddings
    if kind == "llama3":
        low, high = _required(section, kind, "low_freq_factor"), _required(section, kind, "high_freq_factor")
        if low >= high:
            raise CheckpointError(
                f"{section.where}: low_freq_factor {low} must be smaller than high_freq_factor {high}"
            )
        return RopeSpec(
            type=kind,
            theta=theta,
            factor=_required(section, kind, "factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeSpec(
        type=kind,
        theta=theta,
        factor=section.optional_float("factor") or max_position_embeddings / original,
        original_max_position_embeddings=original,
        attention_factor=section.optional_float("attention_factor"),
        beta_fast=section.optional_float("beta_fast"),
        beta_slow=section.optional_float("beta_slow"),
        mscale=_zero_as_absent(section, "mscale"),
        mscale_all_dim=_zero_as_absent(section, "mscale_all_dim"),
        truncate=section.boolean("truncate", True),
    )


def _rope_type(section: Fields) -> str:
    new, old = section.data.get("rope_type"), section.data.get("type")
    if new is not None and old is not None and new != old:
        raise CheckpointError(f"{section.where}: rope_type is {new!r} but type is {old!r}; remove one of them")
    kind = str(new if new is not None else old if old is not None else "default")
    if "mrope_section" in section:
        kind = "mrope"
    if kind not in ROPE_TYPES:
        reason = _UNSUPPORTED_TYPES.get(kind, "it is not known here")
        raise UnsupportedModelError(
            f"{section.where}: RoPE scaling {kind!r} is not supported ({reason}); supported are {', '.join(ROPE_TYPES)}"
        )
    return kind


def _required(section: Fields, kind: str, key: str) -> float:
    value = section.optional_float(key)
    if value is None:
        raise CheckpointError(f"{section.where}: {key} is missing, which RoPE scaling {kind!r} needs")
    return value


def _original_length(config: Fields, section: Fields) -> int | None:
    """Length before scaling, which some configs keep beside the section; which one wins varies between versions."""
    key = "original_max_position_embeddings"
    outer, inner = config.optional_int(key), section.optional_int(key)
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"{config.where}: {key} is {outer}, but {inner} in {section.where}; remove the wrong one")
    return inner or outer


def _zero_as_absent(section: Fields, key: str) -> float | None:
    """`mscale` of 0 means that it is not used, as in transformers."""
    return None if section.data.get(key) == 0 else section.optional_float(key)


def _refuse_partial(section: Fields) -> None:
    factor = section.optional_float("partial_rotary_factor")
    if factor is not None and factor != 1:
        raise UnsupportedModelError(
            f"{section.where}: partial_rotary_factor is {factor}; heads that are rotated only in part are not supported"
        )
