"""Continuations scored side by side: the same numbers as one at a time, as token by token, and as another library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fake_backend import FakeBackend, model_spec
from fut_convert import convert
from fut_convert.checkpoint_model import model_from_checkpoint
from fut_convert.sources import open_source
from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.errors import FutError
from fut_runtime.evaluate.continuations import BackendScorer, ReferenceScorer, Score
from fut_runtime.evaluate.runner import ReferenceRunner
from fut_runtime.reference import backend as reference
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.numerics import Numerics
from synthetic_checkpoint import CheckpointShape, write_checkpoint

DOUBLE = Numerics(dtype=torch.float64, round_activations=False)
CONTEXT = [5, 17, 300, 4, 4, 98, 250]
CONTINUATIONS = [[7], [7, 8, 9, 10], [383, 0], [20, 21, 22]]


@pytest.fixture(scope="module")
def double_model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """A tiny model in FP64 with an INT4 cache: the same mathematics gives the same codes in any order of summation."""
    path = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", CheckpointShape(heads=4, kv_heads=2))
    with open_source(str(path)) as source:
        model = model_from_checkpoint(source, numerics=DOUBLE)
    return replace(model, kv_cache=KVCacheSpec(bits=4, rotation=True, zero_point=True))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A small artifact in every format."""
    path = tmp_path_factory.mktemp("continuations")
    checkpoint = write_checkpoint(path / "model", CheckpointShape(heads=4, kv_heads=2))
    options = {"weights": ["e4m3", "int4", "bf16"], "calibration.enabled": False}
    return Artifact.open(convert(str(checkpoint), path / "artifact", overrides=options).path)


def alone(model: ReferenceModel, context: Sequence[int], continuation: Sequence[int], protocol: str) -> Score:
    """One continuation in one go, by the runner that perplexity is measured with."""
    runner = ReferenceRunner(model, protocol, serve_prefill_tokens=len(context))
    ids = torch.tensor([*context, *continuation])
    rows = runner.logits(runner.hidden(ids[:-1]))[len(context) - 1 :].float().log_softmax(-1)
    targets = torch.tensor(continuation)
    total = rows.gather(1, targets[:, None]).double().sum().item()
    return Score(total, bool((rows.argmax(-1) == targets).all()))


@pytest.mark.parametrize("protocol", ["decode", "prefill", "serve"])
def test_side_by_side_equals_one_at_a_time(double_model: ReferenceModel, protocol: str) -> None:
    scorer = ReferenceScorer(ReferenceRunner(double_model, protocol))
    for context in (CONTEXT, CONTEXT[:4], [*CONTEXT[:5], 1, 2, 3], [9], [*CONTEXT, 11, 12]):
        found = scorer.score(context, CONTINUATIONS)
        for score, continuation in zip(found, CONTINUATIONS, strict=True):
            expected = alone(double_model, context, continuation, protocol)
            assert score.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-5)
            assert score.greedy == expected.greedy


def test_greedy_is_what_greedy_decoding_gives(double_model: ReferenceModel) -> None:
    cache, path = double_model.new_cache(20), list(CONTEXT)
    hidden = double_model.forward(cache, path, "decode")
    for _ in range(3):
        path.append(int(double_model.logits(hidden[-1:]).argmax()))
        hidden = double_model.forward(cache, path[-1:], "decode")
    best = path[len(CONTEXT) :]
    other = [best[0], best[1], (best[2] + 1) % 384]
    scores = ReferenceScorer(ReferenceRunner(double_model, "decode")).score(CONTEXT, [best, other])
    assert [score.greedy for score in scores] == [True, False]


def test_a_shared_beginning_is_computed_once(double_model: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    forward = ReferenceModel.forward

    def counting(self: ReferenceModel, cache, tokens, *rest):  # type: ignore[no-untyped-def]
        counts.append(len(tokens))
        return forward(self, cache, tokens, *rest)

    monkeypatch.setattr(ReferenceModel, "forward", counting)
    scorer = ReferenceScorer(ReferenceRunner(double_model, "decode"))
    scorer.score(CONTEXT, CONTINUATIONS)
    scorer.score([*CONTEXT[:5], 1, 2], CONTINUATIONS)
    scorer.score([*CONTEXT[:5], 1, 2], CONTINUATIONS)
    assert counts == [len(CONTEXT), 2, 1]
    # What a server prefills becomes the cache of one request; another request prefills its own.
    scorer = ReferenceScorer(ReferenceRunner(double_model, "serve"))
    counts.clear()
    scorer.score(CONTEXT, CONTINUATIONS)
    scorer.score(CONTEXT, CONTINUATIONS)
    assert counts == [len(CONTEXT)] * 2


@pytest.mark.parametrize(
    ("prefill_mode", "decode_mode", "scale_mode"),
    [
        ("e4m3", "int4", "request"),
        ("e4m3", "fp8", "frozen"),
        ("bf16", "bf16", "request"),
        ("decode", "int4", "request"),
    ],
)
def test_serving_equals_the_engines_own_calls(
    artifact: Artifact, prefill_mode: str, decode_mode: str, scale_mode: str
) -> None:
    """Against prefill and single decode steps of the engine's interface, and in the E4M3 modes with their states."""
    modes = {"prefill_mode": prefill_mode, "decode_mode": decode_mode, "scale_mode": scale_mode}
    backend = reference.load(artifact, compute="fp32", **modes)  # type: ignore[arg-type]
    runner = ReferenceRunner(backend.model, "serve", backend.new_scales)
    ours, stepwise = ReferenceScorer(runner), BackendScorer(backend)
    for context in (CONTEXT, CONTEXT[2:]):
        pairs = zip(ours.score(context, CONTINUATIONS), stepwise.score(context, CONTINUATIONS), strict=True)
        for a, b in pairs:
            assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-3) and a.greedy == b.greedy
    assert not backend._requests
    assert (runner.quantized > 0) == (prefill_mode == "e4m3")


@pytest.mark.parametrize(("scale_mode", "keep"), [("request", False), ("delayed", True), ("frozen", False)])
def test_prefilled_continuations_are_the_requests_second_call(artifact: Artifact, scale_mode: str, keep: bool) -> None:
    backend = reference.load(artifact, scale_mode=scale_mode, compute="fp32")
    scorer = ReferenceScorer(ReferenceRunner(backend.model, "prefill", backend.new_scales, keep_scales=keep))
    state = backend.new_scales()
    for context in (CONTEXT, [*CONTEXT[:5], 30, 31]):
        if not keep:
            state = backend.new_scales()
        found = scorer.score(context, CONTINUATIONS[:1] + CONTINUATIONS[1:2])
        cache, model = backend.model.new_cache(32), backend.model
        first = model.forward(cache, context, "prefill", state)[-1:]
        state.next_call()
        then = model.forward(cache, CONTINUATIONS[1][:-1], "prefill", state)
        state.next_call()
        rows = model.logits(torch.cat([first, then])).float().log_softmax(-1)
        expected = sum(rows[i, token].item() for i, token in enumerate(CONTINUATIONS[1]))
        assert found[1].log_likelihood == pytest.approx(expected, abs=1e-3)


def test_a_backend_is_asked_once_a_step_and_keeps_nothing() -> None:
    backend = FakeBackend(model_spec(50))
    context, continuations = [1, 2, 3], [[4], [5, 6, 7], [8, 9]]
    scores = BackendScorer(backend).score(context, continuations)
    assert [len(requests) for _, requests in backend.calls] == [3, 2, 1]
    assert not backend.open
    single = [BackendScorer(FakeBackend(model_spec(50))).score(context, [c])[0] for c in continuations]
    assert scores == single


@pytest.mark.parametrize(
    ("context", "continuations", "message"),
    [([], [[1]], "at least one token"), ([1], [[2], []], "at least one token"), ([1] * 63, [[1, 2]], "64 positions")],
)
def test_what_cannot_be_scored_is_refused(
    context: list[int], continuations: list[list[int]], message: str, double_model: ReferenceModel
) -> None:
    spec = replace(double_model.spec, max_position_embeddings=64)
    for scorer in (
        BackendScorer(FakeBackend(model_spec(50))),
        ReferenceScorer(ReferenceRunner(replace(double_model, spec=spec), "decode")),
    ):
        with pytest.raises(FutError, match=message):
            scorer.score(context, continuations)


def test_an_id_outside_the_vocabulary_leaves_the_scorer_usable(double_model: ReferenceModel) -> None:
    scorer = ReferenceScorer(ReferenceRunner(double_model, "decode"))
    before = scorer.score(CONTEXT, CONTINUATIONS)
    with pytest.raises(FutError, match="outside the vocabulary"):
        scorer.score([*CONTEXT[:3], 384, 1], CONTINUATIONS)
    after = scorer.score(CONTEXT, CONTINUATIONS)
    assert [s.log_likelihood for s in after] == pytest.approx([s.log_likelihood for s in before], abs=1e-9)


@pytest.mark.slow
def test_arc_as_transformers_scores_it(smollm2_dir: Path) -> None:
    """Four questions on the checkpoint in FP32: every answer's log-likelihood to 1e-3, by transformers' own pass."""
    transformers = pytest.importorskip("transformers")
    data = Path(__file__).resolve().parents[3] / "shared" / "data" / "arc_challenge_test.jsonl"
    if not data.exists():
        pytest.skip("ARC-Challenge is not on this machine (../shared/data/arc_challenge_test.jsonl)")
    from fut_runtime.evaluate.baseline import checkpoint_runner
    from fut_runtime.evaluate.questions import read_questions
    from fut_runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(smollm2_dir)
    scorer = ReferenceScorer(checkpoint_runner(str(smollm2_dir), "cpu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    for question in read_questions("arc_challenge", data)[:4]:
        context = tokenizer.encode(question.query)
        wholes = [tokenizer.encode(f"{question.query} {choice}") for choice in question.choices]
        assert all(whole[: len(context)] == context for whole in wholes)
        scores = scorer.score(context, [whole[len(context) :] for whole in wholes])
        for score, whole in zip(scores, wholes, strict=True):
            with torch.inference_mode():
                rows = theirs(torch.tensor([whole])).logits[0, len(context) - 1 : -1].log_softmax(-1)
            targets = torch.tensor(whole[len(context) :])
            assert score.log_likelihood == pytest.approx(rows.gather(1, targets[:, None]).sum().item(), abs=1e-3)
            assert score.greedy == bool((rows.argmax(-1) == targets).all())
