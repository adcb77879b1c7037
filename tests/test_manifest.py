"""Manifests: round trip, refusals that name the key, and nothing but ArtifactError whatever the JSON."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fut_runtime.artifact.manifest import FORMAT_VERSION, Manifest
from fut_runtime.errors import ArtifactError
from tiny_artifact import MODEL, make_manifest

TEXT = make_manifest(formats=("e4m3", "int4", "bf16"), side_files=("tokenizer.json",)).to_json()

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_round_trip() -> None:
    manifest = Manifest.from_json(TEXT)
    assert manifest.to_json() == TEXT
    assert manifest == make_manifest(formats=("e4m3", "int4", "bf16"), side_files=("tokenizer.json",))


def test_same_manifest_same_bytes() -> None:
    manifest = Manifest.from_json(TEXT)
    reordered = replace(manifest, weights=dict(reversed(manifest.weights.items())))
    assert reordered.to_json() == TEXT


def changed(path: str, value: Any) -> str:
    """The manifest's text with one value replaced; `path` like `weights/layers.0.qkv/int4/group_size`."""
    data = json.loads(TEXT)
    *parents, last = path.split("/")
    node = data
    for key in parents:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("format", "other", "FuTransformer"),
        ("format_version", FORMAT_VERSION + 1, "newer"),
        ("format_version", True, "positive integer"),
        ("format_version", 0, "positive integer"),
        ("model", None, "missing keys"),
        ("surprise", 1, "unknown keys"),
        ("model/hidden_size", -8, "hidden_size"),
        ("model/hidden_size", 1 << 40, "at most"),
        ("model/hidden_size", 73, "even"),
        ("model/hidden_size", 72.0, "expected an integer"),
        ("model/hidden_size", True, "expected an integer"),
        ("model/num_layers", 10**9, "num_layers"),
        ("model/num_kv_heads", 4, "no multiple"),
        ("model/eos_token_ids", [-1], "token id"),
        ("model/eos_token_ids", 2, "expected a list"),
        ("model/rope/type", "spiral", "expected one of"),
        ("model/rope/theta", "big", "finite number"),
        ("model/rope/theta", 10**400, "finite number"),
        ("model/rms_norm_eps", 0, "positive"),
        ("weights/layers.1.down", None, "lacks layers.1.down"),
        ("weights/layers.2.down", {}, "unexpected"),
        ("weights/layers.1.down", {}, "empty"),
        ("weights/layers.1.down/int3", {}, "missing keys"),
        ("weights/layers.0.qkv/int4/format", "e4m3", "format"),
        ("weights/layers.0.qkv/int4/shape", [120, 73], "expected"),
        ("weights/layers.0.qkv/int4/shape", [120], "list of 2"),
        ("weights/layers.0.qkv/int4/padded_shape", [112, 128], "padded_shape"),
        ("weights/layers.0.qkv/int4/padded_shape", [128, 96], "padded_shape"),
        ("weights/layers.0.qkv/int4/padded_shape", [128, 1 << 45], "padded_shape"),
        ("weights/layers.0.qkv/int4/group_size", 48, "power of two"),
        ("weights/layers.0.qkv/int4/group_size", None, "power of two"),
        ("weights/layers.0.qkv/int4/nibble_order", "mma/7", "expected one of"),
        ("weights/layers.0.qkv/int4/scale_order", "x", "expected one of"),
        ("weights/layers.0.qkv/int4/scale_dtype", "float32", "expected one of"),
        ("weights/layers.0.qkv/int4/gain", "none", "expected one of"),
        ("weights/layers.0.o/int4/gain", "folded", "expected one of"),
        ("weights/layers.0.qkv/int4/row_order", "interleave8", "expected one of"),
        ("weights/layers.0.gate_up/int4/row_order", "zigzag", "expected one of"),
        ("weights/layers.0.qkv/e4m3/group_size", 64, "expected one of"),
        ("head", "fp3", "head"),
        ("head", "int4", "lacks head"),
        ("kv_cache/bits", 3, "expected one of"),
        ("activation/margin", 0, "positive"),
        ("activation/calibrated", 1, "true or false"),
        ("tools", {"torch": 2}, "expected a string"),
        ("side_files", ["../../etc/passwd"], "unsafe"),
        ("side_files", ["model.safetensors"], "uses itself"),
        ("side_files", ["a", "a"], "twice"),
    ],
)
def test_refusals_name_what_is_wrong(path: str, value: Any, expected: str) -> None:
    with pytest.raises(ArtifactError, match=expected) as caught:
        Manifest.from_json(changed(path, value), "here/fut_config.json")
    assert "here/fut_config.json" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100_000, '{"format": NaN}', '{"a": 1, "a": 2}', b"\xff\xfe", '{"format": "\\ud800"}'],
)
def test_other_text_is_refused(text: str | bytes) -> None:
    with pytest.raises(ArtifactError):
        Manifest.from_json(text)


@given(json_values)
def test_arbitrary_json_raises_only_artifact_error(value: Any) -> None:
    with pytest.raises(ArtifactError):
        Manifest.from_json(json.dumps(value))


@given(st.data())
def test_any_value_replaced_by_any_other(data: st.DataObject) -> None:
    """Random JSON at a random place of a valid manifest: read or refused, never another exception."""
    document = json.loads(TEXT)
    node: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
        if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        node[key] = data.draw(json_values)
        break
    try:
        Manifest.from_json(json.dumps(document))
    except ArtifactError:
        return


def test_head_must_be_stored_when_untied() -> None:
    manifest = make_manifest(replace(MODEL, tie_word_embeddings=False))
    assert "head" in Manifest.from_json(manifest.to_json()).weights
    without = copy.deepcopy(manifest.weights)
    del without["head"]
    with pytest.raises(ArtifactError, match="lacks head"):
        Manifest.from_json(replace(manifest, weights=without).to_json())


def test_what_json_cannot_hold_is_refused_on_writing() -> None:
    with pytest.raises(ArtifactError, match="JSON"):
        replace(make_manifest(), recipe={"x": float("nan")}).to_json()
    with pytest.raises(ArtifactError, match="JSON"):
        replace(make_manifest(), recipe={"x": object()}).to_json()
    with pytest.raises(ArtifactError, match="JSON"):
        replace(make_manifest(), recipe={"x": "\ud800"}).to_json()


def test_halves_of_surrogate_pairs_and_terminal_codes() -> None:
    with pytest.raises(ArtifactError, match="not valid JSON"):
        Manifest.from_json(TEXT.replace('"tiny"', '"\\ud83d"'))
    whole = Manifest.from_json(TEXT.replace('"tiny"', '"\\ud83d\\ude00"'))
    assert whole.source["id"] == "\U0001f600"
    with pytest.raises(ArtifactError) as caught:
        Manifest.from_json(TEXT.replace('"layers.1.qkv"', '"\\u001b[31m"'))
    assert "\x1b" not in str(caught.value)
