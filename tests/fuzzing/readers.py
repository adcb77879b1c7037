"""All readers that take files from strangers."""

from __future__ import annotations

from fuzzing.artifact_reader import ArtifactReader
from fuzzing.checkpoint_readers import ConfigReader, IndexReader, PickleReader, SafetensorsReader
from fuzzing.gguf_reader import GGUFReader
from fuzzing.hub_reader import HubReader
from fuzzing.quantized_reader import QuantizedReader
from fuzzing.reader import Reader
from fuzzing.text_readers import DocumentsReader, RecipeReader, TokenizerReader

READERS: tuple[type[Reader], ...] = (
    *(SafetensorsReader, IndexReader, ConfigReader, PickleReader, GGUFReader, ArtifactReader, RecipeReader),
    *(TokenizerReader, DocumentsReader, HubReader, QuantizedReader),
)
