"""Safetensors headers: ours are read by the library, foreign ones are checked, sharding keeps its limit."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from fut_runtime.artifact.layout import TensorSpec
from fut_runtime.artifact.shards import DATA_ALIGN, index_text, parse_header, plan_shards, read_header
from fut_runtime.errors import ArtifactError

specs_strategy = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
            lambda name: name != "__metadata__"
        ),
        dtype=st.sampled_from(["BF16", "F32", "I32", "F8_E4M3", "U8"]),
        shape=st.lists(st.integers(1, 30), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@given(specs=specs_strategy, limit=st.integers(1, 100_000))
def test_every_tensor_once_and_every_file_within_the_limit(specs: list[TensorSpec], limit: int) -> None:
    shards = plan_shards(specs, limit)
    assert [place.spec for shard in shards for place in shard.tensors] == specs
    for shard in shards:
        assert shard.nbytes <= limit or len(shard.tensors) == 1
        assert len(shard.header) % DATA_ALIGN == 0 and shard.tensors[0].offset == len(shard.header)
        parsed = parse_header(shard.header[8:], shard.nbytes - len(shard.header), "x", data_start=len(shard.header))
        assert sorted(parsed, key=lambda p: p.spec.name) == sorted(shard.tensors, key=lambda p: p.spec.name)
    weight_map = json.loads(index_text(shards))["weight_map"]
    assert set(weight_map) == {spec.name for spec in specs}


def test_the_library_reads_our_header(tmp_path: Path) -> None:
    specs = [
        TensorSpec("a", "F8_E4M3", (3, 5)),
        TensorSpec("scale", "BF16", (2,)),
        TensorSpec("empty_shape", "F32", ()),
    ]
    (shard,) = plan_shards(specs, 1 << 20)
    path = tmp_path / shard.name
    path.write_bytes(shard.header + bytes(shard.nbytes - len(shard.header)))
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {spec.name for spec in specs}
        assert file.get_slice("a").get_shape() == [3, 5]
    assert {p.spec for p in read_header(path)} == set(specs)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}, "dtype"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "dtype"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "span"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}, "span"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1}, "object of"),
        ({"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "bytes of data"),
        (7, "object of"),
    ],
)
def test_bad_entries_are_named(entry: Any, expected: str) -> None:
    with pytest.raises(ArtifactError, match=expected):
        parse_header(json.dumps({"t": entry}).encode(), 4, "file")


scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
entry_like = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BF16"]) | scalar,
        "shape": st.lists(st.integers(-2, 4) | scalar, max_size=3) | scalar,
        "data_offsets": st.lists(st.integers(-1, 64) | scalar, max_size=3) | scalar,
    },
)


@given(st.dictionaries(st.text(max_size=4), entry_like | scalar, max_size=4) | scalar | st.lists(scalar))
def test_arbitrary_headers_raise_only_artifact_error(header: Any) -> None:
    try:
        parse_header(json.dumps(header).encode(), 16, "file")
    except ArtifactError:
        return


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_artifact_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except ArtifactError:
        return
    assert struct.unpack("<Q", content[:8])[0] <= len(content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere"):
        read_header(tmp_path / "nowhere.safetensors")
