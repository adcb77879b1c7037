"""What an artifact made of a quantized checkpoint must hold, against the codes that the checkpoint was written from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fut_convert import convert, plan_conversion
from fut_convert.checkpoint_model import model_from_checkpoint, weight_names
from fut_convert.errors import PreflightError
from fut_convert.sources import open_source
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import MODULES
from fut_runtime.reference import backend as reference
from quantized_checkpoints import Fp8Matrix, Parts, Quantized, matrices_of, write_dequantized, write_quantized

#: Short calibration, so that a conversion takes a fraction of a second.
QUICK = {"calibration.windows": 2, "calibration.window_tokens": 64, "calibration.allow_few_tokens": True}


def converted(checkpoint: Path, out: Path, **overrides: object) -> Artifact:
    """Convert without a report, keys with `__` for dots."""
    changed = {**QUICK, **{key.replace("__", "."): value for key, value in overrides.items()}}
    convert(str(checkpoint), out, overrides=changed, report=False)
    return Artifact.open(out, verify=True)


def check_codes_and_scales(artifact: Artifact, matrices: Mapping[str, Quantized], method: str) -> None:
    """Every module holds the checkpoint's codes and scales bit for bit, and the manifest says so."""
    for layer in range(artifact.manifest.model.num_layers):
        for module in MODULES:
            name = f"layers.{layer}.{module}"
            spec = artifact.manifest.weights[name]["int4"]
            parts = [matrices[part] for part in weight_names(layer, module)]
            codes, scales = artifact.codes_and_scales(name)
            rows, cols = spec.shape
            expected = np.concatenate([part.codes for part in parts])
            assert torch.equal(codes[:, :cols], torch.from_numpy(expected))
            assert (codes[:, cols:] == 8).all()
            assert scales.dtype == parts[0].scales.dtype and spec.group_size is not None
            # The group of the first column of each of the artifact's groups is that of all of them.
            first = parts[0].index[:: spec.group_size]
            assert (np.repeat(first, spec.group_size)[:cols] == parts[0].index).all()
            bits = torch.cat([part.scales for part in parts])[:, first].view(torch.int16)
            assert torch.equal(scales[:, : len(first)].contiguous().view(torch.int16), bits)
            assert (spec.method, spec.scale_method) == (method, method)
            assert spec.gain == ("none" if module in ("o", "down") else "runtime")
            assert rows == len(expected)
    check_weights(artifact, matrices, exact=True)


def check_weights(artifact: Artifact, matrices: Mapping[str, Quantized | Fp8Matrix], *, exact: bool) -> None:
    """INT4 weights equal the checkpoint's dequantized ones, or come near; E4M3 weights are made of those."""
    for module in MODULES:
        weight = torch.cat([matrices[part].weight() for part in weight_names(1, module)])
        int4 = artifact.dequantized(f"layers.1.{module}", "int4")
        assert torch.equal(int4, weight) if exact else relative(int4, weight) < 0.15
        norm = {"qkv": "attn_norm", "gate_up": "mlp_norm"}.get(module)
        folded = weight * artifact.tensor(f"layers.1.{norm}") if norm else weight
        assert relative(artifact.dequantized(f"layers.1.{module}", "e4m3"), folded) < 0.035


def check_logits(artifact: Artifact, plain: Path) -> None:
    """Decoding in FP32 gives the logits of the plain checkpoint of the dequantized weights."""
    tokens = [int(t) for t in torch.randint(3, 384, (24,), generator=torch.Generator().manual_seed(0))]
    backend = reference.load(artifact, prefill_mode="decode", kv_cache="bf16", compute="fp32")
    found = backend.prefill([(backend.open_request(len(tokens)), tokens)])
    with open_source(str(plain)) as source:
        model = model_from_checkpoint(source)
        expected = model.logits(model.forward(model.new_cache(len(tokens)), tokens, "decode")[-1:])
    assert relative(found.float(), expected.float()) < 1e-5


def check_loaded(checkpoint: Path, matrices: Mapping[str, Quantized | Fp8Matrix]) -> None:
    """The source gives each matrix dequantized, whole and in rows."""
    with open_source(str(checkpoint)) as source:
        assert [p.message for p in source.check() if p.severity == "error"] == []
        for name, matrix in matrices.items():
            assert torch.equal(source.load(name), matrix.weight())
        assert torch.equal(source.load_rows(name, 3, 9), matrix.weight()[3:9])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def errors_of(checkpoint: Path) -> list[str]:
    """What `Source.check` refuses."""
    with open_source(str(checkpoint)) as source:
        return [p.message for p in source.check() if p.severity == "error"]


def check_kept(
    tmp_path: Path,
    group: int,
    dtype: torch.dtype,
    pack: Callable[..., Parts],
    config: dict[str, Any],
    method: str,
) -> None:
    """A checkpoint whose codes lie around 8 keeps them and its scales, and decodes like its dequantized weights."""
    sizes: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 384}
    make = matrices_of(group, scale_dtype=dtype)
    matrices = write_quantized(tmp_path / "model", make, pack, config, **sizes)
    check_loaded(tmp_path / "model", matrices)
    artifact = converted(tmp_path / "model", tmp_path / "out")
    check_codes_and_scales(artifact, matrices, method)
    check_logits(artifact, write_dequantized(tmp_path / "plain", matrices, **sizes))


def check_requantized(tmp_path: Path, reason: str, make: Callable[..., Quantized], **settings: Any) -> None:
    """The checkpoint converts with requantized codes, saying why, and is refused with `--no-requantize`."""
    matrices = write_quantized(tmp_path / "model", make, **settings)
    check_loaded(tmp_path / "model", matrices)
    plan = plan_conversion(str(tmp_path / "model"), tmp_path / "out", overrides=QUICK)
    said = [w for w in plan.warnings if "dequantized and quantized anew" in w]
    assert len(said) == 1 and reason in said[0] and said[0].startswith("8 modules (layers.0.qkv, ")
    artifact = converted(tmp_path / "model", tmp_path / "out")
    spec = artifact.manifest.weights["layers.1.down"]["int4"]
    assert (spec.method, spec.scale_method) == ("rtn", "weighted_search")
    check_weights(artifact, matrices, exact=False)
    with pytest.raises(PreflightError, match="--no-requantize"):
        convert(str(tmp_path / "model"), tmp_path / "again", overrides={**QUICK, "int4.requantize": "never"})
