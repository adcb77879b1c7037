"""Whether a manifest that has the right form also makes sense: sizes, orders, formats, paddings, gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fut_runtime.artifact.fields import check_positive
from fut_runtime.artifact.orders import NIBBLE_ORDERS, SCALE_ORDERS, TILE_COLS, TILE_ROWS
from fut_runtime.artifact.paths import check_foreign_name
from fut_runtime.artifact.rows import ROW_ORDERS, check_row_order
from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.errors import ArtifactError

if TYPE_CHECKING:
    from fut_runtime.artifact.manifest import Manifest, WeightSpec

#: Weight formats a module may be stored in. One module may carry several: E4M3 for prefill, INT4 for decode.
WEIGHT_FORMATS: tuple[str, ...] = ("e4m3", "int4", "bf16")
INT4_SCALE_DTYPES: tuple[str, ...] = ("bfloat16", "float16")
#: INT4 groups are whole numbers of k16 tiles, two of which share words.
MIN_GROUP_SIZE = 32
MAX_GROUP_SIZE = 1024
#: Rows and columns of E4M3 and BF16 matrices are multiples of this: 16-byte units, the granularity of a TMA stride.
MATRIX_ALIGN = 16
_KV_BITS = (4, 16)


def check_manifest(manifest: Manifest, where: str) -> None:
    """Check a whole manifest.

    Raises:
        ArtifactError: names the key, what was found and what was expected.
    """
    model = manifest.model
    expected = [f"layers.{i}.{m}" for i in range(model.num_layers) for m in MODULES]
    missing = [n for n in expected if n not in manifest.weights]
    if missing:
        raise ArtifactError(f"{where}: weights lacks {missing[0]} ({len(missing)} missing of {len(expected)})")
    extra = sorted(set(manifest.weights) - set(expected) - {"head"})
    if extra:
        raise ArtifactError(f"{where}: weights has unexpected entries {extra[:3]}")
    for name, formats in manifest.weights.items():
        if not formats:
            raise ArtifactError(f"{where}: weights.{name} is empty, expected one of {WEIGHT_FORMATS}")
        for weight_format, spec in formats.items():
            if weight_format not in WEIGHT_FORMATS or spec.format != weight_format:
                raise ArtifactError(
                    f"{where}: weights.{name}: format {weight_format!r} holds {spec.format!r}, "
                    f"expected the same and one of {WEIGHT_FORMATS}"
                )
            _check_weight(spec, name.rsplit(".", 1)[-1], model, f"{where}: weights.{name}.{weight_format}")
    _check_head(manifest, where)
    if manifest.kv_cache.bits not in _KV_BITS:
        raise ArtifactError(f"{where}: kv_cache.bits is {manifest.kv_cache.bits}, expected one of {_KV_BITS}")
    if manifest.kv_cache.v_folded and not (manifest.kv_cache.bits == 4 and manifest.kv_cache.rotation):
        raise ArtifactError(f"{where}: kv_cache.v_folded is true, expected bits 4 and rotation true beside it")
    check_positive({"margin": manifest.activation.margin}, f"{where}: activation", 1e6)
    for name in manifest.side_files:
        check_foreign_name(name, f"{where}: side_files")
    if len(set(manifest.side_files)) != len(manifest.side_files):
        raise ArtifactError(f"{where}: side_files names a file twice")


def _check_weight(spec: WeightSpec, module: str, model: ModelSpec, where: str) -> None:
    true = model.module_shape(module)
    if spec.shape != true:
        raise ArtifactError(f"{where}: shape {spec.shape}, expected {true} from the model")
    gains = ("none",) if module in ("o", "down") else ("folded", "runtime")
    if spec.gain not in gains:
        raise ArtifactError(f"{where}: gain {spec.gain!r}, expected one of {gains}")
    orders = ROW_ORDERS if module == "gate_up" else ("natural",)
    if spec.row_order not in orders:
        raise ArtifactError(f"{where}: row_order {spec.row_order!r}, expected one of {orders}")
    if spec.format == "int4":
        _check_choice(
            where,
            scale_dtype=(spec.scale_dtype, INT4_SCALE_DTYPES),
            nibble_order=(spec.nibble_order, tuple(NIBBLE_ORDERS)),
            scale_order=(spec.scale_order, tuple(SCALE_ORDERS)),
        )
        group = spec.group_size
        if group is None or not MIN_GROUP_SIZE <= group <= MAX_GROUP_SIZE or group & (group - 1):
            raise ArtifactError(
                f"{where}: group_size {group}, expected a power of two from {MIN_GROUP_SIZE} to {MAX_GROUP_SIZE}"
            )
        align = (TILE_ROWS, max(TILE_COLS, group))
    else:
        unused = (None,)
        _check_choice(
            where,
            scale_dtype=(spec.scale_dtype, ("float32",) if spec.format == "e4m3" else unused),
            group_size=(spec.group_size, unused),
            nibble_order=(spec.nibble_order, unused),
            scale_order=(spec.scale_order, unused),
        )
        align = (MATRIX_ALIGN, MATRIX_ALIGN)
    for true_size, padded, unit in zip(spec.shape, spec.padded_shape, align, strict=True):
        if padded % unit or not true_size <= padded < 1 << 40:
            raise ArtifactError(
                f"{where}: padded_shape {spec.padded_shape}, expected multiples of {align} that hold {spec.shape}"
            )
    check_row_order(spec.row_order, spec.shape[0], spec.padded_shape[0])


def _check_choice(where: str, **choices: tuple[object, tuple[object, ...]]) -> None:
    for key, (found, allowed) in choices.items():
        if found not in allowed:
            raise ArtifactError(f"{where}: {key} {found!r}, expected one of {list(allowed)}")


def _check_head(manifest: Manifest, where: str) -> None:
    stored: Mapping[str, WeightSpec] = manifest.weights.get("head", {})
    if manifest.head not in WEIGHT_FORMATS:
        raise ArtifactError(f"{where}: head is {manifest.head!r}, expected one of {WEIGHT_FORMATS}")
    if stored and set(stored) != {manifest.head}:
        raise ArtifactError(f"{where}: weights.head is stored as {sorted(stored)}, expected {manifest.head}")
    if not stored and not (manifest.head == "bf16" and manifest.model.tie_word_embeddings):
        raise ArtifactError(
            f"{where}: weights lacks head; only the BF16 head of a model with tied embeddings is the embedding itself"
        )
