"""Artifacts through the engine and the command line, with the reference backend; and where artifacts come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fut_runtime import Engine, SamplingParams, available_backends
from fut_runtime.backend import ReportsActivations
from fut_runtime.cli import main
from fut_runtime.errors import ArtifactError, UnsupportedError
from fut_runtime.resolve import resolve_artifact
from small_tokenizers import CHATML, byte_level, byte_level_raw
from tiny_artifact import MODEL, make_manifest, write_artifact

TOKENIZER = byte_level()
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny artifact of random weights with a tokenizer and a chat template."""
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    side_files = {
        "tokenizer.json": byte_level_raw().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    model = replace(MODEL, vocab_size=TOKENIZER.vocab_size + 5)  # padded, as many models are
    out = tmp_path_factory.mktemp("artifact") / "tiny"
    return write_artifact(out, make_manifest(model, formats=("e4m3", "int4", "bf16")), side_files=side_files)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


MODES: list[dict[str, str]] = [
    {},
    {"decode_mode": "fp8", "prefill_mode": "bf16"},
    {"decode_mode": "bf16", "prefill_mode": "decode", "kv_cache": "bf16", "compute": "fp32"},
    {"scale_mode": "frozen"},
]


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_a_prompt_gets_the_same_alone_and_in_a_batch_with_longer_ones(artifact: Path, modes: dict[str, str]) -> None:
    prompts = ["hello", "hello world " * 5, [5] * 40, [{"role": "user", "content": "hello"}]]
    with Engine(artifact, backend="reference", device="cpu", prefill_chunk=16, **modes) as engine:  # type: ignore[arg-type]
        together = engine.generate(prompts, PARAMS)
        for prompt, completion in zip(prompts, together, strict=True):
            alone = engine.generate([prompt], PARAMS)[0]
            assert alone.token_ids == completion.token_ids
            assert alone.logprobs == completion.logprobs  # bit by bit
            assert len(completion.token_ids) == 6


def test_a_conversation_over_an_artifact(artifact: Path) -> None:
    with Engine(str(artifact), verify=True, device="cpu") as engine, engine.conversation("brief") as conversation:
        assert engine.manifest is not None and engine.path == artifact
        assert engine.eos_ids == {2, TOKENIZER.eos_token_id}
        for text in ("hello", "more"):
            events = list(conversation.say(text, SamplingParams(max_new_tokens=3)))
            assert events[-1].completion is not None
        assert len(conversation.messages) == 4
        assert isinstance(engine.backend, ReportsActivations)


def test_generate_from_the_command_line(artifact: Path) -> None:
    args = ["generate", str(artifact), "--prompt", "hello", "--max-new-tokens", "4", "--device", "cpu", "--json"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["completion_tokens"] <= 4
    result = CliRunner().invoke(main, [*args, "--backend", "cuda"])
    assert result.exit_code == 1 and "the cuda backend does not work here: " in result.stderr


def test_info_says_what_works_here_and_why_not() -> None:
    statuses = {s.name: s for s in available_backends()}
    assert statuses["reference"].available
    reasons = ("built without CUDA", "sees no CUDA device", "need a Hopper card", "has no CUDA library")
    assert statuses["cuda"].available or any(reason in statuses["cuda"].detail for reason in reasons)
    result = CliRunner().invoke(main, ["info", "--json"])
    assert [b["name"] for b in json.loads(result.stdout)["backends"]] == ["cuda", "reference"]
    text = CliRunner().invoke(main, ["info"], terminal_width=200).stdout
    assert "reference" in text and "yes" in text


def test_info_describes_an_artifact(artifact: Path, tmp_path: Path) -> None:
    probe = tmp_path / "probe.txt"
    probe.write_text("hello world " * 30)
    result = CliRunner().invoke(main, ["info", str(artifact), "--probe", str(probe), "--json"])
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["artifact"]["layers"] == 2 and facts["artifact"]["weights"]["qkv"]["int4"]["method"] == "rtn"
    assert set(facts["artifact"]["activation_scales"]["sites"]) == {"qkv", "o", "gate_up", "down"}
    assert facts["tokenizer"]["chat_template"] is True
    assert facts["activations"]["tokens"] == 127  # the model's 128 positions, less the one to generate
    assert len(facts["activations"]["saturated"]) == 2
    text = CliRunner().invoke(main, ["info", str(artifact), "--probe", str(probe)]).stdout
    assert "chat template" in text and "saturated" in text and "not calibrated" in text
    assert CliRunner().invoke(main, ["info", "--probe", str(probe)]).exit_code == 2


def test_modes_the_artifact_has_no_weights_for_are_refused(tmp_path: Path) -> None:
    out = write_artifact(tmp_path / "tiny", make_manifest(formats=("e4m3", "int4")))
    with pytest.raises(UnsupportedError, match="bf16"):
        Engine(out, decode_mode="bf16", device="cpu")
    with pytest.raises(UnsupportedError, match="expected auto, cuda or reference"):
        Engine(out, backend="tpu")
    with pytest.raises(UnsupportedError, match="device is 'gpu'"):
        Engine(out, device="gpu")
    with pytest.raises(UnsupportedError, match="but PyTorch sees"):
        Engine(out, device="cuda:99")
    with pytest.raises(UnsupportedError, match="'meta', which PyTorch cannot use here"):
        Engine(out, device="meta")
    with Engine(out, device="cpu") as engine:
        assert engine.tokenizer is None
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))[0].token_ids) <= 2


def test_what_is_no_artifact_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_text("")
    for name, message in (
        ("checkpoint", "is a checkpoint, not an artifact; convert it first: fut-convert "),
        ("empty", r"is not an artifact: it has no fut_config\.json"),
        ("model.gguf", "is a file, expected the directory of an artifact; convert it first"),
        ("none", "no such directory"),
    ):
        with pytest.raises(ArtifactError, match=message):
            resolve_artifact(str(tmp_path / name))
    with pytest.raises(ArtifactError, match="a Hub id has the form owner/name"):
        resolve_artifact("llama")
    with pytest.raises(ArtifactError, match="the name of the artifact is empty"):
        resolve_artifact("")
    with pytest.raises(ArtifactError, match="File name too long"):
        resolve_artifact("x" * 5000)


def test_a_directory_has_no_revision(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match="is a local directory, which has no revision 'v1'"):
        resolve_artifact(artifact, "v1")


def test_each_mode_names_those_that_would_work(tmp_path: Path) -> None:
    int4 = write_artifact(tmp_path / "int4", make_manifest(formats=("int4",)))
    with pytest.raises(UnsupportedError, match="choose prefill_mode decode, or convert again"):
        Engine(int4, device="cpu")
    bf16 = write_artifact(tmp_path / "bf16", make_manifest(formats=("bf16",)))
    with pytest.raises(UnsupportedError, match="choose decode_mode bf16, or"):
        Engine(bf16, device="cpu")
    with pytest.raises(UnsupportedError, match="choose prefill_mode bf16 or decode, or"):
        Engine(bf16, device="cpu", decode_mode="bf16")
    Engine(bf16, device="cpu", decode_mode="bf16", prefill_mode="bf16").close()


def test_a_hub_id_is_fetched_at_its_revision(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(repo: str, revision: str | None) -> Path:
        asked.append((repo, revision))
        return artifact

    monkeypatch.setattr("fut_runtime.hub.download.fetch_artifact", fetch)
    with Engine("me/model", revision="v1", device="cpu") as engine:
        assert engine.path == artifact
    assert asked == [("me/model", "v1")]
