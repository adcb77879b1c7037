"""Writes the files beside it with the packing code of AutoAWQ 0.2.9 and GPTQModel 7.7.0.

Neither package installs where the tests run (kernels, old versions of transformers), and nothing but their packing is
wanted. So it is taken out of their source archives, as it is, and runs with stand-ins for what it does not need:

    pip download --no-deps --no-binary :all: --no-build-isolation autoawq==0.2.9 gptqmodel==7.7.0
    python tests/library_files/make.py autoawq-0.2.9.tar.gz gptqmodel-7.7.0.tar.gz

Each file has a matrix by what it means (`codes` [out, in], `zeros` and `scales` [out, groups], `index` [in]) and by
what the library makes of it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import math
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from quantized_checkpoints import Quantized, random_quantized  # noqa: E402

ROWS, COLS, GROUP = 64, 128, 32


def source_of(archive: Path, ending: str) -> str:
    """Text of the one file of an archive whose name ends so."""
    with tarfile.open(archive) as files:
        name = next(n for n in files.getnames() if n.endswith(ending))
        file = files.extractfile(name)
        assert file is not None
        return file.read().decode()


def taken_out(text: str, wanted: str, names: dict[str, Any]) -> Any:
    """The function or method of this name, compiled from its own text, with `names` as its globals."""
    node = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == wanted)
    node.decorator_list, node.returns = [], None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    exec(compile(ast.Module([node], []), wanted, "exec"), names)
    return names[wanted]


def linear_of(matrix: Quantized) -> torch.nn.Linear:
    linear = torch.nn.Linear(COLS, ROWS, bias=False)
    linear.weight.data = matrix.weight()
    return linear


def autoawq(archive: Path, matrix: Quantized) -> dict[str, torch.Tensor]:
    """By `WQLinear_GEMM.from_linear`."""
    text = source_of(archive, "awq/modules/linear/gemm.py")
    pack = taken_out(text, "from_linear", {"torch": torch, "get_best_device": lambda: "cpu"})

    def blank(bits: int, *_: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(w_bit=bits, in_features=COLS)

    zeros = torch.from_numpy(matrix.zeros.astype(np.float32)).T.contiguous()
    scales = matrix.scales.float().T.contiguous()
    packed = pack(blank, linear_of(matrix), 4, GROUP, scales=scales, zeros=zeros)
    return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}


class Module(torch.nn.Module):
    """What GPTQModel's packing asks of the module that it packs into."""

    bits, maxq, planar = 4, 15, False
    pack_dtype, pack_dtype_bits, pack_factor = torch.int32, 32, 8
    pack_np_dtype, pack_np_math_dtype = np.int32, np.uint32
    in_features, out_features = COLS, ROWS

    def qzero_format(self, format: int | None = None) -> None:
        """Nothing here asks for it."""


def gptqmodel(archive: Path, matrix: Quantized, version: int) -> dict[str, torch.Tensor]:
    """By `PackableQuantLinear.pack_original`, and `convert_gptq_v2_to_v1_format_module` for version 1."""
    threads = types.SimpleNamespace(threadpool_limits=lambda _: contextlib.nullcontext())
    transformers = types.SimpleNamespace(pytorch_utils=types.SimpleNamespace(Conv1D=type(None)))
    names: dict[str, Any] = {
        "np": np, "t": torch, "nn": torch.nn, "math": math, "THREADPOOLCTL": threads, "transformers": transformers,
        "_ConvNd": torch.nn.modules.conv._ConvNd,
    }  # fmt: skip
    module = Module()
    pack = taken_out(source_of(archive, "nn_modules/qlinear/__init__.py"), "pack_original", names)
    zeros = torch.from_numpy(matrix.zeros.astype(np.float32))
    index = torch.from_numpy(matrix.index.astype(np.int32))
    pack(module, linear_of(matrix), matrix.scales.float(), zeros, index)
    if version == 1:
        log = types.SimpleNamespace(info=types.SimpleNamespace(once=lambda _: None))
        names = {"torch": torch, "log": log, "BaseQuantLinear": Module}
        text = source_of(archive, "gptqmodel/utils/model.py")
        taken_out(text, "convert_gptq_v2_to_v1_format_module", names)(module, module)
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}


def write(name: str, archive: Path, matrix: Quantized, packed: dict[str, torch.Tensor]) -> None:
    meaning = {
        "codes": torch.from_numpy(matrix.codes),
        "zeros": torch.from_numpy(matrix.zeros.astype(np.uint8)),
        "index": torch.from_numpy(matrix.index.astype(np.int32)),
        "true_scales": matrix.scales,
    }
    made_by = {"archive": archive.name, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    tensors = {k: v.detach().contiguous() for k, v in {**meaning, **packed}.items()}
    save_file(tensors, HERE / f"{name}.safetensors", metadata={"made_by": json.dumps(made_by)})


def main(awq: Path, gptq: Path) -> None:
    """Write all files."""
    asymmetric = random_quantized("awq", (ROWS, COLS), GROUP, zeros="with_zero")
    write("autoawq", awq, asymmetric, autoawq(awq, asymmetric))
    for version in (1, 2):
        matrix = random_quantized(f"gptq-{version}", (ROWS, COLS), GROUP, zeros="with_zero", permuted=True)
        write(f"gptqmodel-v{version}", gptq, matrix, gptqmodel(gptq, matrix, version))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
