"""docs/artifact.md against the package: an independent reader decodes artifacts to the same numbers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.orders import NIBBLE_ORDERS
from fut_runtime.artifact.reader import Artifact
from fut_runtime.reference.rotation import sylvester_hadamard
from second_reader import ORDERS, SecondReader, e4m3, element, hadamard
from tiny_artifact import MODEL, make_manifest, random_tensors, weight_spec, write_artifact

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "artifact.md").read_text()


def manifest_of(nibble_order: str, scale_dtype: str) -> Manifest:
    model = replace(MODEL, qkv_bias=True, qk_norm=True, tie_word_embeddings=False)
    manifest = make_manifest(model, formats=("int4", "e4m3", "bf16"), head="int4")
    for name, formats in manifest.weights.items():
        group_size = {"qkv": 32, "down": 128}.get(name.rpartition(".")[2])
        spec = weight_spec(model, name.rpartition(".")[2], "int4", group_size=group_size, nibble_order=nibble_order)
        formats["int4"] = replace(spec, scale_dtype=scale_dtype)
    return manifest


@pytest.mark.parametrize("nibble_order", sorted(NIBBLE_ORDERS))
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_both_readers_decode_the_same_numbers(tmp_path: Path, nibble_order: str, scale_dtype: str) -> None:
    manifest = manifest_of(nibble_order, scale_dtype)
    out = write_artifact(tmp_path / "a", manifest, side_files={"t/x.json": b"{}"}, max_shard_bytes=90_000)
    ours, second = Artifact.open(out), SecondReader(out)
    assert set(second.tensors) == {spec.name for spec in all_tensors(manifest)}
    for name, formats in manifest.weights.items():
        for weight_format in formats:
            expected = ours.dequantized(name, weight_format).numpy()
            np.testing.assert_array_equal(second.matrix(name, weight_format), expected, err_msg=name)
    for name in ("embed", "final_norm", "layers.1.q_norm", "layers.0.qkv.bias", "layers.1.activation_scale"):
        np.testing.assert_array_equal(second.tensors[name], ours.tensor(name).float().numpy())


def test_file_order_is_that_of_the_page(tmp_path: Path) -> None:
    manifest = manifest_of("linear/1", "bfloat16")
    second = SecondReader(write_artifact(tmp_path / "a", manifest))
    names = list(second.tensors)
    assert names[:3] == ["embed", "hadamard", "final_norm"] and names[-2:] == ["head.int4", "head.int4_scale"]
    assert names[3:12] == [
        *(f"layers.0.{n}" for n in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "activation_scale", "qkv.bias")),
        *(f"layers.0.qkv.{n}" for n in ("bf16", "e4m3", "e4m3_scale")),
    ]


def test_every_tensor_and_manifest_key_is_on_the_page() -> None:
    manifest = manifest_of("linear/1", "bfloat16")
    for spec in all_tensors(manifest):
        kind = re.sub(r"^layers\.\d+\.(qkv|o|gate_up|down)\.|^head\.|^layers\.\d+\.", "", spec.name)
        assert re.search(rf"[`.}}]{kind}`", DOCUMENT), kind
    data = json.loads(manifest.to_json())
    keys = {*data, *data["model"], *data["weights"]["head"]["int4"], *data["kv_cache"], *data["activation"]}
    assert {key for key in keys if f"`{key}`" not in DOCUMENT} == set()


def test_tables_on_the_page() -> None:
    for name, (lane, word, nibble) in ORDERS.items():
        assert re.search(rf"\| `{re.escape(name)}`[^|]*\| {lane} \| {word} \| {nibble} \|", DOCUMENT)
        for index in np.ndindex(32, 4, 8):
            assert NIBBLE_ORDERS[name].element(*index) == element(name, *index)


def test_worked_example_on_the_page() -> None:
    example = DOCUMENT.split("#### Worked example")[1].split("####")[0]
    rows = re.findall(r"^\| ([0-3]) \| (.*) \|$", example, re.MULTILINE)
    assert [int(word) for word, _ in rows] == [0, 1, 2, 3]
    for word, cells in rows:
        found = [tuple(map(int, re.findall(r"\d+", cell))) for cell in cells.split("|")]
        assert found == [element("mma_m16n8k16_a_pair/1", 5, int(word), nibble) for nibble in range(8)]
    value = sum((sum(element("mma_m16n8k16_a_pair/1", 5, 1, i)) % 16) << 4 * i for i in range(8))
    assert f"{value:#010x}" in example and f"{value & 0x000F000F:#010x}" in example
    assert value.to_bytes(4, "little").hex(" ") in example


def test_number_formats() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(e4m3(codes.numpy()), codes.view(torch.float8_e4m3fn).float().numpy())
    for n in (1, 2, 16, 128):
        np.testing.assert_array_equal(hadamard(n), sylvester_hadamard(n).numpy())
        assert (hadamard(n).astype(int) @ hadamard(n) == n * np.eye(n)).all()


def test_the_second_reader_uses_nothing_of_ours() -> None:
    source = (Path(__file__).resolve().parent / "second_reader.py").read_text()
    imports = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert imports <= set(sys.stdlib_module_names) | {"numpy"}


def test_random_tensors_cover_odd_values() -> None:
    """The comparison is only worth something if padding is not zero and every code occurs."""
    tensors = random_tensors(manifest_of("linear/1", "bfloat16"))
    nibbles = tensors["layers.0.qkv.int4"].numpy().view(np.uint8)
    assert len(np.unique(nibbles & 15)) == 16
