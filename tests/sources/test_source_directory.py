"""Checkpoint directories: what is read, what is refused, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fut_convert import plan_conversion
from fut_convert.errors import CheckpointError, ConvertError, UnsupportedModelError
from fut_convert.sources import Source, open_source
from fut_convert.sources.directory import DirectorySource
from odd_checkpoints import ODD_CHECKPOINTS
from synthetic_checkpoint import CheckpointShape, make_tensors, write_checkpoint

WEIGHTS = "model.safetensors"
LAYER = "model.layers.0"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Change = Callable[[dict[str, Tensor]], None]


def checkpoint(directory: Path, change: Change | None = None, **sizes: Any) -> Path:
    return write_checkpoint(directory, CheckpointShape(**{"layers": 1, **sizes}), change)


def errors_of(directory: Path) -> list[str]:
    with open_source(str(directory)) as source:
        return [str(p) for p in source.check() if p.severity == "error"]


def warnings_of(source: Source) -> list[str]:
    return [str(p) for p in source.check() if p.severity == "warning"]


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def rename_tensor(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change


@pytest.mark.parametrize("name", sorted(ODD_CHECKPOINTS))
def test_odd_checkpoint_opens_and_checks_clean(name: str, odd_checkpoint: Callable[[str], Path]) -> None:
    directory = odd_checkpoint(name)
    shape = ODD_CHECKPOINTS[name].shape
    with open_source(str(directory)) as source:
        assert source.check() == []
        spec = source.spec
        assert (spec.hidden_size, spec.intermediate_size) == (shape.hidden, shape.intermediate)
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)
        assert spec.tie_word_embeddings == shape.tied
        assert spec.eos_token_ids == (2, 0)
        assert set(source.tensors) == set(shape.tensor_shapes())
        assert source.dtype == "BF16"
        assert source.total_bytes == 2 * sum(torch.Size(s).numel() for s in shape.tensor_shapes().values())
        assert source.identity == {"kind": "directory", "name": name}


@pytest.mark.parametrize("layout", [{}, {"shards": 3}, {"pickled": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, layout: dict[str, Any], dtype: torch.dtype) -> None:
    shape = CheckpointShape(layers=1, dtype=dtype, **layout)
    directory = write_checkpoint(tmp_path / "model", shape)
    with open_source(str(directory)) as source:
        for name, expected in make_tensors(shape).items():
            loaded = source.load(name)
            assert loaded.dtype == dtype
            assert torch.equal(loaded, expected)
            assert loaded.is_contiguous()
            middle = source.load_rows(name, 3, 11)
            assert torch.equal(middle, expected[3:11])
            assert source.load_rows(name, 5, 5).shape == (0, *expected.shape[1:])
        with pytest.raises(ValueError, match="lie outside"):
            source.load_rows(EMBEDDING, 0, 385)
        with pytest.raises(CheckpointError, match=r"model: no tensor model\.layers\.9"):
            source.load("model.layers.9")


def test_loaded_tensor_is_a_copy(tmp_path: Path) -> None:
    with open_source(str(checkpoint(tmp_path / "model", pickled=True))) as source:
        source.load(EMBEDDING).zero_()
        assert source.load(EMBEDDING).any()


def test_sharded_pickles(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", pickled=True)
    tensors = torch.load(directory / "pytorch_model.bin", weights_only=True)
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[:5], names[5:]), 1):
        file = f"pytorch_model-{i:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "pytorch_model.bin").unlink()
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_source(str(directory)) as source:
        assert source.check() == []
        assert all(torch.equal(source.load(name), tensors[name]) for name in names)


def test_pickle_older_than_the_zip_format(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", pickled=True)
    tensors = torch.load(directory / "pytorch_model.bin", weights_only=True)
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with open_source(str(directory)) as source:
        assert torch.equal(source.load(HEAD), tensors[HEAD])


def test_mapping_of_a_pickle_is_dropped_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fut_convert.sources.torch_file._REMAP_BYTES", 1)
    with open_source(str(checkpoint(tmp_path / "model", pickled=True))) as source:
        assert torch.equal(source.load(HEAD), source.load(HEAD))


def test_only_indexed_files_are_read(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", shards=2)
    (directory / "consolidated.safetensors").write_bytes(b"not even safetensors")
    with open_source(str(directory)) as source:
        assert source.check() == []
        assert {info.file for info in source.tensors.values()} == {
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        }


def test_names_in_an_index_may_be_spelled_in_several_ways(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", shards=2)
    index = directory / "model.safetensors.index.json"
    files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    (directory / "weights").mkdir()
    for name in set(files.values()):
        (directory / name).rename(directory / "weights" / name)
    spelled = {
        tensor: f"./weights/{file}" if number % 2 else f"weights/./{file}"
        for number, (tensor, file) in enumerate(files.items())
    }
    index.write_text(json.dumps({"weight_map": spelled}))
    with open_source(str(directory)) as source:
        assert source.check() == []
        assert source.weight_files == sorted({f"weights/{file}" for file in files.values()})


@pytest.mark.parametrize("layout", ["index", "file"])
def test_no_tensors_at_all(layout: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", shards=1 + (layout == "index"))
    if layout == "index":
        (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    else:
        save_file({}, directory / WEIGHTS)
    plan = plan_conversion(str(directory), tmp_path / "out", overrides={"calibration.enabled": False})
    assert len(plan.errors) > 10 and all("is missing; the checkpoint is incomplete" in e for e in plan.errors[:9])


def test_single_file_beside_an_index_is_preferred_and_said(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", shards=2)
    checkpoint(directory)
    with open_source(str(directory)) as source:
        assert any("both model.safetensors and" in text for text in warnings_of(source))
        assert {info.file for info in source.tensors.values()} == {WEIGHTS}


# --- what the files say against the config --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rename_tensor(f"{LAYER}.mlp.up_proj.weight", "x"), f"{LAYER}.mlp.up_proj.weight [192, 128] is missing"),
        (rename_tensor(HEAD, "x"), "tie_word_embeddings is false"),
        (lambda t: t.update({HEAD: t[HEAD][:380]}), "(vocab_size 384, 380 rows in the file)"),
        (lambda t: t.update({f"{LAYER}.mlp.down_proj.weight": torch.ones(128, 64)}), "[128, 64], but the config makes"),
        (lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(2)}), "has no place"),
        (lambda t: t.update({f"{LAYER}.self_attn.q_proj.bias": torch.ones(128)}), "attention_bias"),
        (lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.float64)}), "stored as F64; readable are BF16, F16, F32"),
    ],
)
def test_contradiction_is_named(tmp_path: Path, change: Change, reason: str) -> None:
    found = errors_of(checkpoint(tmp_path / "model", change))
    assert any(reason in text for text in found), found


def test_a_missing_qwen_bias_is_named(tmp_path: Path) -> None:
    drop = rename_tensor(f"{LAYER}.self_attn.k_proj.bias", "x")
    found = errors_of(checkpoint(tmp_path / "model", drop, family="qwen2"))
    assert any(f"{LAYER}.self_attn.k_proj.bias [64] is missing" in text for text in found)


def test_old_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = torch.ones(32)

    assert errors_of(checkpoint(tmp_path / "model", add)) == []


@pytest.mark.parametrize(
    ("suffix", "dtype", "method"),
    [
        (("qweight", "g_idx", "qzeros"), torch.int32, "GPTQ"),
        (("qweight", "qzeros"), torch.int32, "GPTQ or AWQ"),
        (("weight_packed",), torch.int32, "compressed-tensors"),
        (("weight_scale_inv",), torch.float32, "FP8 (block scales)"),
        (("SCB",), torch.float32, "bitsandbytes (8 bits)"),
        (("weight.absmax", "weight.quant_map"), torch.float32, "bitsandbytes (4 bits)"),
        (("weight",), torch.float8_e4m3fn, "FP8"),
    ],
)
def test_quantized_tensors_are_named_once(
    tmp_path: Path, suffix: tuple[str, ...], dtype: torch.dtype, method: str
) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{LAYER}.mlp.up_proj.weight"]
        for part in suffix:
            tensors[f"{LAYER}.mlp.up_proj.{part}"] = torch.zeros(4, 4).to(dtype)

    found = errors_of(checkpoint(tmp_path / "model", quantize))
    assert len(found) == 1
    assert f"quantized already ({method})" in found[0]


# --- tied heads -----------------------------------------------------------------------------------------------------


def test_tied_head_stored_twice_is_accepted_when_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fut_convert.sources.base._COMPARE_ROWS", 100)
    directory = checkpoint(tmp_path / "same", lambda t: t.update({HEAD: t[EMBEDDING].clone()}), tied=True)
    assert errors_of(directory) == []

    def change_last(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1

    found = errors_of(checkpoint(tmp_path / "other", change_last, tied=True))
    assert len(found) == 1 and "differs from model.embed_tokens.weight" in found[0]


def test_no_head_and_a_silent_config_means_tied(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", tied=True)
    edit_config(directory, tie_word_embeddings=...)
    with open_source(str(directory)) as source:
        assert source.spec.tie_word_embeddings
        assert source.check() == []


# --- what else lies in a directory ----------------------------------------------------------------------------------


def test_side_files_are_everything_but_weights_and_code(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    kept = ["LICENSE.txt", "README.md", "chat_template.jinja", "merges.txt", "special_tokens_map.json"]
    kept += ["tokenizer.model", "vocab.json", "preprocessor_config.json"]
    for name in [*kept, "modeling_x.py", "optimizer.pt", "model.onnx", "training_args.bin", ".gitattributes"]:
        (directory / name).write_text(name)
    for folder in ("onnx", "original", ".cache", "additional_chat_templates"):
        (directory / folder).mkdir()
        (directory / folder / "rag.jinja").write_text("x")
    with open_source(str(directory)) as source:
        files = source.side_files()
    expected = {*kept, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert [name for name, _ in files] == sorted({*expected, "additional_chat_templates/rag.jinja"})
    assert all(path == directory / name for name, path in files)


def test_absent_companions_are_named(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).unlink()
    (directory / "tokenizer.model").touch()
    edit_config(directory, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    with open_source(str(directory)) as source:
        found = warnings_of(source)
    assert any("no tokenizer.json (only tokenizer.model)" in text for text in found)
    assert any("no tokenizer_config.json" in text for text in found)
    assert any("no generation_config.json" in text for text in found)
    assert any("neither executed nor copied" in text for text in found)


def _touch(*names: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        for name in names:
            (directory / name).write_text("{}")

    return make


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (_touch(), CheckpointError, "no config.json"),
        (_touch("params.json", "consolidated.00.pth"), UnsupportedModelError, "Hugging Face version"),
        (_touch("adapter_config.json", "adapter_model.safetensors"), UnsupportedModelError, "LoRA adapter"),
        (_touch("fut_config.json", "config.json"), CheckpointError, "converted artifact already"),
        (_touch("model-Q4_0.gguf"), CheckpointError, "such as model-Q4_0.gguf"),
    ],
)
def test_directory_of_another_kind(
    tmp_path: Path, make: Callable[[Path], None], error: type[ConvertError], reason: str
) -> None:
    make(tmp_path)
    with pytest.raises(error, match=reason):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "contents", "reason"),
    [
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "[]", "holds a list"),
        ("generation_config.json", "{", "generation_config.json: not valid JSON"),
    ],
)
def test_unreadable_json(tmp_path: Path, name: str, contents: str, reason: str) -> None:
    directory = checkpoint(tmp_path / "model")
    (directory / name).write_text(contents)
    with pytest.raises(CheckpointError, match=reason):
        open_source(str(directory))


def test_no_weights(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    (directory / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_source(str(directory))


def test_path_that_is_none(tmp_path: Path) -> None:
    for text in (str(tmp_path / "absent"), "./absent", "a/b/c", "absent.gguf"):
        with pytest.raises(CheckpointError, match="no such file or directory"):
            open_source(text)
    directory = checkpoint(tmp_path / "model")
    with pytest.raises(CheckpointError, match="give the directory"):
        open_source(str(directory / WEIGHTS))
    with pytest.raises(CheckpointError, match="no revision"):
        open_source(str(directory), revision="main")


def test_closed_source_says_so(tmp_path: Path) -> None:
    source = DirectorySource(checkpoint(tmp_path / "model"))
    source.close()
    source.close()
    with pytest.raises(CheckpointError, match="already closed"):
        source.load(HEAD)


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    odd = {"a": torch.arange(7, dtype=torch.float32), "b": torch.zeros(3, 5, dtype=torch.int8)}
    save_file({**load_file(directory / WEIGHTS), **odd}, directory / WEIGHTS, metadata={"format": "pt"})
    with open_source(str(directory)) as source:
        assert {name: list(info.shape) for name, info in source.tensors.items()} == {
            name: list(tensor.shape) for name, tensor in load_file(directory / WEIGHTS).items()
        }
        assert torch.equal(source.load("a"), odd["a"])
        with pytest.raises(CheckpointError, match="stored as I8"):
            source.load("b")
