"""Checkpoints: safetensors files, indices, configs and pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from fut_convert.calibration_text import tokenizer_warnings
from fut_convert.sources import open_source
from fut_convert.sources.safetensors_file import SafetensorsFile
from fuzzing.mutations import damage_bytes, damage_json
from fuzzing.reader import Files, Reader, damage_document, damage_shard, files_of
from synthetic_checkpoint import CheckpointShape, write_checkpoint

INDEX = "model.safetensors.index.json"
_SHAPE = CheckpointShape(layers=1, vocab_size=300)


class SafetensorsReader(Reader):
    """Header and tensors of one safetensors file."""

    name = "safetensors"

    def make(self, folder: Path) -> Files:
        return {"model.safetensors": files_of(write_checkpoint(folder, _SHAPE))["model.safetensors"]}

    def damaged(self, random: Random) -> Files:
        return {"model.safetensors": damage_shard(random, self.whole["model.safetensors"])}

    def read(self, folder: Path) -> None:
        file = SafetensorsFile(folder / "model.safetensors", "model.safetensors")
        try:
            for info in file.tensors.values():
                file.read(info)
        finally:
            file.close()


class _CheckpointReader(Reader):
    """A checkpoint directory, read as `fut-convert` reads it."""

    shape = CheckpointShape(layers=1, vocab_size=300, shards=2)

    def make(self, folder: Path) -> Files:
        return files_of(write_checkpoint(folder, self.shape))

    def read(self, folder: Path) -> None:
        with open_source(str(folder)) as source:
            problems = source.check()
            for problem in problems:
                problem.message.encode()
            tokenizer_warnings(source)
            source.side_files()
            if not any(problem.severity == "error" for problem in problems):
                for name in source.tensors:
                    source.load(name)


class IndexReader(_CheckpointReader):
    """The index of a sharded checkpoint, and shards that do not agree with it."""

    name = "index"

    def damaged(self, random: Random) -> Files:
        files = dict(self.whole)
        if random.random() < 0.8:
            files[INDEX] = damage_document(random, files[INDEX])
        else:
            shard = random.choice([name for name in files if name.endswith(".safetensors")])
            files[shard] = damage_shard(random, files[shard])
        return files


class ConfigReader(_CheckpointReader):
    """config.json and its companions, of plain and of quantized checkpoints."""

    name = "config"
    _ROPES: tuple[Mapping[str, Any], ...] = (
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "truncate": True},
    )  # fmt: skip
    _QUANTIZED: tuple[Mapping[str, Any], ...] = (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "checkpoint_format": "gptq"},
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 64,
                                               "strategy": "group"}}}},
    )  # fmt: skip

    def damaged(self, random: Random) -> Files:
        files = dict(self.whole)
        config = json.loads(files["config.json"])
        if random.random() < 0.4:
            config["rope_scaling"] = dict(random.choice(self._ROPES))
            del config["rope_parameters"]
        if random.random() < 0.3:
            quantized = dict(random.choice(self._QUANTIZED))
            if random.random() < 0.5:
                config["quantization_config"] = quantized
            else:
                files["quantize_config.json"] = damage_json(random, quantized).encode()
        name = random.choice(("config.json", "config.json", "config.json", "generation_config.json"))
        files["config.json"] = json.dumps(config).encode()
        files[name] = damage_document(random, files[name])
        return files


class PickleReader(_CheckpointReader):
    """`pytorch_model.bin`."""

    name = "pickle"
    shape = CheckpointShape(layers=1, vocab_size=300, pickled=True)

    def make(self, folder: Path) -> Files:
        files = super().make(folder)
        torch.save(
            {"a": torch.ones(3, 4), "b": torch.ones(5)},
            folder / "small.bin",
            _use_new_zipfile_serialization=False,
        )
        return files | {"small.bin": (folder / "small.bin").read_bytes()}

    def damaged(self, random: Random) -> Files:
        files = dict(self.whole)
        small = files.pop("small.bin")
        if random.random() < 0.3:
            files["pytorch_model.bin"] = damage_bytes(random, small)
        else:
            files["pytorch_model.bin"] = damage_bytes(random, files["pytorch_model.bin"], header=3000)
        return files
