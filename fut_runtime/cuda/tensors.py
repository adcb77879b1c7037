"""Which tensors of an artifact the CUDA backend needs, and how the library is told of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from fut_runtime.artifact.fragment import DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER
from fut_runtime.artifact.layout import (
    NORM_OF_MODULE,
    TensorSpec,
    layer_tensors,
    model_tensors,
    padded_e4m3_shape,
    weight_tensors,
)
from fut_runtime.artifact.manifest import Manifest, WeightSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import MODULES
from fut_runtime.cuda.structs import Format, Layer, Matrix, RowOrder
from fut_runtime.errors import FutError, UnsupportedError

#: What `decode_mode` calls the formats of the weights, the preferred one first.
DECODE_FORMATS: dict[str, str] = {"int4": "int4", "fp8": "e4m3", "bf16": "bf16"}
_FORMATS = {"int4": Format.INT4, "e4m3": Format.E4M3, "bf16": Format.BF16}
_ROW_ORDERS = {
    "natural": RowOrder.NATURAL,
    "interleave1": RowOrder.INTERLEAVE1,
    "interleave8": RowOrder.INTERLEAVE8,
}
GROUP_SIZES = (32, 64, 128)
#: Device addresses that bulk copies read from must be multiples of this.
ADDRESS_ALIGN = 16


def choose_decode_mode(artifact: Artifact, decode_mode: str | None) -> str:
    """The decode mode asked for, or the first that the artifact has weights for.

    Raises:
        UnsupportedError: no such mode, or the artifact does not carry its weights in every layer.
    """
    if decode_mode is not None and decode_mode not in DECODE_FORMATS:
        raise UnsupportedError(f"decode_mode is {decode_mode!r}, expected one of {', '.join(DECODE_FORMATS)}")
    weights = artifact.manifest.weights
    layers = [weights[f"layers.{i}.{m}"] for i in range(artifact.manifest.model.num_layers) for m in MODULES]
    possible = [mode for mode, stored in DECODE_FORMATS.items() if all(stored in formats for formats in layers)]
    if decode_mode is None and possible:
        return possible[0]
    if decode_mode is None or decode_mode not in possible:
        wanted = "int4, e4m3 or bf16" if decode_mode is None else DECODE_FORMATS[decode_mode]
        remedy = f"choose decode_mode {' or '.join(possible)}, or " if possible else ""
        raise UnsupportedError(
            f"{artifact.path}: decode_mode {decode_mode} needs every projection in {wanted}: {remedy}convert again "
            f"with --weights including {wanted}"
        )
    return decode_mode


def needed_tensors(manifest: Manifest, *weight_formats: str) -> Iterator[TensorSpec]:
    """The tensors that decoding, and prefill beside it, read with weights of some formats, in the order of the files.

    The embedding is asked for with the rows that it needs as a head: padded to a multiple of 16.
    """
    model = manifest.model
    specs = {spec.name: spec for spec in model_tensors(manifest)}
    embed = specs["embed"]
    yield TensorSpec(embed.name, embed.dtype, (padded_e4m3_shape((model.vocab_size, 1))[0], model.hidden_size))
    if "head" not in manifest.weights or manifest.weights["head"][manifest.head].gain == "runtime":
        yield specs["final_norm"]
    for i in range(model.num_layers):
        wanted = {f"layers.{i}.{norm}_norm" for norm in ("q", "k")}
        for module in MODULES:
            name = f"layers.{i}.{module}"
            wanted.add(f"{name}.bias")
            for weight_format in weight_formats:
                spec = manifest.weights[name][weight_format]
                wanted |= {t.name for t in weight_tensors(name, spec)}
                if spec.gain == "runtime":
                    wanted.add(f"layers.{i}.{NORM_OF_MODULE[module]}")
        yield from (spec for spec in layer_tensors(manifest, i) if spec.name in wanted)
    if "head" in manifest.weights:
        yield from weight_tensors("head", manifest.weights["head"][manifest.head])


def check_supported(artifact: Artifact, weight_format: str) -> None:
    """Make sure that the kernels can read the matrices that decoding with weights of one format uses.

    Raises:
        UnsupportedError: an order or a group size that they do not know; the message names the matrix.
    """
    manifest = artifact.manifest
    used = [(name, formats[weight_format]) for name, formats in manifest.weights.items() if name != "head"]
    if "head" in manifest.weights:
        used.append(("head", manifest.weights["head"][manifest.head]))
    elif manifest.model.hidden_size % 16:
        raise UnsupportedError(
            f"{artifact.path}: the embedding is the head and has rows of {manifest.model.hidden_size} numbers; the "
            "CUDA kernels need a multiple of 16: convert again with a head of its own (--head e4m3)"
        )
    for name, spec in used:
        where = f"{artifact.path}: {name} ({spec.format})"
        if spec.format != "int4":
            continue
        orders = (spec.nibble_order, spec.scale_order)
        if orders != (DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER):
            raise UnsupportedError(
                f"{where} is in orders {orders[0]} and {orders[1]}; the CUDA kernels read {DEFAULT_NIBBLE_ORDER} and "
                f"{DEFAULT_SCALE_ORDER}: run fut-artifact repack"
            )
        if spec.group_size not in GROUP_SIZES:
            raise UnsupportedError(
                f"{where} has groups of {spec.group_size}; the CUDA kernels read groups of "
                f"{', '.join(map(str, GROUP_SIZES))}: convert again with one of them"
            )


@dataclass(frozen=True)
class DeviceTensors:
    """An artifact's tensors on a device, and the structures that point to them.

    Attributes:
        tensors: by name; whoever uses a structure made from them keeps this object alive. Without tensors the
            structures say sizes and formats alone, which is what planning needs.
    """

    manifest: Manifest
    weight_format: str
    tensors: Mapping[str, Tensor]

    def layers(self) -> list[Layer]:
        """`fut_layer` of every layer."""
        return [self._layer(i) for i in range(self.manifest.model.num_layers)]

    def head(self) -> Matrix:
        """`fut_matrix` of the head: its own, or the embedding with the final norm's gain."""
        if "head" in self.manifest.weights:
            return self._matrix("head", self.manifest.weights["head"][self.manifest.head], "final_norm")
        model = self.manifest.model
        return Matrix(
            weight=self._address("embed"),
            gain=self._address("final_norm"),
            format=Format.BF16,
            row_order=RowOrder.NATURAL,
            rows=model.vocab_size,
            cols=model.hidden_size,
            stored_rows=padded_e4m3_shape((model.vocab_size, 1))[0],
            stored_cols=model.hidden_size,
        )

    def _layer(self, index: int) -> Layer:
        layer = Layer(q_norm=self._address(f"layers.{index}.q_norm"), k_norm=self._address(f"layers.{index}.k_norm"))
        for module in MODULES:
            name = f"layers.{index}.{module}"
            norm = f"layers.{index}.{NORM_OF_MODULE[module]}" if module in NORM_OF_MODULE else None
            setattr(layer, module, self._matrix(name, self.manifest.weights[name][self.weight_format], norm))
        return layer

    def _matrix(self, name: str, spec: WeightSpec, norm: str | None) -> Matrix:
        return matrix_struct(
            spec,
            weight=self._address(f"{name}.{spec.format}") or 0,
            scale=self._address(f"{name}.{spec.format}_scale"),
            bias=self._address(f"{name}.bias"),
            gain=self._address(norm) if norm is not None and spec.gain == "runtime" else None,
        )

    def _address(self, name: str) -> int | None:
        """Device address of a tensor, None where there is none of that name.

        Raises:
            FutError: the kernels could not read from it in whole vectors.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        address = int(tensor.data_ptr())
        if address % ADDRESS_ALIGN:
            raise FutError(f"tensor {name} {list(tensor.shape)} lies at {address:#x}, no multiple of {ADDRESS_ALIGN}")
        return address


def matrix_struct(
    spec: WeightSpec, *, weight: int, scale: int | None = None, bias: int | None = None, gain: int | None = None
) -> Matrix:
    """`fut_matrix` of a stored matrix, given the device addresses of its parts."""
    return Matrix(
        weight=weight,
        scale=scale,
        bias=bias,
        gain=gain,
        format=_FORMATS[spec.format],
        row_order=_ROW_ORDERS[spec.row_order],
        rows=spec.shape[0],
        cols=spec.shape[1],
        stored_rows=spec.padded_shape[0],
        stored_cols=spec.padded_shape[1],
        group_size=spec.group_size or 0,
        scale_is_fp16=int(spec.scale_dtype == "float16"),
    )
