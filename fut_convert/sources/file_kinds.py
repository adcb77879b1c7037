"""Which files of a checkpoint are its weights, which go along with them, and which are nobody's business."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

SAFETENSORS_SINGLE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"

#: In the order transformers looks for them.
WEIGHT_ENTRIES: tuple[str, ...] = (SAFETENSORS_SINGLE, SAFETENSORS_INDEX, TORCH_SINGLE, TORCH_INDEX)

#: Files that hold weights or training state, in any framework's format; `.py` because code is never taken along.
_NOT_SIDE_SUFFIXES: tuple[str, ...] = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".ggml", ".pt", ".pth", ".ckpt"),
    *(".h5", ".msgpack", ".onnx", ".onnx_data", ".npz", ".pkl", ".tar", ".zip", ".py", ".lock", ".incomplete"),
)

#: The one folder whose files belong to the tokenizer.
_TEMPLATE_FOLDER = "additional_chat_templates"


def weight_entries(names: Iterable[str]) -> list[str]:
    """Which of a checkpoint's files to begin with to read its weights, the first choice first.

    auto-gptq's own name for a file (`gptq_model-4bit-128g.safetensors`) is taken where there is no other.
    """
    present = set(names)
    own = [name for name in present if name.startswith("gptq_model-") and name.endswith(".safetensors")]
    return [name for name in WEIGHT_ENTRIES if name in present] or (own if len(own) == 1 else [])


def is_side_file(name: str) -> bool:
    """Whether a file, named relative to the checkpoint, is copied into the artifact byte for byte.

    Everything at the top that is neither weights, code nor hidden: tokenizer, configs, licence, model card, ….
    """
    path = PurePosixPath(name)
    if len(path.parts) > 1 and path.parts[:-1] != (_TEMPLATE_FOLDER,):
        return False
    return not path.name.startswith(".") and not path.name.lower().endswith(_NOT_SIDE_SUFFIXES)


def missing_companions(names: Iterable[str]) -> list[str]:
    """What a user will miss among the side files, each as one sentence."""
    present = set(names)
    missing = []
    if "tokenizer.json" not in present:
        others = sorted(present & {"tokenizer.model", "vocab.json", "merges.txt", "spiece.model"})
        found = f" (only {', '.join(others)})" if others else ""
        missing.append(
            f"no tokenizer.json{found}: the artifact cannot encode text; save the tokenizer with transformers' "
            "AutoTokenizer.save_pretrained and put its tokenizer.json beside the weights"
        )
    if "tokenizer_config.json" not in present:
        missing.append("no tokenizer_config.json: no chat template, and special tokens are taken from the config")
    if "generation_config.json" not in present:
        missing.append("no generation_config.json: only config.json says which tokens end a text")
    return missing
