"""Conversion and the reference backend on the card give what they give on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8_simulation import Sizes, quantize_weights, simulate_prefill
from fut_convert import convert
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.reader import Artifact
from fut_runtime.reference import backend as reference
from odd_checkpoints import ODD_CHECKPOINTS
from synthetic_checkpoint import CheckpointShape, make_tensors, write_checkpoint

FORMATS = ["e4m3", "int4", "bf16"]


def converted(checkpoint: Path, out: Path, device: str, **overrides: object) -> Artifact:
    options = {"weights": FORMATS, "int4.group_size": 32, **overrides}
    return Artifact.open(convert(str(checkpoint), out, overrides=options, device=device).path)


@pytest.mark.parametrize("method", ["absmax_7", "absmax_7.5"])
def test_the_card_quantizes_to_the_same_bytes(tmp_path: Path, method: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CheckpointShape())
    options = {"calibration.enabled": False, "int4.scale_method": method}
    cpu, card = (converted(checkpoint, tmp_path / d, d, **options) for d in ("cpu", "cuda"))
    for spec in all_tensors(cpu.manifest):
        assert torch.equal(cpu.tensor(spec.name).view(torch.uint8), card.tensor(spec.name).view(torch.uint8)), spec.name


def test_searched_scales_lose_no_more_on_the_card(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CheckpointShape())
    results = [
        convert(str(checkpoint), tmp_path / device, overrides={"calibration.windows": 2}, device=device)
        for device in ("cpu", "cuda")
    ]
    cpu, card = (r.module_error for r in results)
    for name in cpu:
        assert card[name] == pytest.approx(cpu[name], rel=1e-2), name


@pytest.mark.parametrize("name", list(ODD_CHECKPOINTS))
@pytest.mark.parametrize(
    ("decode_mode", "prefill_mode", "kv_cache"),
    [("int4", "e4m3", "int4"), ("fp8", "bf16", "int4"), ("bf16", "bf16", "bf16")],
)
def test_the_reference_backend_agrees_on_both_devices(
    name: str, decode_mode: str, prefill_mode: str, kv_cache: str, odd_checkpoint: object, tmp_path: Path
) -> None:
    artifact = converted(odd_checkpoint(name), tmp_path / "out", "cuda", **{"calibration.enabled": False})  # type: ignore[operator]
    prompt = torch.randint(17, 1024, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits: list[Tensor] = []
    for device in ("cpu", "cuda"):
        backend = reference.load(
            artifact, device=device, decode_mode=decode_mode, prefill_mode=prefill_mode, kv_cache=kv_cache
        )
        request = backend.open_request(50)
        steps = [backend.prefill([(request, prompt)])]
        steps += [backend.decode([(request, token)]) for token in (20, 21, 22)]
        logits.append(torch.cat(steps).cpu())
    difference = (logits[0] - logits[1]).norm() / logits[0].norm()
    # FP32 sums in another order move a few BF16, E4M3 and INT4 roundings.
    assert difference < 2e-2
    assert bool(logits[1].isfinite().all())


def test_the_fp8_simulation_agrees_on_the_card(tmp_path: Path) -> None:
    shape = CheckpointShape(hidden=256, intermediate=512, heads=4, kv_heads=2)
    checkpoint = write_checkpoint(tmp_path / "model", shape)
    artifact = converted(checkpoint, tmp_path / "out", "cuda", **{"calibration.windows": 2})
    backend = reference.load(artifact, device="cuda", scale_mode="frozen")
    ids = torch.randint(shape.vocab_size, (300,), generator=torch.Generator().manual_seed(2))
    got = backend.model.logits(
        backend.model.forward(backend.model.new_cache(300), ids, "prefill", backend.new_scales())
    )
    tensors = make_tensors(shape)
    sizes = Sizes(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, 10000.0, shape.rms_norm_eps)
    scales = torch.stack([artifact.tensor(f"layers.{i}.activation_scale") for i in range(shape.layers)])
    expected, _ = simulate_prefill(tensors, quantize_weights(tensors, sizes), sizes, scales, ids)
    assert (got.cpu() - expected).norm() / expected.norm() < 2e-2
