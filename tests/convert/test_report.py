"""The quality report: its figures against independent computations, and what it says of what went wrong."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from fut_convert import ConversionResult, convert
from fut_convert.checkpoint_model import model_from_checkpoint, module_gain, module_weight
from fut_convert.evaluation_text import shared_passages
from fut_convert.quantize import gptq
from fut_convert.report.depth import plain_rms, relative_rms
from fut_convert.sources import open_source
from fut_convert.steps import StepClock
from fut_runtime.artifact.cli import main as artifact_main
from fut_runtime.artifact.export import export_checkpoint
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.repack import repack_artifact
from fut_runtime.artifact.seal import read_marker
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.evaluate.perplexity import evaluate_perplexity
from fut_runtime.evaluate.runner import ReferenceRunner
from fut_runtime.reference import backend as reference
from fut_runtime.reference.numerics import EXACT
from fut_runtime.reference.projection import Projection
from fut_runtime.rope import rope_tables
from mapped_pages import mapped_kilobytes
from repository import REPOSITORY
from synthetic_checkpoint import CheckpointShape, write_checkpoint

pytestmark = pytest.mark.reports

Make = Callable[..., Path]
QUICK: dict[str, Any] = {
    "calibration.windows": 4,
    "calibration.window_tokens": 96,
    "calibration.allow_few_tokens": True,
}
GPTQ = {**QUICK, "int4.method": "gptq"}
FORMATS = ["e4m3", "int4", "bf16"]
TEXT = REPOSITORY / "fut_convert" / "data" / "heldout.txt"


def contents(result: ConversionResult) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((result.path / "report.json").read_text(encoding="utf-8"))
    return data


def page(result: ConversionResult) -> str:
    assert result.report == result.path / "report.md"
    return result.report.read_text(encoding="utf-8")


def text(directory: Path, tokens: int = 600) -> Path:
    """The beginning of the held-out text, about so many tokens of the synthetic tokenizer."""
    path = directory / "evaluation.txt"
    path.write_text(TEXT.read_text(encoding="utf-8")[: 2 * tokens], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = CheckpointShape(layers=3, max_positions=128)
    return write_checkpoint(tmp_path_factory.mktemp("report") / "model", shape)


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path) -> ConversionResult:
    """GPTQ in every format, evaluated on a text."""
    directory = checkpoint.parent
    options = {**GPTQ, "weights": FORMATS, "head": "e4m3"}
    return convert(str(checkpoint), directory / "out", overrides=options, evaluate=text(directory), evaluate_windows=3)


def test_depth_is_that_of_whole_models_run_layer_by_layer(checkpoint: Path, evaluated: ConversionResult) -> None:
    """Each window by itself through the engine's own models, and the errors in NumPy-like sums."""
    artifact = Artifact.open(evaluated.path)
    assert evaluated.plan.evaluation is not None
    windows = evaluated.plan.evaluation.ids[:2, :512]
    with open_source(str(checkpoint)) as source:
        truth = model_from_checkpoint(source, numerics=EXACT)
    backends = {
        "decode": reference.load(artifact, decode_mode="int4", prefill_mode="decode"),
        "prefill": reference.load(artifact, decode_mode="fp8", prefill_mode="e4m3", kv_cache="bf16"),
    }
    for path in contents(evaluated)["depth"]["paths"]:
        protocol, model = path["protocol"], backends[path["protocol"]].model
        alone, grown = ([[] for _ in range(3)] for _ in range(2))
        for window in windows:
            tokens = len(window)
            rope = rope_tables(truth.spec, torch.arange(tokens))
            caches = truth.new_cache(tokens), model.new_cache(tokens), model.new_cache(tokens)
            expected = carried = truth.embed[window].float()
            for layer in range(3):
                fresh = model.forward_layer(caches[1], layer, expected, rope, protocol, backends[protocol].new_scales())
                carried = model.forward_layer(
                    caches[2], layer, carried, rope, protocol, backends[protocol].new_scales()
                )
                expected = truth.forward_layer(caches[0], layer, expected, rope, "prefill")
                for target, found in ((alone, fresh), (grown, carried)):
                    target[layer] += [
                        float((f - e).norm() / e.norm()) ** 2 for f, e in zip(found, expected, strict=True)
                    ]
        for key, squares in (("per_layer", alone), ("accumulated", grown)):
            independent = [math.sqrt(sum(layer) / len(layer)) for layer in squares]
            assert path["errors"][key] == pytest.approx(independent, rel=1e-4)
        assert path["middle"] == path["errors"]["accumulated"][1] and path["end"] == path["errors"]["accumulated"][2]
    assert {path["protocol"] for path in contents(evaluated)["depth"]["paths"]} == {"decode", "prefill"}


def test_accuracy_is_that_of_the_evaluation_command(checkpoint: Path, evaluated: ConversionResult) -> None:
    """Rows by the runner behind `fut-run eval perplexity`, which runs whole models window by window."""
    artifact = Artifact.open(evaluated.path)
    assert evaluated.plan.evaluation is not None
    windows = evaluated.plan.evaluation.ids
    with open_source(str(checkpoint)) as source:
        baseline = ReferenceRunner(model_from_checkpoint(source), "prefill")
    modes: dict[tuple[str, str, str], dict[str, str]] = {
        ("prefill", "E4M3 weights and activations", ""): {"prefill_mode": "e4m3"},
        ("decode", "BF16 weights", "BF16"): {"decode_mode": "bf16", "kv_cache": "bf16"},
        ("decode", "E4M3 weights", "BF16"): {"decode_mode": "fp8", "kv_cache": "bf16"},
        ("decode", "INT4 weights", "BF16"): {"kv_cache": "bf16"},
        ("decode", "INT4 weights", "INT4"): {},
        ("serve", "E4M3 prefill, INT4 decode", "INT4"): {"prefill_mode": "e4m3"},
        ("serve", "BF16 prefill, INT4 decode", "INT4"): {"prefill_mode": "bf16"},
    }
    first, *rows = contents(evaluated)["accuracy"]["rows"]
    assert [(row["protocol"], row["name"], row["cache"]) for row in rows] == list(modes)
    assert first["protocol"] is None and first["result"]["kl"] is None
    assert first["result"]["perplexity"] == pytest.approx(evaluate_perplexity(baseline, windows).perplexity, rel=1e-6)
    for row in rows:
        key = (row["protocol"], row["name"], row["cache"])
        loaded = reference.load(artifact, **modes[key])  # type: ignore[arg-type]
        runner = ReferenceRunner(loaded.model, row["protocol"], loaded.new_scales)
        expected = evaluate_perplexity(runner, windows, baseline=baseline)
        assert row["result"]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)
        assert expected.kl is not None and expected.top1 is not None and expected.nll_difference is not None
        assert row["result"]["kl"]["mean"] == pytest.approx(expected.kl.mean, rel=0.01)
        assert row["result"]["kl"]["standard_error"] == pytest.approx(expected.kl.standard_error, rel=0.1)
        assert row["result"]["top1"]["mean"] == pytest.approx(expected.top1.mean, abs=0.01)
        assert row["result"]["nll_difference"]["mean"] == pytest.approx(expected.nll_difference.mean, abs=1e-4)
    assert len(rows) == 7 and "± " in page(evaluated)


@pytest.mark.parametrize("calibrated", [True, False])
def test_errors_of_rounding_are_weighted_by_what_calibration_saw(
    calibrated: bool, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint()
    options = QUICK if calibrated else {"calibration.enabled": False}
    result = convert(str(checkpoint), tmp_path / "out", overrides=options)
    artifact = Artifact.open(result.path)
    moments = second_moments(checkpoint, result) if calibrated else {}
    rows = {(row["name"], row["format"]): row for row in contents(result)["modules"]}
    with open_source(str(checkpoint)) as source:
        for (name, weight_format), row in rows.items():
            if name == "head":
                continue
            _, layer, module = name.split(".")
            weight = module_weight(source.load, int(layer), module).double()
            gain = module_gain(source.load, int(layer), module)
            moment = moments.get(name, torch.ones(weight.shape[1]).double())
            if weight_format == "e4m3" and gain is not None:
                weight = weight * gain.double()
            elif calibrated and gain is not None:
                moment = moment * gain.double().square()
            lost = artifact.dequantized(name, weight_format).double() - weight
            expected = ((lost.square() * moment).sum() / (weight.square() * moment).sum()).sqrt().item()
            assert row["error"] == pytest.approx(expected, rel=0.01)
            assert row["weighting"] == ("second_moment" if calibrated else "none")
            assert row["damping"] is None and row["fallback"] is None
    said = "plain relative error" in page(result)
    assert said is not calibrated


@dataclass(frozen=True)
class Catching(Projection):
    """Keeps what it multiplies."""

    caught: list[Tensor] = field(default_factory=list)

    def accumulate(self, x: Tensor) -> Tensor:
        self.caught.append(x)
        return super().accumulate(x)


def second_moments(checkpoint: Path, result: ConversionResult) -> dict[str, Tensor]:
    """FP64 mean squares of every module's input before the gain, on the calibration windows."""
    assert result.plan.windows is not None
    with open_source(str(checkpoint)) as source:
        model = model_from_checkpoint(source)
    layers = [
        replace(layer, projections={m: Catching(p.weight, gain=p.gain) for m, p in layer.projections.items()})
        for layer in model.prefill
    ]
    model = replace(model, prefill=layers)
    for window in result.plan.windows.ids:
        model.forward(model.new_cache(len(window)), window, "prefill")
    moments = {}
    for index, layer in enumerate(layers):
        for module, projection in layer.projections.items():
            assert isinstance(projection, Catching)
            gain = 1.0 if projection.gain is None else projection.gain
            moments[f"layers.{index}.{module}"] = (torch.cat(projection.caught) / gain).double().square().mean(dim=0)
    return moments


def test_gptqs_damping_and_errors_are_reported_module_by_module(evaluated: ConversionResult) -> None:
    data = contents(evaluated)
    solved = {row["name"]: row for row in data["modules"] if row["weighting"] == "hessian"}
    assert set(solved) == set(evaluated.gptq) and len(solved) == 12
    for name, row in solved.items():
        assert row["format"] == "int4" and row["method"] == "gptq" and row["damping"] == 0.01
        assert row["error"] == evaluated.gptq[name]["weighted_error"] ** 0.5
    assert "GPTQ solved 12 of 12 modules with damping 0.01." in page(evaluated)
    assert "No damping was raised and no module fell back" in page(evaluated) and data["fallbacks"] == {}
    summary = next(r for r in data["module_summary"] if (r["module"], r["format"]) == ("down", "int4"))
    errors = [solved[f"layers.{i}.down"]["error"] for i in range(3)]
    assert summary["mean_error"] == pytest.approx(sum(errors) / 3)
    assert summary["largest_error"] == max(errors) == solved[summary["worst"]]["error"]


def test_a_fallback_and_raised_damping_are_named(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factorize, calls = gptq.factorize, iter(range(100))

    def fail(*args: Any) -> Any:
        """The second module's Hessian is hopeless, the third's needs more damping."""
        number = next(calls)
        if number == 1:
            return None
        factor = factorize(*args)
        return replace(factor, damping=0.1) if number == 2 and factor is not None else factor

    monkeypatch.setattr(gptq, "factorize", fail)
    result = convert(str(tiny_checkpoint()), tmp_path / "out", overrides=GPTQ)
    data = contents(result)
    assert list(data["fallbacks"]) == ["layers.0.o"] and "not positive definite" in data["fallbacks"]["layers.0.o"]
    assert "- **`layers.0.o` was rounded to nearest instead**: " in page(result)
    assert "- damping raised to 0.1 for `layers.0.gate_up`" in page(result)
    assert "GPTQ solved 6 of 8 modules with damping 0.01." in page(result)


def test_plots_are_pictures(evaluated: ConversionResult) -> None:
    linked = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page(evaluated))
    assert sorted(linked) == ["report/accuracy.png", "report/depth.png", "report/modules.png"]
    assert {f"report/{p.name}" for p in (evaluated.path / "report").iterdir()} == set(linked)
    for name in linked:
        data = (evaluated.path / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and data[-8:-4] == b"IEND"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 500 and height > 200
        pixels = plt_image(evaluated.path / name)
        # Something is drawn, in several colours.
        assert pixels.shape[:2] == (height, width) and len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20


def plt_image(path: Path) -> Any:
    from matplotlib.image import imread

    return imread(path)


def test_tables_are_whole(evaluated: ConversionResult) -> None:
    """Every line of a table has as many cells as its header, and the long one a row a layer."""
    tables = re.findall(r"(?:^\|.*\n)+", page(evaluated), flags=re.M)
    assert len(tables) == 6
    for table in tables:
        lines = table.splitlines()
        assert len({line.count("|") - line.count("\\|") for line in lines}) == 1
    assert len(tables[4].splitlines()) == 2 + 3
    assert not any(word in page(evaluated) for word in ("None", "nan", str(evaluated.path.parent)))


def test_steps_have_time_and_memory(evaluated: ConversionResult) -> None:
    data = contents(evaluated)
    steps = {step["step"]: step for step in data["steps"]}
    assert set(steps) >= {"plan", "read", "calibrate", "gptq", "quantize", "write", "seal", "report", "evaluate"}
    for step in steps.values():
        assert step["seconds"] > 0 and step["peak_device_bytes"] is None
        assert 5e7 < step["peak_memory_bytes"] <= 1.01 * data["peak_memory_bytes"]
    assert all(f"| {name} |" in page(evaluated) for name in steps)


def test_a_step_sees_the_memory_that_is_taken_while_it_runs() -> None:
    with StepClock(torch.device("cpu")) as clock:
        with clock("small"):
            pass
        with clock("large"):
            block = torch.ones(25_000_000)
            time.sleep(0.2)
            del block
        with clock("after"):
            pass
    assert clock.peak_bytes["large"] > clock.peak_bytes["small"] + 80_000_000
    assert clock.peak_bytes["after"] < clock.peak_bytes["large"] - 80_000_000


def test_the_report_is_no_part_of_the_sealed_set(checkpoint: Path, evaluated: ConversionResult, tmp_path: Path) -> None:
    options = {**GPTQ, "weights": FORMATS, "head": "e4m3"}
    plain = convert(str(checkpoint), tmp_path / "plain", overrides=options, report=False)
    assert plain.report is None and not any(p.name.startswith("report") for p in plain.path.iterdir())
    assert Artifact.open(plain.path).files == Artifact.open(evaluated.path).files
    found = verify_artifact(evaluated.path)
    assert found.ok and {"report.md", "report.json", "report/depth.png"} <= set(found.unsealed)


def test_other_commands_live_with_the_report(evaluated: ConversionResult, tmp_path: Path) -> None:
    artifact = Artifact.open(evaluated.path)
    export_checkpoint(artifact, tmp_path / "exported")
    assert not list((tmp_path / "exported").glob("report*"))
    repacked = repack_artifact(artifact, tmp_path / "repacked", "linear/1")
    assert inspected(repacked) is None and inspected(evaluated.path) == "report.md"
    assert contents(evaluated)["files_sha256"] == read_marker(evaluated.path)
    for name in ("report.md", "report.json"):
        shutil.copy(evaluated.path / name, repacked / name)
    assert "of another artifact" in str(inspected(repacked))
    (repacked / "report.json").write_text("[]")
    assert "cannot be read" in str(inspected(repacked))
    assert "report.md" in CliRunner().invoke(artifact_main, ["inspect", str(evaluated.path)]).stdout


def inspected(artifact: Path) -> object:
    result = CliRunner().invoke(artifact_main, ["inspect", str(artifact), "--json"])
    return json.loads(result.stdout)["report"]


def test_the_checkpoints_own_report_stays_behind(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(layers=1)
    (checkpoint / "report.json").write_text("{}")
    result = convert(str(checkpoint), tmp_path / "out", overrides=QUICK)
    assert "report.json" not in result.plan.manifest.side_files
    assert any("report.json" in warning for warning in result.plan.warnings)
    assert contents(result)["report_version"] == 1


def test_the_artifact_is_in_memory_a_layer_at_a_time(tiny_checkpoint: Make, tmp_path: Path) -> None:
    out, mapped = tmp_path / "out", []

    def look(done: int, total: int, what: str) -> None:
        if what.startswith(("measuring", "evaluating")):
            mapped.append(mapped_kilobytes(out))

    evaluation = text(tmp_path)
    convert(
        str(tiny_checkpoint(layers=2)), out, overrides=QUICK, evaluate=evaluation, evaluate_windows=1, progress=look
    )
    assert len(mapped) > 8 and not any(mapped)


def test_without_any_text_the_rest_is_reported(tiny_checkpoint: Make, tmp_path: Path) -> None:
    result = convert(str(tiny_checkpoint(layers=1)), tmp_path / "out", overrides={"calibration.enabled": False})
    assert contents(result)["depth"] == {"text": None, "paths": []}
    assert "neither a calibration text nor one to evaluate on" in page(result)
    assert "Not measured. `fut-convert … --evaluate FILE`" in page(result)
    assert "report" not in result.step_seconds and not (result.path / "report" / "depth.png").exists()


def test_what_is_no_number_is_said_to_be_none(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1e30

    checkpoint = write_checkpoint(tmp_path / "model", CheckpointShape(layers=1), change)
    options = {"calibration.enabled": False, "int4.scale_method": "absmax_7"}
    result = convert(str(checkpoint), tmp_path / "out", overrides=options)
    row = next(r for r in contents(result)["modules"] if (r["module"], r["format"]) == ("down", "e4m3"))
    assert row["error"] is None and "not finite" in page(result)


@pytest.mark.parametrize("weights", [["int4"], ["e4m3"], ["bf16"]])
def test_only_what_is_stored_is_measured(weights: list[str], tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(layers=1, max_positions=64)
    result = convert(
        str(checkpoint), tmp_path / "out", overrides={**QUICK, "weights": weights, "kv_cache.bits": 16},
        evaluate=text(tmp_path, 100), evaluate_windows=1,
    )  # fmt: skip
    rows = [(row.protocol, row.name, row.cache) for row in result.measurements.accuracy[1:]]
    assert rows == {
        "int4": [("decode", "INT4 weights", "BF16")],
        "e4m3": [
            ("prefill", "E4M3 weights and activations", ""), ("decode", "E4M3 weights", "BF16"),
            ("serve", "E4M3 prefill, E4M3 decode", "BF16"),
            ("serve", "BF16 prefill (E4M3 weights), E4M3 decode", "BF16"),
        ],
        "bf16": [("decode", "BF16 weights", "BF16"), ("serve", "BF16 prefill, BF16 decode", "BF16")],
    }[weights[0]]  # fmt: skip
    assert contents(result)["accuracy"]["rows"][1]["result"]["kl"]["standard_error"] is None


def test_evaluating_on_the_calibration_text_is_called_by_its_name(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, calibration = tiny_checkpoint(layers=1, max_positions=64), text(tmp_path)
    other = tmp_path / "evaluation-2.txt"
    other.write_text("An entirely different beginning. " + calibration.read_text()[100:900])
    unlike = tmp_path / "unlike.txt"
    unlike.write_text("Zebras. " * 60)
    kin = shutil.copy(unlike, tmp_path / "evaluation-3.txt")
    notes = []
    for number, chosen in enumerate((calibration, other, unlike, kin)):
        result = convert(
            str(checkpoint), tmp_path / f"out{number}", overrides={**QUICK, "calibration.text": str(calibration)},
            evaluate=chosen, evaluate_windows=2,
        )  # fmt: skip
        notes.append(contents(result)["accuracy"]["independence"])
        assert notes[-1] in page(result)
    assert "was calibrated on this very text (evaluation.txt): the figures flatter it" in notes[0]
    assert "stand in passages that calibration saw" in notes[1]
    assert notes[2] == "The calibration text (evaluation.txt) is another one and shares no passages with this."
    assert notes[3].startswith("By its name this text (evaluation-3.txt) is of the calibration text's corpus")


def test_shared_passages_are_counted_by_token() -> None:
    seen = torch.arange(1000)
    ids = torch.cat([torch.arange(5000, 5100), torch.arange(200, 240), torch.arange(6000, 6060)])
    assert shared_passages(ids, seen) == 40 / 200
    assert shared_passages(ids[:110], seen) == 0
    assert shared_passages(ids[:4], seen) == 0


def test_relative_rms_measures_every_token_by_its_own_size() -> None:
    expected = torch.tensor([[[1000.0, 0.0], [0.0, 1.0]]])
    found = torch.tensor([[[1000.0, 0.0], [0.0, 1.4]]])
    assert relative_rms(found, expected) == pytest.approx(math.sqrt(0.4**2 / 2))
    assert plain_rms(found, expected) == pytest.approx(0.4 / math.sqrt(1000**2 + 1))
