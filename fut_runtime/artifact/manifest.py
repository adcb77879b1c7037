"""`fut_config.json`: the manifest of an artifact, as dataclasses with strict reading and stable writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fut_runtime.artifact.checks import WEIGHT_FORMATS, check_manifest
from fut_runtime.artifact.fields import read_fields
from fut_runtime.artifact.json_text import canonical, parse_object, shown
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.errors import ArtifactError

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "WEIGHT_FORMATS",
    "ActivationSpec",
    "KVCacheSpec",
    "Manifest",
    "WeightSpec",
    "check_version",
]

FORMAT_NAME = "futransformer"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class WeightSpec:
    """How one weight matrix is stored in one format.

    Attributes:
        format: `e4m3`, `int4` or `bf16`. One matrix may be stored in several: E4M3 for prefill, INT4 for decode.
        shape: true (out, in) shape.
        padded_shape: stored shape; what lies beyond `shape` is zero (INT4: code 8).
        row_order: name of the order of the output rows, see `rows.py`.
        gain: `folded` when the preceding RMSNorm's gain is in the weights, `runtime` when the activation is
            multiplied by it, `none` where no RMSNorm precedes.
        group_size: INT4 only: weights along the input dimension that share one scale.
        scale_dtype: storage type of the scales (`float32` for E4M3, `bfloat16` or `float16` for INT4).
        nibble_order: INT4 only: name and version of the fragment order, see `fragment.py`.
        scale_order: INT4 only: name and version of the order of the scales.
        method: how the codes were chosen (`rtn`, `gptq`; `packed:…` where the checkpoint brought them).
        scale_method: how the scales were chosen.
    """

    format: str
    shape: tuple[int, int]
    padded_shape: tuple[int, int]
    row_order: str
    gain: str
    group_size: int | None = None
    scale_dtype: str | None = None
    nibble_order: str | None = None
    scale_order: str | None = None
    method: str | None = None
    scale_method: str | None = None


@dataclass(frozen=True)
class KVCacheSpec:
    """Decode cache: `bits` 4 with `rotation` and `zero_point`, or 16 for a BF16 cache.

    `v_folded` says that the rotation of V is in the weights: V comes out of its product rotated, and `o` takes rotated
    heads. Then a rotated cache rotates q and K alone.
    """

    bits: int = 4
    rotation: bool = True
    zero_point: bool = True
    v_folded: bool = False

    @property
    def rotates_v(self) -> bool:
        """Whether V is rotated on its way into the cache, and the attention's output on its way out."""
        return self.rotation and not self.v_folded


@dataclass(frozen=True)
class ActivationSpec:
    """Initial E4M3 activation scales: s = margin * amax / 448, `calibrated` or a conservative constant."""

    calibrated: bool
    margin: float


@dataclass(frozen=True)
class Manifest:
    """All of `fut_config.json`.

    `weights` maps `layers.{i}.{module}` and `head` to the formats stored for it. A tied BF16 head has no entry.
    `source` and `calibration` record where model and calibration text came from; `recipe` is the resolved recipe;
    `tools` the versions that made the artifact. None of them holds a time or a path, so sealed files are reproducible.
    """

    model: ModelSpec
    weights: dict[str, dict[str, WeightSpec]]
    kv_cache: KVCacheSpec
    activation: ActivationSpec
    head: str
    source: dict[str, Any]
    recipe: dict[str, Any]
    tools: dict[str, str]
    calibration: dict[str, Any] | None = None
    side_files: tuple[str, ...] = ()
    format_version: int = field(default=FORMAT_VERSION)

    def to_json(self) -> str:
        """Canonical text: keys sorted, two-space indent, newline at the end.

        Raises:
            ArtifactError: the source, recipe or calibration holds something that JSON has no form for.
        """
        data = asdict(self)
        data["model"] = self.model.to_dict()
        data["weights"] = {
            name: {fmt: {k: v for k, v in asdict(spec).items() if v is not None} for fmt, spec in formats.items()}
            for name, formats in self.weights.items()
        }
        if not self.kv_cache.v_folded:
            # Left out where it says nothing, so that readers that do not know it need not.
            del data["kv_cache"]["v_folded"]
        data["side_files"] = list(self.side_files)
        data["format"] = FORMAT_NAME
        try:
            text = canonical(data)
            text.encode()
            return text
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"fut_config.json: the manifest cannot be written as JSON ({error})") from error

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "fut_config.json") -> Manifest:
        """Read and check a manifest.

        Raises:
            ArtifactError: not JSON, another format, a newer version, or keys and values outside the specification.
        """
        data = parse_object(text, where)
        check_version(data, where)
        del data["format"]
        values = read_fields(cls, data, where)
        values["model"] = ModelSpec.from_dict(values["model"], where)
        values["weights"] = _read_weights(values["weights"], where)
        values["kv_cache"] = KVCacheSpec(**read_fields(KVCacheSpec, values["kv_cache"], f"{where}: kv_cache"))
        values["activation"] = ActivationSpec(
            **read_fields(ActivationSpec, values["activation"], f"{where}: activation")
        )
        manifest = cls(**values)
        check_manifest(manifest, where)
        return manifest


def check_version(data: Mapping[str, Any], where: str) -> None:
    """Check the `format` and `format_version` that every JSON file of an artifact begins with.

    Raises:
        ArtifactError: another format, or a version that this release does not read.
    """
    if data.get("format") != FORMAT_NAME:
        raise ArtifactError(f'{where}: not of a FuTransformer artifact (no "format": "{FORMAT_NAME}")')
    version = data.get("format_version")
    if type(version) is not int or version < 1:
        raise ArtifactError(f"{where}: format_version is {version!r}, expected a positive integer")
    if version > FORMAT_VERSION:
        raise ArtifactError(
            f"{where}: format version {version} is newer than {FORMAT_VERSION}, the newest this release reads; "
            "upgrade futransformer, or convert the model again"
        )


def _read_weights(data: dict[str, Any], where: str) -> dict[str, dict[str, WeightSpec]]:
    weights: dict[str, dict[str, WeightSpec]] = {}
    for name, formats in data.items():
        if not isinstance(formats, Mapping):
            raise ArtifactError(f"{where}: weights.{shown(name)} is {type(formats).__name__}, expected an object")
        weights[name] = {
            weight_format: WeightSpec(
                **read_fields(WeightSpec, entry, f"{where}: weights.{shown(name)}.{shown(weight_format)}")
            )
            for weight_format, entry in formats.items()
        }
    return weights
