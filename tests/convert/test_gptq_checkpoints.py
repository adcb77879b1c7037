"""Checkpoints of AutoGPTQ and GPTQModel: codes kept bit for bit, or dequantized, or refused with the reason."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from fut_convert import convert
from fut_convert.cli import main
from fut_convert.conversion import Conversion
from fut_convert.errors import UnsupportedModelError
from fut_convert.quantize.auto_gptq import auto_gptq_problem
from fut_convert.sources import open_source
from fut_runtime.artifact.reader import Artifact
from kept_artifacts import (
    QUICK,
    check_codes_and_scales,
    check_loaded,
    check_logits,
    check_requantized,
    converted,
    errors_of,
    relative,
)
from quantized_checkpoints import (
    Parts,
    Quantized,
    gptq_config,
    gptq_parts,
    matrices_of,
    packed_words,
    random_quantized,
    write_dequantized,
    write_quantized,
)

LAYER = "model.layers.0"


@pytest.mark.parametrize(
    ("stored", "label"),
    [(1, "gptq"), (1, None), (2, "gptq_v2"), (1, "gptq_v2"), (2, "gptq"), (2, None)],
    ids=["v1", "v1_unlabelled", "v2", "v1_labelled_v2", "v2_labelled_v1", "v2_unlabelled"],
)
def test_symmetric_codes_are_kept_bit_for_bit(stored: int, label: str | None, tmp_path: Path) -> None:
    config = gptq_config(64, **({} if label is None else {"checkpoint_format": label}))
    matrices = write_quantized(tmp_path / "model", matrices_of(64), partial(gptq_parts, version=stored), config)
    check_loaded(tmp_path / "model", matrices)
    artifact = converted(tmp_path / "model", tmp_path / "out")
    check_codes_and_scales(artifact, matrices, "packed:gptq")
    assert artifact.manifest.weights["layers.0.qkv"]["int4"].scale_dtype == "float16"
    check_logits(artifact, write_dequantized(tmp_path / "plain", matrices))


def test_layers_are_merged_as_the_architecture_wants(tmp_path: Path) -> None:
    """Four query heads over two KV heads, biases, and an intermediate size whose last tile of 16 rows is split."""
    sizes: dict[str, Any] = {"family": "qwen2", "heads": 4, "kv_heads": 2, "hidden": 256, "intermediate": 224}
    matrices = write_quantized(tmp_path / "model", matrices_of(32), gptq_parts, gptq_config(32), **sizes)
    artifact = converted(tmp_path / "model", tmp_path / "out")
    check_codes_and_scales(artifact, matrices, "packed:gptq")
    check_logits(artifact, write_dequantized(tmp_path / "plain", matrices, **sizes))


@pytest.mark.parametrize("group", [-1, 32, 128, 256])
def test_groups_that_the_artifact_lacks_are_cut(group: int, tmp_path: Path) -> None:
    """Groups of 256, groups over the whole input, and a last group that is not full: no weight changes."""
    sizes: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 320}

    def make(name: str, shape: tuple[int, int]) -> Quantized:
        return random_quantized(name, shape, shape[1] if group == -1 else group, scale_dtype=torch.bfloat16)

    matrices = write_quantized(tmp_path / "model", make, gptq_parts, gptq_config(group), **sizes)
    check_loaded(tmp_path / "model", matrices)
    artifact = converted(tmp_path / "model", tmp_path / "out", calibration__enabled=False)
    check_codes_and_scales(artifact, matrices, "packed:gptq")
    sizes_found = {m: artifact.manifest.weights[f"layers.0.{m}"]["int4"].group_size for m in ("qkv", "down")}
    assert sizes_found == {-1: {"qkv": 128, "down": 64}, 32: {"qkv": 32, "down": 32}}.get(
        group, {"qkv": 128, "down": 128}
    )


def test_act_order_with_static_groups_changes_nothing(tmp_path: Path) -> None:
    config = gptq_config(64, desc_act=True, static_groups=True)
    matrices = write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, config)
    check_codes_and_scales(converted(tmp_path / "model", tmp_path / "out"), matrices, "packed:gptq")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("act-order has permuted its columns", {"permuted": True}),
        ("it is asymmetric (zero points other than 8)", {"zeros": "asymmetric"}),
        ("it is asymmetric (zero points other than 8)", {"zeros": "with_zero"}),
        ("its scales are F32", {"scale_dtype": torch.float32}),
    ],
)
def test_what_cannot_be_kept_is_quantized_anew(reason: str, make: dict[str, Any], version: int, tmp_path: Path) -> None:
    config = gptq_config(64, sym=False, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    pack = partial(gptq_parts, version=version)
    check_requantized(tmp_path, reason, matrices_of(64, **make), pack=pack, config=config)


def test_groups_of_16_are_quantized_anew(tmp_path: Path) -> None:
    check_requantized(
        tmp_path, "its groups are of 16 columns", matrices_of(16), pack=gptq_parts, config=gptq_config(16)
    )


@pytest.mark.reports
def test_one_permuted_matrix_leaves_the_other_modules_alone(tmp_path: Path) -> None:
    def make(name: str, shape: tuple[int, int]) -> Quantized:
        return random_quantized(name, shape, 64, permuted=name == f"{LAYER}.self_attn.k_proj.weight")

    matrices = write_quantized(tmp_path / "model", make, gptq_parts, gptq_config(64, desc_act=True))
    result = convert(str(tmp_path / "model"), tmp_path / "out", overrides=QUICK)
    methods = {name: f["int4"].method for name, f in result.plan.manifest.weights.items() if "int4" in f}
    assert methods.pop("layers.0.qkv") == "rtn" and set(methods.values()) == {"packed:gptq"}
    assert result.plan.warnings[0].startswith("layers.0.qkv is dequantized and quantized anew: act-order")
    kept = "7 modules (layers.0.o, layers.0.gate_up, layers.0.down, …) keep the checkpoint's codes and scales"
    assert any(note.startswith(kept) for note in result.plan.notes)
    assert [row.bytes for row in result.plan.rows if (row.module, row.format) == ("qkv", "int4")] == [16896, 17408]
    # What was decided stands in the report too, and what was kept has no error.
    page = (tmp_path / "out" / "report.md").read_text()
    assert kept in page and result.plan.warnings[0] in page
    assert result.module_error["layers.0.o.int4"] == 0 < result.module_error["layers.0.qkv.int4"]
    assert torch.equal(Artifact.open(tmp_path / "out").dequantized("layers.0.o", "int4"),
                       matrices[f"{LAYER}.self_attn.o_proj.weight"].weight())  # fmt: skip


def test_requantize_chooses_new_codes(tmp_path: Path) -> None:
    matrices = write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64))
    artifact = converted(tmp_path / "model", tmp_path / "out", int4__requantize="always", int4__gain="folded")
    spec = artifact.manifest.weights["layers.0.qkv"]["int4"]
    assert (spec.method, spec.gain, spec.group_size) == ("rtn", "folded", 128)
    weight = torch.cat([matrices[f"{LAYER}.self_attn.{p}_proj.weight"].weight() for p in "qkv"])
    folded = weight * artifact.tensor("layers.0.attn_norm")
    found = artifact.dequantized("layers.0.qkv", "int4")
    assert 0.02 < ((found - folded).norm() / folded.norm()).item() < 0.15


def test_the_plan_shows_what_is_kept(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64))
    args = [str(tmp_path / "model"), str(tmp_path / "out"), "--dry-run", "--no-calibration"]
    shown = CliRunner().invoke(main, args)
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.stdout.split())
    assert "the checkpoint holds 14 matrices in GPTQ; all but kept codes is made of their dequantized" in text
    assert "8 modules (layers.0.qkv, layers.0.o, layers.0.gate_up, …) keep the checkpoint's codes and scales" in text
    assert "packed:gptq" in text
    plan = json.loads(CliRunner().invoke(main, [*args, "--requantize", "--json"]).stdout)
    assert plan["notes"][1].endswith("quantized anew: the recipe asks for it (int4.requantize)")
    assert {row["scale_method"] for row in plan["modules"] if row["format"] == "int4"} == {"search"}


@pytest.mark.parametrize("head", ["bf16", "e4m3", "int4"])
def test_a_quantized_head(head: str, tmp_path: Path) -> None:
    matrices = write_quantized(
        tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64, lm_head=True), head=True
    )
    check_loaded(tmp_path / "model", matrices)
    artifact = converted(tmp_path / "model", tmp_path / "out", head=head, calibration__enabled=False)
    weight = matrices["lm_head.weight"].weight()
    spec, found = artifact.manifest.weights["head"][head], artifact.dequantized("head", head)
    expected = weight * artifact.tensor("final_norm") if spec.gain == "folded" else weight
    assert relative(found, expected) <= {"bf16": 2**-8, "e4m3": 0.035, "int4": 0}[head]
    assert spec.method == {"bf16": None, "e4m3": "rtn", "int4": "packed:gptq"}[head]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_an_interrupted_conversion_goes_on_with_the_same_codes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str, shape: tuple[int, int]) -> Quantized:
        return random_quantized(name, shape, 64, zeros="asymmetric" if "o_proj" in name else "symmetric")

    write_quantized(tmp_path / "model", make, gptq_parts, gptq_config(64), shards=3)
    overrides = {**QUICK, "int4.method": method}
    whole = convert(str(tmp_path / "model"), tmp_path / "whole", overrides=overrides, report=False)
    monkeypatch.setattr("fut_convert.resume._SAVING_SHARE", 1e9)
    original = Conversion._layer

    def stop(self: Conversion, index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt
        original(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(Conversion, "_layer", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(str(tmp_path / "model"), tmp_path / "out", overrides=overrides, report=False)
    resumed = convert(str(tmp_path / "model"), tmp_path / "out", overrides=overrides, report=False)
    assert resumed.resumed_layers == 1
    assert Artifact.open(resumed.path, verify=True).files == Artifact.open(whole.path).files


def test_gptq_solves_only_what_is_not_kept(tmp_path: Path) -> None:
    def make(name: str, shape: tuple[int, int]) -> Quantized:
        return random_quantized(name, shape, 64, zeros="asymmetric" if "down" in name else "symmetric")

    write_quantized(tmp_path / "model", make, gptq_parts, gptq_config(64, sym=False))
    overrides = {**QUICK, "int4.method": "gptq"}
    result = convert(str(tmp_path / "model"), tmp_path / "out", overrides=overrides, report=False)
    assert set(result.gptq) == {"layers.0.down", "layers.1.down"}
    assert result.module_error["layers.1.qkv.int4"] == 0 < result.module_error["layers.1.down.int4"]


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_the_config_may_be_in_a_file_of_its_own(file: str, tmp_path: Path) -> None:
    config = {key: value for key, value in gptq_config(64).items() if key != "quant_method"}
    matrices = write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, None, files={file: config})
    check_codes_and_scales(converted(tmp_path / "model", tmp_path / "out"), matrices, "packed:gptq")


def test_parts_of_a_matrix_may_lie_in_two_shards(tmp_path: Path) -> None:
    """Seven shards cut several matrices in two, and the one that holds only scales counts for a resumed conversion."""
    matrices = write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64), shards=7)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    modules = {name.rpartition(".")[0] for name in index if name.endswith("qweight")}
    split = [m for m in modules if index[f"{m}.qweight"] != index[f"{m}.scales"]]
    assert split
    check_codes_and_scales(converted(tmp_path / "model", tmp_path / "out"), matrices, "packed:gptq")
    with open_source(str(tmp_path / "model")) as source:
        assert len(source.weight_files) == 7


def test_pickled_checkpoints_are_read_too(tmp_path: Path) -> None:
    matrices = write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64), pickled=True)
    check_loaded(tmp_path / "model", matrices)


def test_a_config_of_a_quantized_model_beside_plain_weights(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = tiny_checkpoint()
    (checkpoint / "quantize_config.json").write_text(json.dumps(gptq_config(64)))
    with open_source(str(checkpoint)) as source:
        found = source.check()
        assert not source.quantized
    assert [(p.severity, "but none of them is; they are read as they are" in p.message) for p in found] == [
        ("warning", True)
    ]


def test_the_file_may_have_the_name_that_auto_gptq_gives_it(tmp_path: Path) -> None:
    matrices = write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "gptq_model-4bit-64g.safetensors")
    check_loaded(tmp_path / "model", matrices)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ gives each matrix a bias whether the model has one or not."""

    def add_biases(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1])

    write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64), change=add_biases)
    assert errors_of(tmp_path / "model") == []

    def add_one(tensors: dict[str, Tensor]) -> None:
        add_biases(tensors)
        tensors[f"{LAYER}.mlp.up_proj.bias"][5] = 1

    write_quantized(tmp_path / "other", matrices_of(64), gptq_parts, gptq_config(64), change=add_one)
    assert ["mlp.up_proj.bias" in e and "no place" in e for e in errors_of(tmp_path / "other")] == [True]


# --- auto-gptq's own packer ------------------------------------------------------------------------------------------


def auto_gptq_parts(matrix: Quantized) -> Parts:
    """The tensors that auto-gptq 0.7.1 packs."""
    # The package itself imports what current versions of transformers do not have.
    package = importlib.util.find_spec("auto_gptq")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "nn_modules" / "qlinear" / "qlinear_cuda_old.py"
    spec = importlib.util.spec_from_file_location("auto_gptq_qlinear_cuda_old", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linear_class = module.QuantLinear
    rows, cols = matrix.codes.shape
    packed = linear_class(4, cols // matrix.scales.shape[1], cols, rows, False, weight_dtype=torch.float32)
    linear = torch.nn.Linear(cols, rows, bias=False)
    linear.weight.data = matrix.weight()
    packed.pack(linear, matrix.scales.float(), torch.from_numpy(matrix.zeros.astype(np.float32)), None)
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return {**parts, "scales": parts["scales"].to(matrix.scales.dtype)}


@pytest.mark.skipif(auto_gptq_problem() is not None, reason=str(auto_gptq_problem()))
@pytest.mark.parametrize("zeros", ["symmetric", "asymmetric"])
def test_what_auto_gptq_packs_is_read_back(zeros: str, tmp_path: Path) -> None:
    """Its packer agrees with ours, on symmetric codes and on the asymmetric ones that it does not corrupt."""
    matrices = write_quantized(tmp_path / "model", matrices_of(64, zeros=zeros), auto_gptq_parts, gptq_config(64))
    check_loaded(tmp_path / "model", matrices)
    for matrix in matrices.values():
        ours, theirs = gptq_parts(matrix), auto_gptq_parts(matrix)
        assert all(torch.equal(ours[part], theirs[part]) for part in ours)


@pytest.mark.skipif(auto_gptq_problem() is not None, reason=str(auto_gptq_problem()))
def test_zero_points_that_auto_gptq_corrupts_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", matrices_of(64, zeros="with_zero"), auto_gptq_parts, gptq_config(64, sym=False))
    found = errors_of(tmp_path / "model")
    assert len(found) == 14 and "qzeros is corrupt" in found[0] and "has overwritten those after it" in found[0]


# --- refusals --------------------------------------------------------------------------------------------------------


def flooded(matrix: Quantized) -> Parts:
    """Version 1 as a packer writes it that subtracts 1 from a zero point of 0 and does not mask the result."""
    stored = (matrix.zeros.T.astype(np.int64) - 1).astype(np.uint32)
    words = np.zeros((stored.shape[0], stored.shape[1] // 8), np.uint32)
    for i in range(8):
        words |= stored[:, i::8] << np.uint32(4 * i)
    return {**gptq_parts(matrix), "qzeros": torch.from_numpy(words.view(np.int32).copy())}


def test_corrupt_zero_points_are_refused(tmp_path: Path) -> None:
    make = matrices_of(64, zeros="with_zero")
    write_quantized(tmp_path / "model", make, flooded, gptq_config(64, sym=False))
    found = errors_of(tmp_path / "model")
    assert len(found) == 14
    assert found[0].startswith(f"model.safetensors: {LAYER}.mlp.down_proj.qzeros is corrupt")
    assert "stored as -1, has overwritten those after it" in found[0] and "give the original" in found[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_marlin_format": True}, r"order of the Marlin kernel \(is_marlin_format\).*give the checkpoint in GPTQ's"),
        ({"checkpoint_format": "marlin"}, "order of the Marlin kernel"),
        ({"checkpoint_format": "bitblas"}, "checkpoint_format is 'bitblas', readable are gptq, gptq_v2"),
        ({"bits": 8}, "the weights have 8 bits"),
        ({"bits": 3}, "the weights have 3 bits"),
    ],
)
@pytest.mark.parametrize("place", ["config.json", "quantize_config.json"])
def test_other_settings_are_refused(changes: dict[str, Any], message: str, place: str, tmp_path: Path) -> None:
    config = gptq_config(64, **changes)
    inside = config if place == "config.json" else None
    files = {} if inside else {place: config}
    write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, inside, files=files)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        open_source(str(tmp_path / "model"))
    assert place in str(error.value)


def damaged(tmp_path: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> list[str]:
    write_quantized(tmp_path / "model", matrices_of(64), gptq_parts, gptq_config(64, **config), change=change)
    return errors_of(tmp_path / "model")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    found = damaged(tmp_path, lambda tensors: tensors.pop(f"{LAYER}.mlp.up_proj.scales"))  # type: ignore[arg-type]
    assert len(found) == 1
    assert f"{LAYER}.mlp.up_proj has g_idx, qweight, qzeros, but scales of a matrix in GPTQ is missing" in found[0]


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{LAYER}.mlp.up_proj.{part}"]

    assert [f"{LAYER}.mlp.up_proj.weight [320, 128] is missing" in e for e in damaged(tmp_path, drop)] == [True]


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("scales", torch.ones(3, 320), "scales is F32 [3, 320], expected F16 or BF16 or F32 [2, 320]"),
        ("qzeros", torch.ones(2, 320, dtype=torch.int32), "qzeros is I32 [2, 320], expected I32 [2, 40]"),
        ("g_idx", torch.ones(64, dtype=torch.int32), "g_idx is I32 [64], expected I32 or I64 [128]"),
        ("g_idx", torch.full((128,), 2, dtype=torch.int32), "g_idx names groups 2 to 2 of 2"),
        ("qweight", torch.ones(16, 320), "qweight is F32 [16, 320], expected I32 [16, 320]"),
        ("qweight", torch.ones(8, 320, dtype=torch.int32), "scales is F16 [2, 320], expected F16 or BF16 or F32 [1,"),
        ("weight", torch.ones(320, 128), "is there twice, quantized and as"),
    ],
)
def test_parts_that_do_not_fit_are_named(part: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    found = damaged(tmp_path, lambda tensors: tensors.update({f"{LAYER}.mlp.up_proj.{part}": tensor}))
    assert len(found) == 1 and message in found[0] and f"{LAYER}.mlp.up_proj" in found[0]


def test_a_group_size_that_contradicts_the_tensors_is_named(tmp_path: Path) -> None:
    found = damaged(tmp_path, lambda _: None, group_size=32)
    assert len(found) == 14 and "scales is F16 [5, 128], expected F16 or BF16 or F32 [10, 128]" in found[0]


def test_a_matrix_of_another_shape_than_the_config_says_is_named(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        parts = gptq_parts(random_quantized("other", (336, 128), 64))
        tensors |= {f"{LAYER}.mlp.up_proj.{part}": tensor for part, tensor in parts.items()}

    found = damaged(tmp_path, widen)
    assert len(found) == 1 and "mlp.up_proj.weight has shape [336, 128], but the config makes it [320, 128]" in found[0]


def test_scales_that_are_not_finite_are_found_when_they_are_read(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.scales"][0, 3] = float("nan")

    assert damaged(tmp_path, spoil) == []
    with pytest.raises(Exception, match=r"model\.layers\.1\.mlp\.down_proj\.scales holds 1 values that are not finite"):
        converted(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_words_hold_eight_nibbles() -> None:
    """The packer of these tests, by the example of the format's description."""
    word = packed_words(np.array([[1, 2, 3, 4, 5, 6, 7, 8]]))
    assert word.view(torch.uint8).tolist() == [[0x21, 0x43, 0x65, 0x87]]
