"""Conversions from end to end: every family and option runs, and what goes wrong leaves nothing behind."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fut_convert import convert
from fut_convert.calibration_text import calibration_windows
from fut_convert.errors import CheckpointError, ConvertError
from fut_convert.recipe import CalibrationRecipe
from fut_convert.sources import open_source
from fut_convert.sources.base import Source
from fut_runtime.artifact.hashing import hash_file
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.artifact.writer import ArtifactWriter
from fut_runtime.errors import ArtifactError
from fut_runtime.reference import backend as reference

Make = Callable[..., Path]
#: A conversion in a tenth of a second; what the searches find is the subject of other tests.
QUICK: dict[str, Any] = {
    "calibration.windows": 2, "calibration.window_tokens": 40, "calibration.allow_few_tokens": True,
    "int4.scale_method": "absmax_7",
}  # fmt: skip


def converted(checkpoint: Path, out: Path, **overrides: Any) -> Artifact:
    convert(str(checkpoint), out, overrides={**QUICK, **{k.replace("__", "."): v for k, v in overrides.items()}})
    return Artifact.open(out, verify=True)


def change_tensors(checkpoint: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def logits(artifact: Artifact, **modes: Any) -> Tensor:
    """Of six tokens, three prefilled and three decoded."""
    backend = reference.load(artifact, **modes)
    request = backend.open_request(6)
    rows = [backend.prefill([(request, [5, 6, 7])]), *(backend.decode([(request, token)]) for token in (8, 9, 10))]
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_in_every_format_computes_nearly_the_same(
    family: str, tied: bool, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(family=family, tied=tied)
    artifact = converted(
        checkpoint, tmp_path / "out", weights=["e4m3", "int4", "bf16"], int4__scale_method="weighted_search"
    )
    exact = logits(artifact, decode_mode="bf16", prefill_mode="bf16", kv_cache="bf16", compute="fp32")
    # Twice what these random weights lose, or a little more.
    modes = [
        ({"decode_mode": "bf16", "prefill_mode": "bf16", "kv_cache": "bf16"}, 0.02),
        ({"decode_mode": "fp8", "prefill_mode": "e4m3", "kv_cache": "bf16"}, 0.12),
        ({"decode_mode": "int4", "prefill_mode": "e4m3"}, 0.45),
        ({"decode_mode": "int4", "prefill_mode": "decode"}, 0.45),
    ]
    for mode, tolerance in modes:
        assert (logits(artifact, **mode) - exact).norm() < tolerance * exact.norm(), mode


@pytest.mark.parametrize(
    "options",
    [
        {"weights": ["int4"], "head": "int4"},
        {"weights": ["e4m3"], "head": "e4m3"},
        {"weights": ["bf16"], "head": "bf16"},
        {"int4.gain": "folded", "int4.scale_dtype": "float16", "int4.nibble_order": "mma_m16n8k16_a/1"},
        {"int4.scale_method": "absmax_7.5", "int4.group_size": 32, "calibration.enabled": False},
        {"kv_cache.bits": 16, "activation.margin": 3.0},
        {"kv_cache.rotation": False, "kv_cache.zero_point": False, "head": "e4m3"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_option_runs(options: dict[str, Any], tied: bool, tiny_checkpoint: Make, tmp_path: Path) -> None:
    artifact = converted(tiny_checkpoint(tied=tied), tmp_path / "out", **options)
    formats = set(artifact.manifest.weights["layers.0.qkv"])
    decode = {"int4": "int4", "e4m3": "fp8", "bf16": "bf16"}[next(f for f in ("int4", "e4m3", "bf16") if f in formats)]
    found = logits(artifact, decode_mode=decode, prefill_mode="e4m3" if "e4m3" in formats else "decode")
    assert bool(found.isfinite().all()) and found.std() > 0.1
    for key, value in options.items():
        recorded: Any = artifact.manifest.recipe
        for part in key.split("."):
            recorded = recorded[part]
        assert recorded == value


def test_the_manifests_recipe_makes_the_same_artifact(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    first = converted(checkpoint, tmp_path / "first", head="int4", activation__margin=2.0, int4__scale_method="auto")
    recipe = tmp_path / "any name.yaml"
    recipe.write_text(json.dumps(first.manifest.recipe))
    convert(str(checkpoint), tmp_path / "second", recipe=str(recipe))
    assert Artifact.open(tmp_path / "second").files == first.files


@pytest.mark.parametrize("shards", [{"shards": 3}, {"pickled": True}])
def test_how_the_checkpoint_is_stored_does_not_show(
    shards: dict[str, Any], tiny_checkpoint: Make, tmp_path: Path
) -> None:
    plain = converted(tiny_checkpoint("plain/model"), tmp_path / "plain" / "out")
    other = converted(tiny_checkpoint("other/model", **shards), tmp_path / "other" / "out")
    assert other.files == plain.files


def test_the_size_of_the_shards_does_not_change_the_tensors(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(layers=8)
    one, many = converted(checkpoint, tmp_path / "one"), converted(checkpoint, tmp_path / "many", max_shard_gb=0.001)
    assert len(one.shards) == 1 < len(many.shards)
    for spec in all_tensors(one.manifest):
        assert torch.equal(one.tensor(spec.name).view(torch.uint8), many.tensor(spec.name).view(torch.uint8))


def test_side_files_are_copied_byte_for_byte(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    own = {
        "README.md": b"# The checkpoint's own\r\n",
        "LICENSE": b"\xff\x00 not text",
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
    }
    for name, content in own.items():
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(content)
    for name in ("conversion_log.json", "fut_sealed.json", "training.py", ".hidden"):
        (checkpoint / name).write_text("{}")
    artifact = converted(checkpoint, tmp_path / "out")
    tokenizer = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    # README.md is left to the artifact's own card, which lies outside the sealed set.
    copies = {name: name for name in (*own, *tokenizer)} | {"README.md": "SOURCE_README.md"}
    assert set(artifact.manifest.side_files) == set(copies.values())
    for name, copy in copies.items():
        assert (artifact.path / copy).read_bytes() == (checkpoint / name).read_bytes()
        assert copy in artifact.files
    assert not (artifact.path / "README.md").exists()
    assert "module_error" in json.loads((artifact.path / "conversion_log.json").read_text())


def test_the_report_lies_outside_the_sealed_set(tiny_checkpoint: Make, tmp_path: Path) -> None:
    artifact = converted(tiny_checkpoint(), tmp_path / "out")
    log = artifact.path / "conversion_log.json"
    assert log.name not in artifact.files
    log.write_text("{}")
    assert not verify_artifact(artifact.path).findings
    log.unlink()
    assert not verify_artifact(artifact.path).findings


def test_sealed_files_hold_no_path_and_no_time(tiny_checkpoint: Make, tmp_path: Path) -> None:
    artifact = converted(tiny_checkpoint(), tmp_path / "out")
    for name in ("fut_config.json", "fut_files.json", "fut_sealed.json"):
        text = (artifact.path / name).read_text()
        assert str(tmp_path) not in text and "/" not in artifact.manifest.source["name"]
    assert "seconds" not in (artifact.path / "fut_config.json").read_text()


def spoil(checkpoint: Path, name: str, value: float) -> None:
    change_tensors(checkpoint, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))  # type: ignore[arg-type]


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.v_proj.bias", "model.norm.weight",
        "lm_head.weight",
    ],
)  # fmt: skip
def test_a_weight_that_is_not_a_number_is_named(
    name: str, calibrated: bool, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(family="qwen2")
    spoil(checkpoint, name, float("nan"))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} holds 1 values that are not finite"):
        converted(checkpoint, tmp_path / "out", calibration__enabled=calibrated)
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.name]


def test_an_activation_that_overflows_names_its_site(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    change_tensors(checkpoint, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38))  # type: ignore[arg-type]
    with pytest.raises(ConvertError, match=r"the input of layers\.1\.qkv is not finite.*--no-calibration"):
        converted(checkpoint, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.name]
    converted(checkpoint, tmp_path / "out", calibration__enabled=False)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_an_activation_that_overflows_names_its_window(method: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    settings = CalibrationRecipe(windows=4, window_tokens=40, allow_few_tokens=True)
    with open_source(str(checkpoint)) as source:
        ids = calibration_windows(source, settings).ids
    # A token that only the third window has, at its place there.
    before = set(ids[[0, 1, 3]].flatten().tolist())
    place, token = next((i, int(t)) for i, t in enumerate(ids[2]) if int(t) not in before)

    def spoil_token(tensors: dict[str, Any]) -> None:
        """It alone has something in channel 0, which the MLP multiplies beyond all bounds."""
        embed = tensors["model.embed_tokens.weight"]
        embed[:, 0] = 0
        embed[token, 0] = 1
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][0] = 0
            tensors[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0
        for part in ("gate", "up"):
            tensors[f"model.layers.0.mlp.{part}_proj.weight"][:, 0] = 1e30

    change_tensors(checkpoint, spoil_token)
    where = r"layers\.0\.down.* is not finite in windows? .*3.* of the calibration text"
    if method == "rtn":
        where += f", from its token {place + 1} on"
    with pytest.raises(ConvertError, match=where):
        converted(checkpoint, tmp_path / "out", calibration__windows=4, int4__method=method)


def test_a_scale_beyond_float16_names_its_module(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    spoil(checkpoint, "model.layers.1.self_attn.o_proj.weight", 1e9)
    with pytest.raises(ConvertError, match=r"layers\.1\.o: the largest weight, 9.98.*choose scale_dtype bfloat16"):
        converted(checkpoint, tmp_path / "out", int4__scale_dtype="float16", int4__scale_method="absmax_7")


def failing_after(monkeypatch: pytest.MonkeyPatch, target: Any, method: str, calls: int, error: BaseException) -> None:
    """Let a method work for so many calls, and raise from then on."""
    original, made = getattr(target, method), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        if made[0] > calls:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(target, method, call)


FAILURES: list[tuple[Any, str, int, BaseException]] = [
    (Source, "load_rows", 12, CheckpointError("model.safetensors: cannot be read")),
    (ArtifactWriter, "write_rows", 7, ArtifactError("the disk is full")),
    (ArtifactWriter, "write", 5, RuntimeError("a bug")),
    (ArtifactWriter, "copy_side_file", 1, ArtifactError("tokenizer.json: cannot be read")),
    (ArtifactWriter, "seal", 0, KeyboardInterrupt()),
    (Source, "load_rows", 20, KeyboardInterrupt()),
    (Source, "load_rows", 21, OSError(errno.EIO, "Input/output error")),
]


@pytest.mark.parametrize(("target", "method", "calls", "error"), FAILURES, ids=[f"{f[1]}-{f[2]}" for f in FAILURES])
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_failure_in_the_middle_leaves_nothing_that_passes_for_an_artifact(
    target: Any, method: str, calls: int, error: BaseException, calibrated: bool, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        failing_after(patch, target, method, calls, error)
        with pytest.raises(type(error)):
            converted(checkpoint, out, calibration__enabled=calibrated)
    left = {p.name for p in tmp_path.iterdir()} - {checkpoint.name}
    # Layers that are done are kept for the next run, unless it would fail as well.
    assert left <= (set() if isinstance(error, ConvertError) else {"out.partial"})
    for name in left:
        with pytest.raises(ArtifactError):
            Artifact.open(tmp_path / name)
    converted(checkpoint, out, calibration__enabled=calibrated)
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_named_and_leaves_nothing(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    with pytest.MonkeyPatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        failing_after(patch, __import__("os"), "pwrite", 9, full)
        with pytest.raises(ArtifactError, match="the disk is full"):
            converted(checkpoint, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.name]


def test_an_interrupted_run_is_cleared_by_the_next(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        # What a machine that stops leaves: no clean-up, and no lock held any more.
        patch.setattr(ArtifactWriter, "abort", lambda self: self._staging._release())
        failing_after(patch, ArtifactWriter, "write_rows", 9, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            converted(checkpoint, out)
    partial = tmp_path / "out.partial"
    assert partial.is_dir() and not out.exists()
    with pytest.raises(ArtifactError):
        Artifact.open(partial)
    converted(checkpoint, out)
    assert not partial.exists()


def test_an_existing_artifact_is_replaced_only_on_request_and_only_by_a_whole_one(
    tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    old = converted(checkpoint, out)
    with pytest.raises(ConvertError, match="exists already"):
        convert(str(checkpoint), out, overrides=QUICK)
    with pytest.MonkeyPatch.context() as patch:
        failing_after(patch, Source, "load_rows", 20, CheckpointError("broken"))
        with pytest.raises(CheckpointError, match="broken"):
            convert(str(checkpoint), out, overrides={**QUICK, "head": "int4"}, overwrite=True)
    assert Artifact.open(out, verify=True).files == old.files
    convert(str(checkpoint), out, overrides={**QUICK, "head": "int4"}, overwrite=True)
    assert Artifact.open(out, verify=True).manifest.head == "int4"
    assert sorted(p.name for p in tmp_path.iterdir()) == [checkpoint.name, "out"]


def test_a_second_conversion_into_one_place_is_refused(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"

    def second(done: int, total: int, what: str) -> None:
        with pytest.raises(ArtifactError, match="is being written by another process"):
            convert(str(checkpoint), out, overrides=QUICK)

    convert(str(checkpoint), out, overrides={**QUICK, "calibration.enabled": False}, progress=second)
    Artifact.open(out, verify=True)


@pytest.mark.reports
def test_progress_counts_to_the_end(tiny_checkpoint: Make, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    plans: list[Any] = []
    result = convert(
        str(tiny_checkpoint(layers=3)), tmp_path / "out", overrides=QUICK, on_plan=plans.append,
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    converted, measured = seen[:6], seen[6:]
    assert [s[0] for s in converted] == list(range(6)) and {s[1] for s in converted} == {5}
    assert converted[1][2] == "layer 1 of 3" and converted[-1][2] == "sealing"
    assert [s[:2] for s in measured] == [(1, 3), (2, 3), (3, 3)] and measured[0][2] == "measuring layer 1 of 3"
    assert plans == [result.plan]


def test_without_a_tokenizer_only_calibration_is_impossible(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match="convert with --no-calibration"):
        converted(checkpoint, tmp_path / "out")
    artifact = converted(checkpoint, tmp_path / "out", calibration__enabled=False)
    assert "tokenizer.json" not in artifact.manifest.side_files
    report = json.loads((artifact.path / "conversion_log.json").read_text())
    assert any("no tokenizer.json" in warning for warning in report["warnings"])


def test_a_checkpoint_is_only_read(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    before = {p: hash_file(p) for p in checkpoint.rglob("*")}
    converted(checkpoint, checkpoint / "out")
    assert {p: hash_file(p) for p in checkpoint.rglob("*") if p.is_file() and "out" not in p.parts} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(tiny_checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="PyTorch sees no CUDA device here; use --device cpu"):
        convert(str(tiny_checkpoint()), tmp_path / "out", device="cuda")
