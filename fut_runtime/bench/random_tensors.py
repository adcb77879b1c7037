"""Random contents for an artifact's tensors and for pages of the cache, made where they are used.

Every matrix gives outputs of about the size of its inputs, so that nothing overflows however deep the model is. The
values do not matter to the time, as long as they are not all equal: zeros would make the card draw less power and run
faster than it does with real weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import Manifest

#: Numbers made at once, so that what conversion needs stays small next to the tensors.
_PIECE = 1 << 26
#: Root mean square of code − 8 over the sixteen codes.
_CODE_RMS = 4.64
#: Standard deviation of E4M3 values: in the middle of what the format tells apart.
_E4M3_RMS = 16.0
#: A BF16 number from 0.0078 to 0.031 once its low eight bits are random.
_CACHE_WORD = 0x3C00


def fill_weights(tensors: Mapping[str, Tensor], manifest: Manifest, generator: torch.Generator) -> None:
    """Fill the stored tensors of a model: codes and values at random, scales so that activations keep their size.

    Args:
        tensors: by their names in the artifact, as `needed_tensors` lists them; contents are overwritten.
    """
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind.endswith("norm"):  # final_norm has no stem
            _uniform(tensor, 0.5, 1.5, generator)
        elif kind == "embed":
            _normal(tensor, 1.0, generator)
        elif kind == "int4":
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
        elif kind == "bias":
            _uniform(tensor, -0.1, 0.1, generator)
        else:
            columns = manifest.weights[stem][kind.removesuffix("_scale")].shape[1]
            size = columns**-0.5
            if kind == "int4_scale":
                _uniform(tensor, 0.5 * size / _CODE_RMS, 1.5 * size / _CODE_RMS, generator)
            elif kind == "e4m3_scale":
                _uniform(tensor, 0.5 * size / _E4M3_RMS, 1.5 * size / _E4M3_RMS, generator)
            else:
                _normal(tensor, _E4M3_RMS if kind == "e4m3" else size, generator)


def fill_cache(pool: Tensor, generator: torch.Generator) -> None:
    """Fill pages of the cache, uint8 [bytes]: random bits that are small positive numbers wherever BF16 is read.

    So it needs not know where a block keeps codes, scales and zero points, and no score overflows.
    """
    words = pool.view(torch.int16)
    words.random_(0, 256, generator=generator)
    words.bitwise_or_(_CACHE_WORD)


def _uniform(tensor: Tensor, low: float, high: float, generator: torch.Generator) -> None:
    tensor.copy_(torch.empty(tensor.shape, device=tensor.device).uniform_(low, high, generator=generator))


def _normal(tensor: Tensor, deviation: float, generator: torch.Generator) -> None:
    for piece in tensor.view(-1).split(_PIECE):
        piece.copy_(torch.empty(piece.shape, device=piece.device).normal_(0, deviation, generator=generator))
