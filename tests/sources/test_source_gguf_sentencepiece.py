"""SentencePiece tokenizers rebuilt from GGUF files, against a slow encoder that works with the scores themselves."""

from __future__ import annotations

from typing import Any

import pytest
from gguf_models import CORPUS, rebuild, sentencepiece_metadata
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_tokenizers import slow_sentencepiece

from fut_convert.errors import CheckpointError, ConvertError, UnsupportedModelError
from fut_convert.sources.gguf_spm import merges_from_scores


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=60)
@given(text=st.text(alphabet=CORPUS + "Zé🙂\n<0xA>", max_size=30))
def test_sentencepiece_agrees_with_the_slow_encoder(prefix: bool, text: str) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=prefix, add_bos_token=False)
    if any(special in text for special in ("<s>", "</s>", "<unk>")):
        return
    tokenizer, config = rebuild(metadata)
    ids = tokenizer.encode(text).ids
    assert ids == slow_sentencepiece(text, metadata, prefix)
    assert tokenizer.decode(ids) == text
    assert config["add_prefix_space"] is prefix


def test_sentencepiece_defaults_are_llama_s() -> None:
    """No ids and no flags in the file: bos 1, eos 2, unknown 0, and a bos before every text."""
    metadata = sentencepiece_metadata()
    tokenizer, config = rebuild(metadata)
    assert tokenizer.encode("the fox").ids == [1, *slow_sentencepiece("the fox", metadata)]
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    # What follows a special token gets its own space, as in llama.cpp and in Llama 2's tokenizer.json.
    the = slow_sentencepiece("the", metadata)
    assert tokenizer.encode("the</s>the").ids == [1, *the, 2, *the]


def test_merges_are_those_transformers_derives() -> None:
    module = pytest.importorskip("transformers.tokenization_utils_base")
    if not hasattr(module, "generate_merges"):
        pytest.skip("this version of transformers derives merges elsewhere")
    metadata = sentencepiece_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"][259:], metadata["tokenizer.ggml.scores"][259:]
    by_piece = dict(zip(tokens, scores, strict=True))
    assert merges_from_scores(by_piece) == module.generate_merges({t: i for i, t in enumerate(tokens)}, by_piece)


def _without_bytes() -> dict[str, Any]:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][10] = "replaced"
    return metadata


def _with_a_long_piece() -> dict[str, Any]:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = "x" * 2000
    return metadata


@pytest.mark.parametrize(
    ("metadata", "error", "reason"),
    [
        (_with_a_long_piece(), CheckpointError, "a piece of 2000 characters, expected at most 1024"),
        (_without_bytes(), CheckpointError, "lacks 1 byte pieces, first <0x07>"),
        (sentencepiece_metadata(scores=[0.0]), CheckpointError, "scores is missing or has another length"),
        (sentencepiece_metadata(remove_extra_whitespaces=True), UnsupportedModelError, "remove_extra_whitespaces"),
        (sentencepiece_metadata(precompiled_charsmap=[1, 2]), UnsupportedModelError, "precompiled_charsmap"),
    ],
)
def test_sentencepiece_that_cannot_be_rebuilt(metadata: dict[str, Any], error: type[ConvertError], reason: str) -> None:
    with pytest.raises(error) as caught:
        rebuild(metadata)
    assert reason in str(caught.value)
