"""Checkpoints that are quantized already: their config, and tensors that do not fit it or each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fut_convert.checkpoint_model import weight_names
from fut_convert.kept_codes import is_kept, load_kept_codes, plan_kept_codes
from fut_convert.manifest import build_manifest
from fut_convert.recipe import load_recipe
from fut_convert.sources import open_source
from fut_runtime.artifact.spec import MODULES
from fuzzing.mutations import damage_json
from fuzzing.reader import Files, Reader, damage_shard, files_of
from quantized_checkpoints import (
    Fp8Matrix,
    Parts,
    awq_config,
    awq_parts,
    compressed_config,
    compressed_parts,
    gptq_config,
    gptq_parts,
    matrices_of,
    random_fp8,
    write_quantized,
)

_SIZES: Mapping[str, Any] = {"layers": 1, "vocab_size": 300, "intermediate": 128}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.int8, torch.float8_e4m3fn)
WEIGHTS = "model.safetensors"


def _fp8_parts(matrix: Fp8Matrix) -> Parts:
    scales = torch.from_numpy(matrix.scales[::128, ::128].copy())
    return {"weight": torch.from_numpy(matrix.bits).view(torch.float8_e4m3fn), "weight_scale_inv": scales}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
#: Format -> what makes its matrices, packs them and describes them.
_KINDS: Mapping[str, tuple[Callable[..., Any], Callable[..., Parts], Mapping[str, Any]]] = {
    "gptq": (matrices_of(64), gptq_parts, gptq_config(64)),
    "gptq_v2": (
        matrices_of(32, zeros="asymmetric", permuted=True), partial(gptq_parts, version=2),
        gptq_config(32, checkpoint_format="gptq_v2", desc_act=True),
    ),
    "awq": (matrices_of(64, zeros="asymmetric"), awq_parts, awq_config(64)),
    "compressed": (matrices_of(32), compressed_parts, compressed_config(32)),
    "compressed_asymmetric": (
        matrices_of(32, zeros="asymmetric", permuted=True), compressed_parts,
        compressed_config(32, symmetric=False, actorder="group"),
    ),
    "fp8": (lambda name, shape: random_fp8(name, shape, (128, 128)), _fp8_parts, _FP8),
}  # fmt: skip


class QuantizedReader(Reader):
    """A checkpoint of any format that is quantized already, with the codes that can be kept and those that cannot."""

    name = "quantized"

    def make(self, folder: Path) -> Files:
        files: Files = {}
        for kind, (make, pack, config) in _KINDS.items():
            write_quantized(folder / kind, make, pack, config, **_SIZES)
            files |= {f"{kind}/{name}": content for name, content in files_of(folder / kind).items()}
        return files

    def damaged(self, random: Random) -> Files:
        kind = random.choice(list(_KINDS))
        files = {name: data for name, data in self.whole.items() if name.startswith(f"{kind}/")}
        config, weights = f"{kind}/config.json", f"{kind}/{WEIGHTS}"
        if random.random() < 0.4:
            settings = json.loads(files[config])
            text = damage_json(random, settings.pop("quantization_config"))
            files[config] = json.dumps({**settings, "quantization_config": 0}).encode()[:-2] + text.encode() + b"}"
        if random.random() < 0.7:
            tensors = load(files[weights])
            for _ in range(random.randrange(1, 4)):
                _damage_tensor(random, tensors)
            files[weights] = save(tensors)
        else:
            files[weights] = damage_shard(random, files[weights])
        return files

    def read(self, folder: Path) -> None:
        for place in sorted(path for path in folder.iterdir() if path.is_dir()):
            _read(place)


def _damage_tensor(random: Random, tensors: dict[str, Tensor]) -> None:
    """Give one tensor of a quantized matrix another type, shape, content, name or place, or none at all."""
    name = random.choice([name for name in sorted(tensors) if "_proj." in name])
    tensor = tensors.pop(name)
    kind = random.randrange(8)
    if kind == 0:
        return
    if kind == 1:
        tensor = tensor.float().to(random.choice(_DTYPES))
    elif kind == 2:
        tensor = tensor[: random.randrange(tensor.shape[0] + 1)] if tensor.dim() else tensor.expand(2)
    elif kind == 3:
        tensor = random.choice((tensor.flatten(), tensor[None], tensor.T if tensor.dim() == 2 else tensor))
    elif kind == 4:
        values = (0, -1, 1, 15, 127, *((float("nan"), float("inf")) if tensor.is_floating_point() else ()))
        tensor = torch.full(tensor.shape, random.choice(values), dtype=torch.float32).to(tensor.dtype)
    elif kind == 5 and tensor.numel():
        raw = tensor.contiguous().flatten().view(torch.uint8).clone()
        for _ in range(random.randrange(1, 9)):
            raw[random.randrange(len(raw))] = random.randrange(256)
        tensor = raw.view(tensor.dtype).view(tensor.shape)
    elif kind == 6:
        name = random.choice((name.replace("_proj", "_proj.weight"), name.rpartition(".")[0] + ".weight", f"{name}.x"))
    else:
        tensors[name] = tensor.contiguous().clone()
        name = f"{name.rpartition('.')[0]}.{random.choice(('bias', 'g_idx', 'weight_zero_point', 'weight_g_idx'))}"
    tensors[name] = tensor.contiguous().clone()


def _read(folder: Path) -> None:
    recipe = load_recipe("rtn", {"calibration.enabled": False})
    with open_source(str(folder)) as source:
        problems = source.check()
        for problem in problems:
            problem.message.encode()
        if any(problem.severity == "error" for problem in problems):
            return
        for name in source.tensors:
            source.load(name)
        kept = plan_kept_codes(source, recipe).modules
        manifest = build_manifest(source.spec, recipe, source={"kind": "directory", "name": "x"}, kept=kept)
        for layer in range(source.spec.num_layers):
            for module in MODULES:
                spec = manifest.weights[f"layers.{layer}.{module}"]["int4"]
                if is_kept(spec):
                    load_kept_codes(source, weight_names(layer, module), spec, torch.device("cpu"))
