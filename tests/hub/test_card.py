"""The model card: front matter that the Hub reads, what was measured, and strangers' text that stays text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from fut_runtime.artifact.cli import main
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.repack import repack_artifact
from fut_runtime.artifact.seal import read_marker
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.errors import ArtifactError
from fut_runtime.hub.card import model_card
from tiny_artifact import make_manifest, write_artifact

HUB_SOURCE = {"kind": "hub", "id": "meta-llama/Llama-3.2-1B", "revision": "main", "commit": "4e20de36" * 5}
SOURCE_CARD = b"""---
license: llama3.2
license_link: LICENSE.txt
language: [en, de]
tags: [pytorch]
extra_gated_prompt: sign here
---
# Llama
"""
BENCH = {
    "bench": "decode", "shape": "tiny", "mode": "int4", "kv_cache_bits": 4, "head": "e4m3", "random_weights": False,
    "sampling": "greedy", "batch": 8, "context": 4096, "layers": 16, "step_ms": 1.25, "host_ms": 1.5, "floor_ms": 1.0,
    "fraction": 0.8, "tokens_per_s": 6400.0, "card": "NVIDIA H200", "futransformer": "0.1.0",
}  # fmt: skip
SCORED = {"perplexity": 12.5, "nll_difference": {"mean": 0.25, "standard_error": 0.0125}, "kl": None, "top1": None}


def make(
    out: Path, card: bytes | None = SOURCE_CARD, source: dict[str, Any] | None = None, name: str = "SOURCE_README.md"
) -> Artifact:
    manifest = replace(make_manifest(), source=source or HUB_SOURCE, recipe={"name": "rtn", "int4": {"gain": "folded"}})
    return Artifact.open(write_artifact(out, manifest, side_files={} if card is None else {name: card}))


def write_report(artifact: Artifact, **changed: Any) -> None:
    contents = {
        "files_sha256": read_marker(artifact.path),
        "accuracy": {
            "text": {"text": "wiki.txt", "windows": 4, "window_tokens": 2048},
            "independence": "It shares nothing.",
            "rows": [{"protocol": "decode", "name": "INT4 | weights", "cache": "INT4", "result": SCORED}],
        },
        "depth": {
            "text": {"text": "builtin", "windows": 2, "window_tokens": 512},
            "paths": [{"protocol": "decode", "name": "INT4 weights", "cache": "INT4", "end": 0.125}],
        },
        "fallbacks": {},
        **changed,
    }
    (artifact.path / "report.json").write_text(json.dumps(contents))
    (artifact.path / "report.md").write_text("# report")


def front_matter(text: str) -> dict[str, Any]:
    start, front, _ = text.split("---\n", 2)
    assert start == ""
    data = yaml.safe_load(front)
    assert isinstance(data, dict)
    return data


def test_front_matter_carries_over_what_the_hub_reads(tmp_path: Path) -> None:
    card = model_card(make(tmp_path / "art"), "me/model")
    assert front_matter(card.text) == {
        "license": "llama3.2",
        "license_link": "https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/LICENSE.txt",
        "language": ["en", "de"],
        "base_model": "meta-llama/Llama-3.2-1B",
        "base_model_relation": "quantized",
        "library_name": "futransformer",
        "pipeline_tag": "text-generation",
        "tags": ["futransformer", "llama", "quantized", "int4", "fp8", "hopper"],
    }
    assert card.notes == ()
    assert "at commit `4e20de364e20`" in card.text and "$ fut-run chat me/model" in card.text
    assert 'Engine("me/model")' in card.text and "INT4 by rtn in groups of 64" in card.text
    assert "gain: folded" in card.text and "the artifact has no report" in card.text


def test_what_the_source_does_not_say_is_asked_for_and_taken(tmp_path: Path) -> None:
    artifact = make(tmp_path / "art", None, {"kind": "gguf", "name": "x.gguf"})
    card = model_card(artifact)
    assert len(card.notes) == 2 and "--base-model" in card.notes[0] and "--license" in card.notes[1]
    assert not {"license", "base_model"} & set(front_matter(card.text))
    told = model_card(artifact, base_model="me/base", license="mit")
    assert told.notes == () and front_matter(told.text)["base_model"] == "me/base"
    assert front_matter(told.text)["license"] == "mit"
    for wrong in ({"base_model": "base"}, {"license": "do what\nyou like"}):
        with pytest.raises(ArtifactError, match="expected"):
            model_card(artifact, **wrong)  # type: ignore[arg-type]


def test_a_gguf_file_names_its_licence(tmp_path: Path) -> None:
    artifact = make(tmp_path / "art", None, {"kind": "gguf", "name": "x.gguf", "license": "apache-2.0"})
    assert front_matter(model_card(artifact).text)["license"] == "apache-2.0"


def test_the_users_licence_replaces_the_sources_with_its_name(tmp_path: Path) -> None:
    card = b"---\nlicense: other\nlicense_name: odd\nlicense_link: https://x.org/l\n---\n"
    artifact = make(tmp_path / "art", card)
    kept = front_matter(model_card(artifact).text)
    assert (kept["license"], kept["license_name"], kept["license_link"]) == ("other", "odd", "https://x.org/l")
    changed = front_matter(model_card(artifact, license="mit").text)
    assert changed["license"] == "mit" and not {"license_name", "license_link"} & set(changed)


@pytest.mark.parametrize(
    "card",
    [
        b"---\nlicense: !!python/object/apply:os.system [touch x]\n---\n",
        b"---\nlicense: {a: b}\nlanguage: 7\n---\n",
        b'---\nlicense: "mit\\n---\\n# Mine"\n---\n',
        b"---\na: &a [x, x]\nb: &b [*a, *a]\nlicense: *b\n---\n",
        b"---\n" + b"[" * 5000 + b"\n---\n",
        b"---\ndate: 2024-99-99\n---\n",
        b"---\nlicense: mit\n",
        b"\xff\xfe\x00",
        b"",
    ],
)
def test_a_hostile_source_card_gives_no_metadata(tmp_path: Path, card: bytes) -> None:
    data = front_matter(model_card(make(tmp_path / "art", card)).text)
    assert not {"license", "language"} & set(data)


def test_names_from_the_source_stay_text(tmp_path: Path) -> None:
    source = {"kind": "gguf", "name": "a`<script>`\n# b"}
    text = model_card(make(tmp_path / "art", None, source)).text
    assert "\n# b" not in text and "`a'<script>' # b`" in text


def test_the_reports_figures_stand_in_the_card(tmp_path: Path) -> None:
    artifact = make(tmp_path / "art")
    write_report(artifact)
    text = model_card(artifact).text
    assert "| decode | INT4 \\| weights | INT4 | 12.500 | 0.2500 ± 0.0125 |  |  |" in text
    assert "`wiki.txt` (4 windows of 2048 tokens)" in text and "[report.md](report.md)" in text
    write_report(artifact, accuracy={"text": None, "independence": "", "rows": []}, fallbacks={"layers.0.o": "x"})
    text = model_card(artifact).text
    assert "| decode: INT4 weights, INT4 cache | 12.50 % |" in text and "in 1 modules" in text
    write_report(artifact, files_sha256="0" * 64)
    card = model_card(artifact)
    assert "has no report" in card.text and "about another artifact" in card.notes[0]


@pytest.mark.parametrize("changed", [{"accuracy": None}, {"accuracy": {"rows": [{}], "text": {}}}, {"depth": []}])
def test_a_damaged_report_is_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    artifact = make(tmp_path / "art")
    write_report(artifact, **{"accuracy": {"rows": []}, **changed})
    with pytest.raises(ArtifactError, match=r"report\.json: is not as fut-convert writes it"):
        model_card(artifact)


def test_measured_speed_stands_in_the_card(tmp_path: Path) -> None:
    artifact = make(tmp_path / "art")
    assert "## Speed" not in model_card(artifact).text
    other = {**BENCH, "random_weights": True, "shape": "8b"}
    lines = [BENCH, {**BENCH, "batch": 1}, other, {"bench": "prefill"}]
    (artifact.path / "bench.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    text = model_card(artifact).text
    assert "Decode steps on NVIDIA H200: this artifact, 16 layers, int4 weights" in text
    assert "| 8 | 4096 | 1.250 | 1.500 | 6400 | 80% |\n| 1 | 4096 |" in text
    assert "random weights of the shape 8b" in text
    file = tmp_path / "mine.jsonl"
    file.write_text('{"bench": "prefill"}\n')
    assert "holds no lines" in model_card(artifact, bench=file).notes[0]
    file.write_text(json.dumps({**BENCH, "step_ms": "fast"}))
    with pytest.raises(ArtifactError, match="line 1: step_ms is 'fast', expected a number"):
        model_card(artifact, bench=file)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    path = make(tmp_path / "art").path
    printed = run("card", path, "--repo", "me/model")
    assert printed.exit_code == 0 and printed.stdout == model_card(Artifact.open(path), "me/model").text
    assert not (path / "README.md").exists()
    assert run("card", path, "--write").exit_code == 0
    assert (path / "README.md").read_text() == model_card(Artifact.open(path)).text
    again = run("card", path, "--write")
    assert again.exit_code == 1 and "--overwrite" in again.stderr
    assert run("card", path, "--write", "--overwrite").exit_code == 0
    assert verify_artifact(path).ok


def test_a_sealed_readme_is_never_overwritten_and_repacking_moves_it(tmp_path: Path) -> None:
    artifact = make(tmp_path / "art", name="README.md")
    result = run("card", artifact.path, "--write", "--overwrite")
    assert result.exit_code == 1 and "is the source's card, sealed; fut-artifact repack" in result.stderr
    assert front_matter(model_card(artifact).text)["license"] == "llama3.2"
    repacked = Artifact.open(repack_artifact(artifact, tmp_path / "new", "linear/1"))
    assert repacked.manifest.side_files == ("SOURCE_README.md",)
    assert repacked.side_file("SOURCE_README.md").read_bytes() == SOURCE_CARD
