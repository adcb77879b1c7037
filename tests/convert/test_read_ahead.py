"""Reading a layer ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fut_convert.errors import CheckpointError
from fut_convert.read_ahead import ReadAhead
from fut_convert.sources import Source, open_source

Make = Callable[..., Path]
#: Nothing is put there.
CUDA = torch.device("cuda")


def test_announced_layers_are_read_in_a_thread(tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: dict[str, str] = {}
    load = Source.load

    def watched(self: Source, name: str) -> torch.Tensor:
        readers[name] = threading.current_thread().name
        return load(self, name)

    with open_source(str(tiny_checkpoint(layers=2))) as source:
        expected = {name: source.load(name) for name in source.tensors}
        monkeypatch.setattr(Source, "load", watched)
        for device, thread in ((CUDA, "fut-read_0"), (torch.device("cpu"), "MainThread")):
            readers.clear()
            with ReadAhead(source, device) as reader:
                reader.announce(1)
                reader.announce(2)
                for name, tensor in expected.items():
                    assert torch.equal(reader.load(name), tensor)
                    # Once read, it is not kept.
                    assert torch.equal(reader.load(name), tensor)
            with ReadAhead(source, device) as reader:
                reader.announce(1)
                reader.load("model.layers.1.mlp.up_proj.weight")
            assert readers["model.layers.1.mlp.up_proj.weight"] == thread
            assert readers["model.layers.0.mlp.up_proj.weight"] == "MainThread"


def test_an_error_ahead_comes_with_the_tensor(tiny_checkpoint: Make) -> None:
    checkpoint = tiny_checkpoint(layers=2)
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with open_source(str(checkpoint)) as source, ReadAhead(source, CUDA) as reader:
        reader.announce(1)
        reader.load("model.layers.1.mlp.down_proj.weight")
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 values"):
            reader.load("model.layers.1.mlp.up_proj.weight")
