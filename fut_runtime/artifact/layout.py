"""Which tensors an artifact holds: their names, storage types and shapes, all derived from the manifest.

Writer and reader call the same functions, so a tensor that one would not write the other does not expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fut_runtime.artifact.checks import MATRIX_ALIGN
from fut_runtime.artifact.manifest import Manifest, WeightSpec
from fut_runtime.artifact.orders import TILE_COLS, TILE_ROWS
from fut_runtime.artifact.spec import MODULES, ModelSpec

#: The four sites of a layer whose activation is quantised to E4M3, in the order of `activation_scale`.
SITES: tuple[str, ...] = MODULES
#: Tensor, under `layers.{i}.`, with the gain of the RMSNorm before a module; `o` and `down` have none.
NORM_OF_MODULE: dict[str, str] = {"qkv": "attn_norm", "gate_up": "mlp_norm"}


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype (`BF16`, `F32`, `I32`, `F8_E4M3`, …) and stored shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPE_BYTES[self.dtype]


DTYPE_BYTES: dict[str, int] = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
_SCALE_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def default_group_size(in_features: int) -> int:
    """Group size of an INT4 module: the largest of 128, 64 and 32 that divides its input, else 64 with padding.

    64 is the width of a tile, so padding to it costs nothing beyond what the tile needs anyway.
    """
    return next((g for g in (128, 64, 32) if in_features % g == 0), 64)


def padded_int4_shape(shape: tuple[int, int], group_size: int, paired_rows: bool) -> tuple[int, int]:
    """Stored shape of an INT4 matrix: whole tiles and whole groups.

    `paired_rows`: the rows are two interleaved halves (gate and up), each padded to 8 rows, half a tile.
    """
    rows = 2 * round_up(shape[0] // 2, TILE_ROWS // 2) if paired_rows else round_up(shape[0], TILE_ROWS)
    return rows, round_up(shape[1], max(TILE_COLS, group_size))


def padded_e4m3_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Stored shape of an E4M3 or BF16 matrix: both sizes rounded up to 16."""
    return round_up(shape[0], MATRIX_ALIGN), round_up(shape[1], MATRIX_ALIGN)


def weight_tensors(name: str, spec: WeightSpec) -> Iterator[TensorSpec]:
    """Tensors of one weight matrix in one format.

    `{name}.e4m3` F8_E4M3 [rows, cols] and `{name}.e4m3_scale` F32 [rows];
    `{name}.int4` I32 [rows/16, cols/64, 32 lanes, 4 words] and `{name}.int4_scale` [rows/16, cols/group, 16];
    `{name}.bf16` BF16 [rows, cols]. Rows and cols are those of the padded shape.
    """
    rows, cols = spec.padded_shape
    if spec.format == "e4m3":
        yield TensorSpec(f"{name}.e4m3", "F8_E4M3", (rows, cols))
        yield TensorSpec(f"{name}.e4m3_scale", "F32", (rows,))
    elif spec.format == "int4":
        assert spec.group_size is not None and spec.scale_dtype is not None
        tiles = rows // TILE_ROWS
        yield TensorSpec(f"{name}.int4", "I32", (tiles, cols // TILE_COLS, 32, 4))
        yield TensorSpec(
            f"{name}.int4_scale", _SCALE_DTYPE[spec.scale_dtype], (tiles, cols // spec.group_size, TILE_ROWS)
        )
    else:
        yield TensorSpec(f"{name}.bf16", "BF16", (rows, cols))


def layer_tensors(manifest: Manifest, layer: int) -> Iterator[TensorSpec]:
    """Tensors of one decoder layer, in the order they are written."""
    model = manifest.model
    prefix = f"layers.{layer}"
    yield TensorSpec(f"{prefix}.attn_norm", "F32", (model.hidden_size,))
    yield TensorSpec(f"{prefix}.mlp_norm", "F32", (model.hidden_size,))
    if model.qk_norm:
        yield TensorSpec(f"{prefix}.q_norm", "F32", (model.head_dim,))
        yield TensorSpec(f"{prefix}.k_norm", "F32", (model.head_dim,))
    yield TensorSpec(f"{prefix}.activation_scale", "F32", (len(SITES),))
    for module in MODULES:
        name = f"{prefix}.{module}"
        if model.module_bias(module):
            yield TensorSpec(f"{name}.bias", "F32", (model.module_shape(module)[0],))
        # Sorted, as the manifest's JSON is: the order of the files must not depend on how the manifest came about.
        for _, spec in sorted(manifest.weights[name].items()):
            yield from weight_tensors(name, spec)


def model_tensors(manifest: Manifest) -> Iterator[TensorSpec]:
    """Tensors outside the layers: embedding, Hadamard block, final norm, and the head unless it is the embedding."""
    model: ModelSpec = manifest.model
    yield TensorSpec("embed", "BF16", (model.vocab_size, model.hidden_size))
    yield TensorSpec("hadamard", "I8", (model.rotation_block, model.rotation_block))
    yield TensorSpec("final_norm", "F32", (model.hidden_size,))
    for spec in manifest.weights.get("head", {}).values():
        yield from weight_tensors("head", spec)


def all_tensors(manifest: Manifest) -> list[TensorSpec]:
    """Every tensor of the artifact in writing order: embedding and norms, layers from the first to the last, head."""
    outer = list(model_tensors(manifest))
    head = [t for t in outer if t.name.startswith("head.")]
    tensors = [t for t in outer if not t.name.startswith("head.")]
    for layer in range(manifest.model.num_layers):
        tensors.extend(layer_tensors(manifest, layer))
    return tensors + head
