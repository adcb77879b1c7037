"""The token loop: batches, chunks, reasons to end, and caches that are always freed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_backend import FakeBackend, model_spec, say
from fut_runtime.engine import Engine
from fut_runtime.errors import FutError
from fut_runtime.generate import GenerationBatch, PromptError
from fut_runtime.results import Completion
from fut_runtime.sampling import SamplingError, SamplingParams
from small_tokenizers import byte_level, sentencepiece

TOKENIZER = byte_level()
VOCAB = TOKENIZER.vocab_size
END = TOKENIZER.eos_token_id
assert END is not None


def engine(backend: FakeBackend | None = None, **sizes: int) -> Engine:
    return Engine.from_backend(backend or FakeBackend(model_spec(VOCAB)), TOKENIZER, **sizes)


def saying(text: str, prompt: str = "a", **spec: int) -> Engine:
    """An engine that answers `prompt` with `text`, again and again."""
    reply = [*TOKENIZER.encode(text), END]
    backend = FakeBackend(model_spec(VOCAB, **spec), say(reply, len(TOKENIZER.encode(prompt))))  # type: ignore[arg-type]
    return engine(backend)


def same(a: Completion, b: Completion) -> bool:
    return (a.token_ids, a.text, a.finish_reason, a.logprobs) == (b.token_ids, b.text, b.finish_reason, b.logprobs)


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([0.0, 1.0]),
)
def test_a_prompt_gets_the_same_alone_and_in_company(
    prompts: list[list[int]], chunk: int, max_batch: int, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=temperature, seed=5, repetition_penalty=1.2, logprobs=2)
    together = engine(prefill_chunk=chunk, max_batch=max_batch).generate(prompts, params)
    for prompt, completion in zip(prompts, together, strict=True):
        assert same(engine().generate([prompt], params)[0], completion)
        before = TOKENIZER.decode(prompt)
        if not before.endswith("\N{REPLACEMENT CHARACTER}"):
            assert before + completion.text == TOKENIZER.decode([*prompt, *completion.token_ids])


def test_chunks_of_a_prompt_do_not_depend_on_other_prompts() -> None:
    backend = FakeBackend(model_spec(VOCAB))
    engine(backend, prefill_chunk=4).generate([[1] * 6, [2] * 3, [3] * 9], SamplingParams(max_new_tokens=4))
    chunks: dict[int, list[int]] = {}
    for kind, call in backend.calls:
        if kind == "prefill":
            assert sum(n for _, n in call) <= 4
            for request, n in call:
                chunks.setdefault(request, []).append(n)
    assert chunks == {1: [4, 2], 2: [3], 3: [4, 4, 1]}
    assert backend.open == {}
    # Requests whose prompts are read decode while others are still being read.
    kinds = [kind for kind, _ in backend.calls]
    assert kinds.index("decode") < len(kinds) - 1 - kinds[::-1].index("prefill")


def test_no_more_requests_are_open_than_asked_for() -> None:
    backend = FakeBackend(model_spec(VOCAB))
    with engine(backend, max_batch=2).new_batch([[1], [2], [3]], SamplingParams(max_new_tokens=3)) as batch:
        while batch.unfinished:
            batch.step()
            assert len(backend.open) <= 2


def test_requests_join_and_leave_between_steps() -> None:
    backend = FakeBackend(model_spec(VOCAB))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    alone = engine().generate([[1, 2], [3]], params)
    batch = GenerationBatch(backend, TOKENIZER, eos_ids=frozenset())
    first = batch.add([1, 2], params)
    events = batch.step() + batch.step()
    second, third = batch.add([3], params), batch.add([4], params)
    events += batch.step()
    cancelled = batch.cancel(third)
    assert cancelled is not None and cancelled.finish_reason == "cancelled" and len(cancelled.token_ids) == 1
    assert batch.cancel(third) is None
    while batch.unfinished:
        events += batch.step()
    done = {e.index: e.completion for e in events if e.completion is not None}
    assert set(done) == {first, second}
    assert [same(done[first], alone[0]), same(done[second], alone[1])] == [True, True]
    assert backend.open == {}


def test_the_models_end_token_ends_the_text() -> None:
    completion = saying("hello").generate("a")[0]
    assert (completion.text, completion.finish_reason, completion.token_ids[-1]) == ("hello", "eos", END)


def test_every_end_token_of_the_model_counts() -> None:
    ids = TOKENIZER.encode("hello")
    backend = FakeBackend(model_spec(VOCAB, eos=(7, ids[0])), say(ids, 1))
    assert engine(backend).generate("a")[0].finish_reason == "eos"


def test_ignore_eos_goes_on() -> None:
    completion = saying("hello").generate("a", SamplingParams(max_new_tokens=5, ignore_eos=True))[0]
    assert (completion.text, completion.finish_reason) == ("hello" * 3, "length")


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (["lo w"], "hel", "lo w"),  # across tokens
        (["rld", "o"], "hell", "o"),
        (["nothing"], "hello world", None),
        (["d!"], "hello world", None),  # held back to the end, and then let go
        (["<|im_end|>"], "hello world", None),  # the end token itself
    ],
)
def test_stop_strings(stop: list[str], text: str, found: str | None) -> None:
    model = saying("hello world")
    events = list(model.stream("a", SamplingParams(stop=stop)))
    completion = events[-1].completion
    assert completion is not None
    assert (completion.text, completion.stop) == (text, found)
    assert completion.finish_reason == ("stop" if found else "eos")
    assert "".join(e.text for e in events) == text
    assert [e.token_id for e in events] == list(completion.token_ids)
    assert all(e.completion is None for e in events[:-1])


def test_a_special_token_may_be_a_stop_string() -> None:
    start = TOKENIZER.bos_token_id
    assert start is not None
    backend = FakeBackend(model_spec(VOCAB), say([*TOKENIZER.encode("hello"), start], 1))
    completion = engine(backend).generate("a", SamplingParams(stop=["<|im_start|>", "d!"]))[0]
    assert (completion.text, completion.finish_reason, completion.stop) == ("hello", "stop", "<|im_start|>")


def test_length_and_context_end_a_text() -> None:
    completion = saying("hello world").generate("a", SamplingParams(max_new_tokens=2))[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 2)
    completion = saying("hello world", context=3).generate("a", SamplingParams(max_new_tokens=None))[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("context", 2)
    completion = saying("hello world", context=3).generate("a", SamplingParams(max_new_tokens=2))[0]
    assert completion.finish_reason == "length"


def test_a_character_cut_by_the_length_is_shown_as_such() -> None:
    completion = saying("é😀").generate("a", SamplingParams(max_new_tokens=2))[0]
    assert completion.text == TOKENIZER.decode(completion.token_ids) == "é\N{REPLACEMENT CHARACTER}"


def test_a_raw_text_continues_and_a_chat_turn_begins() -> None:
    tokenizer = sentencepiece("{% for m in messages %}{{ m.content }}{% endfor %}")
    hello = tokenizer.raw.token_to_id("▁hello")
    backend = FakeBackend(model_spec(tokenizer.vocab_size), lambda tokens: hello)
    model = Engine.from_backend(backend, tokenizer)
    params = SamplingParams(max_new_tokens=2)
    assert model.generate(["hello"], params)[0].text == " hello hello"
    assert model.chat([{"role": "user", "content": "hello"}], params).text == "hello hello"


def test_prompts_are_checked_before_anything_runs() -> None:
    model = engine(FakeBackend(model_spec(VOCAB, context=8)))
    for prompt, message in (
        ([], "empty"),
        ("", "empty"),
        ([1] * 8, "has 8 tokens; the model's context is 8"),
        ([VOCAB], f"token id {VOCAB}; the model has ids 0 to {VOCAB - 1}"),
        ({"role": "user", "content": "x"}, "expected text, a list of token ids or a list of messages"),
    ):
        with pytest.raises(PromptError, match=message):
            model.generate([[1], prompt])  # type: ignore[list-item]
    assert len(model.generate([[1] * 7], SamplingParams(max_new_tokens=None))[0].token_ids) == 1
    with pytest.raises(FutError, match="2 sampling parameters for 1 prompts"):
        model.generate([[1]], [SamplingParams(), SamplingParams()])


def test_an_engine_without_a_tokenizer_takes_ids() -> None:
    model = Engine.from_backend(FakeBackend(model_spec(VOCAB)))
    completion = model.generate([[1, 2]], SamplingParams(max_new_tokens=3, stop=["x"]))[0]
    assert (len(completion.token_ids), completion.text) == (3, "")
    with pytest.raises(FutError, match="no tokenizer"):
        model.generate("text")


@pytest.mark.parametrize("when", [1, 3])
def test_caches_are_freed_when_something_fails(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(model_spec(VOCAB))
    calls = 0

    def bad_logits(request: int, ids: list[int]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.full((VOCAB,), float("nan") if calls == when else 0.0)

    monkeypatch.setattr(backend, "_append", bad_logits)
    with pytest.raises(SamplingError, match=r"prompt 0, token .* not finite"):
        engine(backend).generate([[1], [2]] if when == 3 else [[1]])
    assert backend.open == {}


def test_leaving_a_stream_frees_its_cache() -> None:
    backend = FakeBackend(model_spec(VOCAB))
    stream = engine(backend).stream([1, 2])
    next(stream)
    assert len(backend.open) == 1
    stream.close()
    assert backend.open == {}


def test_timings_and_counts() -> None:
    completion = saying("hello").generate("a", SamplingParams(logprobs=3))[0]
    assert completion.prompt_tokens == 1 and completion.cached_tokens == 0
    assert completion.time_to_first_token_s is not None and completion.decode_tokens_per_s is not None
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    assert all(len(entry.top) == 3 and entry.top[0][1] == entry.logprob for entry in completion.logprobs)


def test_a_closed_engine_says_so() -> None:
    backend = FakeBackend(model_spec(VOCAB))
    with engine(backend) as model:
        pass
    model.close()
    assert backend.released
    with pytest.raises(FutError, match="closed"):
        model.generate([[1]])
    with pytest.raises(FutError, match="at least 1"):
        engine(prefill_chunk=0).generate([[1]])
