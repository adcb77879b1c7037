"""Options that the evaluations share, and the artifact and checkpoint that they describe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import click
from torch import Tensor

from fut_runtime.artifact.reader import Artifact
from fut_runtime.backend import BACKENDS, Backend, check_device, load_backend
from fut_runtime.errors import FutError
from fut_runtime.evaluate.baseline import checkpoint_runner
from fut_runtime.evaluate.continuations import BackendScorer, ReferenceScorer, Scorer
from fut_runtime.evaluate.perplexity import Estimate
from fut_runtime.evaluate.runner import PROTOCOLS, BackendRunner, ReferenceRunner
from fut_runtime.evaluate.windows import cut_windows
from fut_runtime.reference import backend as reference
from fut_runtime.reference.activation_scale import SCALE_MODES
from fut_runtime.reference.backend import ReferenceBackend
from fut_runtime.tokenizer import Tokenizer

Function = TypeVar("Function", bound=Callable[..., Any])

_RUNNER_OPTIONS = (
    click.option(
        "--protocol",
        type=click.Choice(PROTOCOLS),
        default="decode",
        show_default=True,
        help="decode: every token through the decode path; prefill: through the prefill path; "
        "serve: the first half of each window, or the question, prefilled, the rest decoded.",
    ),
    click.option(
        "--decode-mode",
        type=click.Choice(tuple(reference.DECODE_FORMATS)),
        default="int4",
        show_default=True,
        help="Weights of the decode path.",
    ),
    click.option(
        "--prefill-mode",
        type=click.Choice(reference.PREFILL_MODES),
        default="e4m3",
        show_default=True,
        help="Activations of the prefill path.",
    ),
    click.option(
        "--kv-cache", type=click.Choice(("int4", "bf16")), help="Decode cache; default: what the artifact says."
    ),
    click.option(
        "--scale-mode",
        type=click.Choice(SCALE_MODES),
        default="request",
        show_default=True,
        help="E4M3 activation scales. delayed: one state over all windows; request: one a window.",
    ),
    click.option(
        "--compute",
        type=click.Choice(tuple(reference.COMPUTE)),
        default="exact",
        show_default=True,
        help="exact: every rounding of docs/numerics.md; fp32: activations are not rounded to 16 bits.",
    ),
    click.option("--revision", metavar="REV", help="Branch, tag or commit, where OUT is a Hub id."),
    click.option("--verify", is_flag=True, help="Hash every file of the artifact first."),
    click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        default="reference",
        show_default=True,
        help="cuda: the Hopper kernels, under the protocol decode.",
    ),
    click.option("--device", help="Torch device, e.g. cpu or cuda.  [default: cpu; cuda with --backend cuda]"),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)
_MODES = ("backend", "protocol", "decode_mode", "prefill_mode", "kv_cache", "scale_mode", "compute")


def runner_options(function: Function) -> Function:
    """How the artifact is run, where, and how the result is printed."""
    for option in reversed(_RUNNER_OPTIONS):
        function = option(function)
    return function


@dataclass
class OpenedArtifact:
    """An artifact to be evaluated; its weights are loaded when they are first needed.

    Attributes:
        artifact: the open artifact.
        options: values of `runner_options`; `backend` and `device` may be left out.
        planned_tokens: longest context, where a dynamic RoPE fixes its base; None for the model's positions.
    """

    artifact: Artifact
    options: dict[str, Any]
    planned_tokens: int | None = None

    @property
    def on_card(self) -> bool:
        """The kernels compute, and not the reference backend."""
        return bool(self.options["backend"] == "cuda")

    @cached_property
    def reference(self) -> ReferenceBackend:
        """The artifact in the reference backend.

        Raises:
            UnsupportedError: a mode that the artifact has no weights for.
        """
        modes = {mode: self.options[mode] for mode in _MODES if mode not in ("backend", "protocol")}
        return reference.load(self.artifact, device=self.options["device"], planned_tokens=self.planned_tokens, **modes)

    @cached_property
    def backend(self) -> Backend:
        """The artifact, loaded into the backend of the options.

        Raises:
            UnsupportedError: the backend does not work here, or lacks a mode, or the weights for it.
        """
        if not self.on_card:
            return self.reference
        modes = {mode: self.options[mode] for mode in ("device", "decode_mode", "kv_cache", "compute")}
        # Activation scales belong to E4M3 prefill, which the protocol `decode` does not take.
        modes["prefill_mode"] = "decode" if self.options["protocol"] == "decode" else self.options["prefill_mode"]
        if modes["prefill_mode"] == "e4m3":
            modes["scale_mode"] = self.options["scale_mode"]
        return load_backend(self.artifact, "cuda", planned_tokens=self.planned_tokens, **modes)

    @cached_property
    def runner(self) -> ReferenceRunner | BackendRunner:
        """The artifact under the protocol of the options."""
        if self.on_card:
            return BackendRunner(self.backend, self.options["protocol"])
        keep = self.options["scale_mode"] == "delayed"
        loaded = self.reference
        return ReferenceRunner(loaded.model, self.options["protocol"], loaded.new_scales, keep_scales=keep)

    def scorer(self) -> Scorer:
        """What weighs continuations, under the protocol of the options."""
        return ReferenceScorer(self.runner) if isinstance(self.runner, ReferenceRunner) else BackendScorer(self.backend)

    @property
    def settings(self) -> dict[str, object]:
        """The modes in force, by option."""
        stored = self.artifact.manifest.kv_cache.bits
        cache = self.options["kv_cache"] or ("int4" if stored == 4 else "bf16")
        return {mode: self.options[mode] for mode in _MODES} | {"kv_cache": cache}

    def tokenizer(self) -> Tokenizer:
        """The artifact's tokenizer.

        Raises:
            FutError: it has none.
        """
        if not (self.artifact.path / "tokenizer.json").is_file():
            raise FutError(f"{self.artifact.path}: no tokenizer.json, so a text cannot be scored")
        return Tokenizer.from_directory(self.artifact.path)

    def windows(self, text: Path, window_tokens: int, max_windows: int | None) -> Tensor:
        """Windows int64 [windows, window_tokens] of a UTF-8 file.

        Raises:
            FutError: the file is not UTF-8, too short, or a window is longer than the model's positions.
        """
        tokenizer = self.tokenizer()
        try:
            content = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FutError(f"{text}: not UTF-8 ({error}); convert it first") from error
        windows = cut_windows(tokenizer.encode(content), window_tokens, max_windows)
        limit = self.artifact.manifest.model.max_position_embeddings
        if window_tokens > limit:
            raise FutError(f"--window {window_tokens} is longer than the model's {limit} positions")
        return windows

    def baseline(self, checkpoint: str) -> ReferenceRunner:
        """The checkpoint that the artifact is compared with.

        Raises:
            FutError: it cannot be read, or it has another vocabulary.
        """
        base = checkpoint_runner(checkpoint, self.options["device"])
        ours, theirs = self.artifact.manifest.model.vocab_size, base.model.spec.vocab_size
        if theirs != ours:
            raise FutError(
                f"--baseline {checkpoint} has {theirs} tokens in its vocabulary and {self.artifact.path} has "
                f"{ours}: give the checkpoint that the artifact was made from"
            )
        return base

    def saturation(self) -> dict[str, object]:
        """Share of the E4M3 activations that saturated, if there were any."""
        runner = self.runner
        if not isinstance(runner, ReferenceRunner) or not runner.quantized:
            return {}
        return {"saturated_share": runner.saturated / runner.quantized}


def open_artifact(name: str, options: dict[str, Any], planned_tokens: int | None = None) -> OpenedArtifact:
    """Open the artifact that OUT and the options of `runner_options` name; see `OpenedArtifact`.

    Raises:
        FutError: no such artifact or device.
    """
    from fut_runtime.engine import resolve_artifact

    backend = options.get("backend") or "reference"
    device = options.get("device") or ("cuda" if backend == "cuda" else "cpu")
    check_device(device)
    options = options | {"backend": backend, "device": device}
    opened = Artifact.open(resolve_artifact(name, options["revision"]), verify=options["verify"])
    return OpenedArtifact(opened, options, planned_tokens)


def settings_rows(settings: dict[str, object]) -> list[tuple[str, str]]:
    """The modes, as rows of a table."""
    return [(mode.replace("_", " "), str(settings[mode])) for mode in _MODES]


def to_json(value: object) -> str:
    """One line of JSON, with null for every number that JSON does not have."""
    return json.dumps(_finite(value))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plus_minus(estimate: Estimate, digits: int = 4) -> str:
    """A mean and its standard error, where that is known."""
    mean, error = estimate.mean, estimate.standard_error
    return f"{mean:.{digits}f}" if math.isnan(error) else f"{mean:.{digits}f} ± {error:.{digits}f}"


def percent(estimate: Estimate, digits: int = 1) -> str:
    """A share and its standard error, in per cent."""
    return plus_minus(Estimate(100 * estimate.mean, 100 * estimate.standard_error), digits) + " %"
