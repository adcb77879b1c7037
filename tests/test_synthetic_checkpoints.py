"""The synthetic checkpoints are what they claim to be, by transformers' judgement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from odd_checkpoints import ODD_CHECKPOINTS, VOCAB_SIZE, odd_input_ids, reference_logits
from synthetic_checkpoint import SPECIAL_TOKENS

OddCheckpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def logits(odd_checkpoint: OddCheckpoint) -> Callable[[str], torch.Tensor]:
    pytest.importorskip("transformers")
    known: dict[str, torch.Tensor] = {}

    def compute(name: str) -> torch.Tensor:
        if name not in known:
            known[name] = reference_logits(odd_checkpoint(name), odd_input_ids())
        return known[name]

    return compute


@pytest.mark.parametrize("name", ODD_CHECKPOINTS)
def test_transformers_reads_every_weight(name: str, odd_checkpoint: OddCheckpoint) -> None:
    transformers = pytest.importorskip("transformers")
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(odd_checkpoint(name), output_loading_info=True)
    assert not any(loading.values()), loading


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("three_shards", "base"),
        ("pickled_only", "base"),
        ("rope_llama3_config_style_4", "rope_llama3"),
        ("k_outliers_balanced", "base"),
    ],
)
def test_layout_does_not_change_the_function(name: str, same_as: str, logits: Callable[[str], torch.Tensor]) -> None:
    torch.testing.assert_close(logits(name), logits(same_as), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["rope_llama3", "k_outliers"])
def test_oddity_changes_the_function(name: str, logits: Callable[[str], torch.Tensor]) -> None:
    assert (logits(name) - logits("base")).abs().max() > 0.1


def test_logits_are_neither_flat_nor_saturated(logits: Callable[[str], torch.Tensor]) -> None:
    largest = torch.softmax(logits("base")[0].double(), -1).amax(-1).mean().item()
    assert 5 / VOCAB_SIZE < largest < 0.5


def test_three_shards_are_three(odd_checkpoint: OddCheckpoint) -> None:
    directory = odd_checkpoint("three_shards")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in directory.glob("*.safetensors"))
    assert len(files) == 3
    assert sorted(set(index["weight_map"].values())) == files


def test_tokenizer_round_trips(tiny_checkpoint: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint() / "tokenizer.json"))
    text = "Naïve café, 日本語, 12.5 % — done."
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == [0, 1, 2]


def test_same_checkpoint_every_time(tiny_checkpoint: Callable[..., Path]) -> None:
    first, second = (tiny_checkpoint(n) / "model.safetensors" for n in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert (tiny_checkpoint("third", seed=1) / "model.safetensors").read_bytes() != first.read_bytes()
