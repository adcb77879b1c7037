"""GGUF models."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from fut_convert.calibration_text import tokenizer_warnings
from fut_convert.sources import open_source
from fuzzing.gguf_bytes import Entry, damage_metadata, damage_table, gguf_bytes, nested_arrays, random_header
from fuzzing.mutations import damage_bytes
from fuzzing.reader import Files, Reader
from sources.gguf_models import byte_level_metadata, model_metadata, sentencepiece_metadata, stored_tensors
from synthetic_checkpoint import CheckpointShape

_SHAPE = CheckpointShape(layers=1, vocab_size=300)


class GGUFReader(Reader):
    """A GGUF model: header, metadata, tensor table, tokenizer."""

    name = "gguf"

    def make(self, folder: Path) -> Files:
        tensors = stored_tensors(_SHAPE)
        self._table: list[Entry] = []
        self._data = b""
        for name, values in tensors.items():
            self._table.append(Entry(name, values.shape[::-1], 0, len(self._data)))
            self._data += values.astype("<f4").tobytes()
            self._data += b"\0" * (-len(self._data) % 32)
        common = {"general.architecture": "llama", "general.name": "x", "general.license": "mit",
                  **model_metadata(_SHAPE), "llama.rope.scaling.type": "none",
                  "general.alignment": 32, "split.count": 0}  # fmt: skip
        byte_level = {**common, **byte_level_metadata(_SHAPE.vocab_size)}
        self._metadata = (byte_level, {**common, **_fitting(sentencepiece_metadata(), _SHAPE.vocab_size)})
        return {"model.gguf": gguf_bytes(byte_level, self._table, self._data)}

    def damaged(self, random: Random) -> Files:
        kind = random.random()
        if kind < 0.02:
            return {"model.gguf": nested_arrays(random.choice((10, 1000, 50_000)))}
        if kind < 0.1:
            return {"model.gguf": random_header(random)}
        if kind < 0.35:
            return {"model.gguf": damage_bytes(random, self.whole["model.gguf"], header=20_000)}
        metadata, table = random.choice(self._metadata), self._table
        if kind < 0.8:
            metadata = damage_metadata(random, metadata)
        else:
            table = damage_table(random, table)
        return {"model.gguf": gguf_bytes(metadata, table, self._data)}

    def read(self, folder: Path) -> None:
        with open_source(str(folder / "model.gguf")) as source:
            problems = source.check()
            for problem in problems:
                problem.message.encode()
            tokenizer_warnings(source)
            if not any(problem.severity == "error" for problem in problems):
                for name in source.tensors:
                    source.load(name)


def _fitting(metadata: dict[str, Any], count: int) -> dict[str, Any]:
    """A vocabulary cut or filled up to as many tokens as the embedding has rows."""
    fillers = range(len(metadata["tokenizer.ggml.tokens"]), count)
    more = {"tokens": [f"[PAD{i}]" for i in fillers], "scores": [0.0] * len(fillers), "token_type": [5] * len(fillers)}
    return {
        key: (value + more[name])[:count] if (name := key.rpartition(".")[2]) in more else value
        for key, value in metadata.items()
    }
