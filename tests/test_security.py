"""What must hold of files and servers that mean harm, where no single reader's tests are the place for it.

Elsewhere: pickles, links and names that lead out of a checkpoint (`sources/test_source_damage.py`), of an artifact
(`test_reader.py`, `test_writer.py`), of the Hub (`hub/test_fetch.py`, `hub/test_checkpoint_faults.py`); sizes in
headers (`sources/test_source_damage.py`, `sources/test_source_gguf_refusals.py`, `test_shards.py`); YAML
(`convert/test_recipe.py`); chat templates (`test_chat.py`); secrets among files to upload (`hub/test_upload.py`).
"""

from __future__ import annotations

import ast
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from fut_convert.cli import main
from fut_convert.errors import CheckpointError
from fut_convert.pipeline import convert
from fut_convert.sources import open_source
from fut_runtime.artifact.seal import read_small
from fut_runtime.artifact.shards import MAX_HEADER_BYTES, read_header
from fut_runtime.errors import ArtifactError
from repository import REPOSITORY
from sources.gguf_models import write_gguf
from synthetic_checkpoint import CheckpointShape, write_checkpoint

SHAPE = CheckpointShape(layers=1)
SOURCES = sorted(path for folder in ("fut_convert", "fut_runtime") for path in (REPOSITORY / folder).rglob("*.py"))

#: Functions that run what they are given, or make objects of any kind from it.
_FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads"),
    *("pickle.Unpickler", "shelve.open", "joblib.load", "dill.loads", "yaml.unsafe_load", "yaml.full_load"),
    *("torch.jit.load", "torch.hub.load", "runpy.run_path", "zipfile.ZipFile", "tarfile.open", "shutil.unpack_archive"),
}


#: What processes of one conversion send each other through a pipe of their own.
_ALLOWED = {"fut_convert/child_process.py": {"pickle.loads(connection.recv_bytes())"}}


def violations(source: str) -> Iterator[str]:
    """Calls in a module that may run code which comes with a file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        wanted = {"torch.load": ("weights_only", "True"), "np.load": ("allow_pickle", "False")}.get(name)
        if (
            name in _FORBIDDEN
            or (wanted is not None and options.get(wanted[0]) != wanted[1])
            or (name == "yaml.load" and options.get("Loader") not in ("yaml.SafeLoader", "_PlainYaml"))
            or options.get("trust_remote_code", "False") != "False"
            or options.get("shell", "False") != "False"
        ):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_module_can_run_what_a_file_brings(path: Path) -> None:
    allowed = _ALLOWED.get(path.relative_to(REPOSITORY).as_posix(), set())
    assert set(violations(path.read_text(encoding="utf-8"))) == allowed


@pytest.mark.parametrize(
    "source",
    [
        *("eval(x)", "os.system(x)", "pickle.loads(x)", "torch.load(x)", "torch.load(x, weights_only=False)"),
        *("yaml.load(x)", "yaml.load(x, Loader=yaml.Loader)", "f(x, trust_remote_code=True)", "run(x, shell=True)"),
        *("np.load(x)", "zipfile.ZipFile(x).extractall()"),
    ],
)
def test_the_check_of_modules_sees(source: str) -> None:
    assert list(violations(source))


def test_code_in_a_checkpoint_is_neither_run_nor_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path / "model", SHAPE)
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.Model", "AutoConfig": "configuration_x.Config"}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "sitecustomize.py"):
        (directory / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(directory)
    result = convert(str(directory), tmp_path / "artifact", recipe="rtn", overrides={"calibration.enabled": False})
    assert not (tmp_path / "executed").exists()
    assert result.path.is_dir() and not list(result.path.rglob("*.py"))


@pytest.mark.parametrize("options", [("--dry-run",), ()])
def test_names_from_files_do_not_steer_the_terminal(options: tuple[str, ...], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", SHAPE)
    (directory / "LICENSE\x1b[2J\r").write_text("not copied")
    quick = ("--no-calibration", "--no-report", "--scale-method", "absmax_7", *options)
    whole = CliRunner().invoke(main, [str(directory), str(tmp_path / "whole"), *quick])
    assert whole.exit_code == 0 and "LICENSE" in whole.output
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "\x1b]0;title\x07\u202e": torch.ones(1)}, directory / "model.safetensors")
    refused = CliRunner().invoke(main, [str(directory), str(tmp_path / "refused"), *quick])
    assert refused.exit_code == 1 and "\\x1b]0;title\\x07\\u202e [1] has no place" in refused.stderr
    for output in (whole.output, whole.stderr, refused.output, refused.stderr):
        assert not set("\x1b\x07\r\u202e") & set(output)


def test_names_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", CheckpointShape(layers=1, pickled=True))
    weights = directory / "pytorch_model.bin"
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    with zipfile.ZipFile(weights, "a") as archive:
        archive.writestr("../../outside", b"x")
        archive.writestr("/tmp/fut-outside", b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"), open_source(str(directory)) as source:
        source.load("model.norm.weight")
    # The same where the archive's own names lead out.
    content = io.BytesIO()
    torch.save({"a": torch.ones(2)}, content)
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(weights, "w") as new:
        for entry in old.namelist():
            new.writestr(f"../../{entry}", old.read(entry))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"), open_source(str(directory)) as source:
        source.load("a")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not Path("/tmp/fut-outside").exists()


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/b", "..", "a.b"])
def test_template_names_of_a_gguf_lead_nowhere(tmp_path: Path, name: str) -> None:
    metadata = {f"tokenizer.chat_template.{name}": "bad", "tokenizer.chat_template.tool_use": "good"}
    with open_source(str(write_gguf(tmp_path / "model.gguf", SHAPE, metadata=metadata))) as source:
        names = [name for name, _ in source.side_files()]
    assert [n for n in names if n.endswith(".jinja")] == ["additional_chat_templates/tool_use.jinja"]


def test_sizes_are_bounded_before_an_artifacts_files_are_read(tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00001.safetensors"
    with shard.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES * 2)  # sparse
    with pytest.raises(ArtifactError, match=f"header length {MAX_HEADER_BYTES + 1} in a file of"):
        read_header(shard)
    with (tmp_path / "fut_config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match=f"{1 << 40} bytes, expected less than"):
        read_small(tmp_path, "fut_config.json")


def test_sizes_are_bounded_before_a_checkpoints_files_are_read(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", CheckpointShape(layers=1, shards=2))
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        content = (directory / name).read_bytes()
        with (directory / name).open("r+b") as file:
            file.truncate(1 << 40)
        with pytest.raises(CheckpointError, match=rf"{name}: has {1 << 40} bytes, expected at most"):
            open_source(str(directory))
        (directory / name).write_bytes(content)
