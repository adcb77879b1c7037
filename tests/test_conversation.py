"""Conversations: history, and a cache that is used only where it is right."""

from __future__ import annotations

import contextlib

import pytest

from fake_backend import FakeBackend, model_spec
from fut_runtime.engine import Engine
from fut_runtime.generate import PromptError
from fut_runtime.sampling import SamplingParams
from fut_runtime.tokenizer import Tokenizer, TokenizerError
from small_tokenizers import CHATML, byte_level

TOKENIZER = byte_level()
HELLO = TOKENIZER.encode("hello")[0]
PARAMS = SamplingParams(max_new_tokens=20)


def polite(tokens: list[int]) -> int:
    """Says hello once, then ends the turn."""
    assert TOKENIZER.eos_token_id is not None
    return TOKENIZER.eos_token_id if tokens[-1] == HELLO else HELLO


def open_engine(tokenizer: Tokenizer = TOKENIZER, context: int = 500) -> tuple[Engine, FakeBackend]:
    backend = FakeBackend(model_spec(TOKENIZER.vocab_size, context=context), polite)  # type: ignore[arg-type]
    return Engine.from_backend(backend, tokenizer), backend


def test_a_turn_reads_only_what_is_new() -> None:
    engine, backend = open_engine()
    with engine.conversation("brief") as conversation:
        cached: list[int] = []
        for turn in range(8):
            completion = list(conversation.say(f"turn {turn}", PARAMS))[-1].completion
            assert completion is not None and completion.text == "hello"
            rendered = engine.encode([{"role": "system", "content": "brief"}, *conversation.messages[:-1]])
            assert completion.prompt_tokens == len(rendered)
            cached.append(completion.cached_tokens)
            assert [tokens for _, tokens in backend.open.values()] == [[*rendered, HELLO]]
        assert cached[0] == 0 < cached[1]
        assert cached.count(0) == 2  # the cache was outgrown once, and made anew with as much room again
        assert [m["content"] for m in conversation.messages[::2]] == [f"turn {i}" for i in range(8)]
        assert {m["content"] for m in conversation.messages[1::2]} == {"hello"}
    assert backend.open == {}


def test_a_template_that_rewrites_history_is_read_anew() -> None:
    forgetful = byte_level(CHATML.replace("for message in messages", "for message in messages[-1:]"))
    engine, _ = open_engine(forgetful)
    with engine.conversation() as conversation:
        for text in ("one", "two", "three"):
            completion = list(conversation.say(text, PARAMS))[-1].completion
            assert completion is not None and completion.cached_tokens == 0


def test_the_answer_is_the_same_with_and_without_the_cache() -> None:
    random = FakeBackend(model_spec(TOKENIZER.vocab_size, context=400))
    engine = Engine.from_backend(random, TOKENIZER)
    with engine.conversation() as conversation:
        for text in ("one", "two", "three"):
            completion = list(conversation.say(text, PARAMS))[-1].completion
            assert completion is not None
            fresh = engine.chat(conversation.messages[:-1], PARAMS)
            assert fresh.token_ids == completion.token_ids


def test_an_answer_cut_short_stays_in_the_history() -> None:
    engine, backend = open_engine()
    with engine.conversation() as conversation:
        with contextlib.closing(conversation.say("one", PARAMS)) as events:
            next(events)
        assert [m["content"] for m in conversation.messages] == ["one", "hello"]
        assert backend.open == {}
        assert [e.text for e in conversation.say("two", PARAMS)] == ["hello", ""]
        assert len(conversation.messages) == 4


def test_a_turn_that_fails_leaves_no_trace() -> None:
    engine, backend = open_engine(context=40)
    with engine.conversation() as conversation:
        with pytest.raises(PromptError, match="context"):
            list(conversation.say("x" * 50, PARAMS))
        assert conversation.messages == []
        assert len(list(conversation.say("x", PARAMS))) == 2
        conversation.reset()
        assert conversation.messages == []
    assert backend.open == {}


def test_without_a_chat_template_there_is_no_conversation() -> None:
    engine, _ = open_engine(byte_level(chat_template=None))
    with pytest.raises(TokenizerError, match="no chat template"):
        engine.conversation()
