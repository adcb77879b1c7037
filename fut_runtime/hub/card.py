"""The model card of an artifact: `README.md` on the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fut_runtime.artifact.json_text import parse_object
from fut_runtime.artifact.paths import REPORT_DATA_FILE, REPORT_FILE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.report import size_text
from fut_runtime.artifact.seal import read_marker, read_small
from fut_runtime.errors import ArtifactError
from fut_runtime.hub.bench_table import bench_lines, read_bench
from fut_runtime.hub.source_card import carried_metadata, is_license
from fut_runtime.markdown_table import FORMAT_NAMES, accuracy_lines, path_name, percent, table, text_name
from fut_runtime.resolve import is_hub_id

#: Measurements that lie beside the artifact under this name go into its card.
BENCH_FILE = "bench.jsonl"
LIBRARY = "futransformer"
_ACCURACY_PLOT = "report/accuracy.png"


@dataclass(frozen=True)
class Card:
    """A model card.

    Attributes:
        text: the page, front matter included.
        notes: what could not be said in it, for whoever publishes it, each as one sentence.
    """

    text: str
    notes: tuple[str, ...] = field(default=())


def model_card(
    artifact: Artifact,
    repo: str | None = None,
    *,
    base_model: str | None = None,
    license: str | None = None,
    bench: Path | None = None,
) -> Card:
    """Write the card from the manifest, the report and the measurements beside the artifact, and the source's card.

    Args:
        artifact: the artifact.
        repo: Hub id under which it will be found; its directory when None.
        base_model: Hub id of the model it was made from, where the manifest does not know it.
        license: the Hub's identifier of the licence, where the source's card does not name it.
        bench: file that `fut-run bench decode --json` wrote; `bench.jsonl` beside the artifact when None.

    Raises:
        ArtifactError: `base_model` or `license` has not the form, or the report or measurements cannot be read.
    """
    notes: list[str] = []
    metadata = _metadata(artifact, base_model, license, notes)
    report = _report(artifact, notes)
    if bench is None and (artifact.path / BENCH_FILE).is_file():
        bench = artifact.path / BENCH_FILE
    measured = [] if bench is None else read_bench(bench)
    if bench is not None and not measured:
        notes.append(f"{bench}: holds no lines of fut-run bench decode, so the card has no table of them")
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000)
    sections = (
        _head(artifact, repo, metadata),
        _use(repo or artifact.path.name),
        _quality(artifact, report),
        _speed(measured),
        _making(artifact),
        _licence(metadata),
    )
    body = "\n".join(line for section in map(list, sections) if section for line in (*section, ""))
    return Card(f"---\n{front}---\n\n{body}", tuple(notes))


def _metadata(artifact: Artifact, base: str | None, licence: str | None, notes: list[str]) -> dict[str, Any]:
    """The front matter, in the order in which it is printed."""
    if base is not None and not is_hub_id(base):
        raise ArtifactError(f"base model {base!r} is no Hub id, expected owner/name")
    if licence is not None and not is_license(licence):
        raise ArtifactError(f"licence {licence!r} is no identifier of the Hub's, expected one as apache-2.0 or other")
    source = artifact.manifest.source
    known = source.get("id") if source.get("kind") == "hub" else None
    base = base or (known if isinstance(known, str) and is_hub_id(known) else None)
    carried = carried_metadata(artifact)
    if licence is not None:
        kept = carried if licence == "other" else {k: v for k, v in carried.items() if not k.startswith("license_")}
        carried = {**kept, "license": licence}
    if base is None:
        notes.append("the card names no base model: the artifact was made from files; name it with --base-model")
    if "license" not in carried:
        notes.append("the card names no licence: the source's card has none; name it with --license")
    _absolute_link(carried, artifact, base)
    order = ("license", "license_name", "license_link", "language")
    metadata: dict[str, Any] = {key: carried[key] for key in order if key in carried}
    if base is not None:
        metadata |= {"base_model": base, "base_model_relation": "quantized"}
    metadata |= {"library_name": LIBRARY, "pipeline_tag": "text-generation", "tags": _tags(artifact)}
    return metadata


def _absolute_link(carried: dict[str, Any], artifact: Artifact, base: str | None) -> None:
    """Let a link to a file that the artifact does not have lead to the source's; without one, leave it out."""
    link = carried.get("license_link")
    if link is None or "://" in str(link) or link in artifact.files:
        return
    if base is None or not isinstance(link, str):
        del carried["license_link"]
    else:
        carried["license_link"] = f"https://huggingface.co/{base}/blob/main/{link.lstrip('/')}"


def _tags(artifact: Artifact) -> list[str]:
    family = re.sub(r"ForCausalLM$", "", artifact.manifest.model.architecture).lower()
    formats = {name for stored in artifact.manifest.weights.values() for name in stored}
    kinds = [tag for name, tag in (("int4", "int4"), ("e4m3", "fp8")) if name in formats]
    return [LIBRARY, family, *(["quantized"] if kinds else []), *kinds, "hopper"]


def _report(artifact: Artifact, notes: list[str]) -> dict[str, Any] | None:
    """`report.json`, if there is one and it is about this artifact."""
    if not (artifact.path / REPORT_DATA_FILE).is_file():
        return None
    data = parse_object(read_small(artifact.path, REPORT_DATA_FILE), str(artifact.path / REPORT_DATA_FILE))
    if data.get("files_sha256") != read_marker(artifact.path):
        notes.append(f"{REPORT_DATA_FILE} is about another artifact (it names other hashes), so the card leaves it out")
        return None
    return data


def _head(artifact: Artifact, repo: str | None, metadata: dict[str, Any]) -> Iterator[str]:
    manifest = artifact.manifest
    model, cache = manifest.model, manifest.kv_cache
    yield f"# {_text((repo or artifact.path.name).rpartition('/')[2])}"
    yield ""
    base = metadata.get("base_model")
    commit = manifest.source.get("commit")
    origin = f"[{base}](https://huggingface.co/{base})" if base else f"`{_code(_source_name(artifact))}`"
    pinned = f" at commit `{commit[:12]}`" if base and isinstance(commit, str) else ""
    yield (
        f"{origin}{pinned}, packed by FuTransformer for Hopper GPUs (H100, H200). This is a FuTransformer artifact, "
        f"format {manifest.format_version}, and no checkpoint that transformers can load."
    )
    yield ""
    rotated = "rotated, V by its weights" if cache.v_folded else "rotated"
    detail = [w for w, on in ((rotated, cache.rotation), ("with zero points", cache.zero_point)) if on]
    calibration = manifest.calibration
    tied = "" if "head" in manifest.weights else ", the embedding's"
    rows = [
        ("model", f"{model.architecture}, {model.num_layers} layers, {model.max_position_embeddings:,} positions"),
        ("weights", "; ".join(_stored(artifact))),
        ("head", FORMAT_NAMES[manifest.head] + tied),
        ("KV cache", "INT4" + (f", {' and '.join(detail)}" if detail else "") if cache.bits == 4 else "BF16"),
        ("calibration", "none" if calibration is None else _calibration(calibration)),
        ("size", size_text(sum(file.size for file in artifact.files.values()))),
    ]
    yield from table(("", ""), rows, align="ll")


def _stored(artifact: Artifact) -> list[str]:
    """How the layers' matrices are stored: every format once, with its methods and groups."""
    methods: dict[str, set[str]] = {}
    groups: dict[str, set[int]] = {}
    for name, formats in artifact.manifest.weights.items():
        for stored in formats.values() if name != "head" else ():
            methods.setdefault(stored.format, set()).update([stored.method] if stored.method else [])
            groups.setdefault(stored.format, set()).update([stored.group_size] if stored.group_size else [])
    return [
        FORMAT_NAMES[name]
        + (f" by {' and '.join(sorted(methods[name]))}" if methods[name] else "")
        + (f" in groups of {' and '.join(map(str, sorted(groups[name])))}" if groups[name] else "")
        for name in ("int4", "e4m3", "bf16")
        if name in methods
    ]


def _calibration(record: dict[str, Any]) -> str:
    try:
        return text_name(record)
    except KeyError:  # of another program: the manifest does not say what such a record holds
        return "yes"


def _use(place: str) -> Iterator[str]:
    yield "## How to run it"
    yield ""
    yield from ("```console", f"$ fut-run chat {place}", f"$ fut-run generate {place} --prompt 'Why is the sky blue?'")
    yield from ("```", "", "```python", "from fut_runtime import Engine", "", f'with Engine("{place}") as engine:')
    yield '    print(engine.generate([[{"role": "user", "content": "Why is the sky blue?"}]])[0].text)'
    yield from ("```", "")
    yield (
        "The kernels need a Hopper card; elsewhere the same commands run the reference backend, which is slow and "
        f"rounds alike. `fut-artifact verify {place}` checks the hash of every file."
    )


def _quality(artifact: Artifact, report: dict[str, Any] | None) -> Iterator[str]:
    yield "## Quality"
    yield ""
    if report is None:
        yield "Not measured: the artifact has no report."
        return
    try:
        yield from _measured(artifact, report)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{artifact.path / REPORT_DATA_FILE}: is not as fut-convert writes it ({type(error).__name__}: {error}); "
            "remove it to publish without, or convert again"
        ) from error


def _measured(artifact: Artifact, report: dict[str, Any]) -> Iterator[str]:
    if report["accuracy"]["rows"]:
        yield from accuracy_lines(report["accuracy"])
        if (artifact.path / _ACCURACY_PLOT).is_file():
            yield ""
            yield f"![KL divergence by protocol]({_ACCURACY_PLOT})"
    elif report["depth"]["paths"]:
        yield (
            "No text was scored. Relative RMS error of the residual stream behind the last layer against the "
            f"checkpoint in BF16, on {text_name(report['depth']['text'])}:"
        )
        yield ""
        rows = [(path_name(path), percent(path["end"])) for path in report["depth"]["paths"]]
        yield from table(("path", "error"), rows, align="lr")
    else:
        yield "Not measured on a text."
    fallbacks = len(report["fallbacks"])
    if fallbacks:
        yield ""
        yield f"GPTQ gave way to rounding to nearest in {fallbacks} modules, which the report names."
    if (artifact.path / REPORT_FILE).is_file():
        yield ""
        yield f"[{REPORT_FILE}]({REPORT_FILE}) has the errors of every module and layer."


def _speed(measured: list[dict[str, Any]]) -> Iterator[str]:
    if measured:
        yield "## Speed"
        yield ""
        yield from bench_lines(measured)


def _making(artifact: Artifact) -> Iterator[str]:
    manifest = artifact.manifest
    yield "## How it was made"
    yield ""
    source = " ".join(f"{key}={value}" for key, value in manifest.source.items())
    yield f"From `{_code(source)}`, by"
    yield ""
    yield from table(("tool", "version"), [(_text(k), _text(v)) for k, v in sorted(manifest.tools.items())], align="ll")
    yield ""
    yield "with this recipe, which `fut-convert --recipe FILE` takes:"
    yield ""
    text = yaml.safe_dump(manifest.recipe, sort_keys=False, allow_unicode=True)
    yield from ("<details><summary>recipe</summary>", "", "```yaml", *_fenced(text), "```", "", "</details>")


def _licence(metadata: dict[str, Any]) -> Iterator[str]:
    yield "## Licence"
    yield ""
    if "license" not in metadata:
        yield "That of the model it was made from, which its source does not name in a form that programs read."
        return
    licence = metadata["license"]
    name = metadata.get("license_name") or (licence if isinstance(licence, str) else ", ".join(licence))
    link = metadata.get("license_link")
    named = f"[{_text(name)}]({link})" if isinstance(link, str) and not re.search(r"[\s()<>]", link) else _text(name)
    yield f"{named}, as of the model it was made from: packing changes its storage, not its terms."


def _source_name(artifact: Artifact) -> str:
    source = artifact.manifest.source
    return str(source.get("id") or source.get("name") or source.get("kind") or "a model")


def _text(value: object) -> str:
    """A value from a file as Markdown shows it unchanged, on one line."""
    line = " ".join(str(value).split())
    return re.sub(r"([\\*_\[\]<>#&])", r"\\\1", line)


def _code(value: str) -> str:
    """A value from a file between backticks."""
    return " ".join(value.split()).replace("`", "'")


def _fenced(text: str) -> list[str]:
    """Lines that cannot end the block they stand in."""
    return [line.replace("```", "'''") for line in text.splitlines()]
