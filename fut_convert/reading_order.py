"""When a conversion reads which tensor of the checkpoint: first the embedding, then layer by layer, the head last."""

from __future__ import annotations

import re

from fut_convert.kept_codes import head_name
from fut_convert.sources.names import EMBEDDING, FINAL_NORM
from fut_runtime.artifact.manifest import Manifest

#: The step of the embedding; layer i follows in step i + 1.
EMBEDDING_STEP = 0
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class ReadingOrder:
    """The steps of one conversion.

    Attributes:
        head_step: the last one.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.head_step = manifest.model.num_layers + 1
        # A quantized matrix has other names behind its module's.
        self._modules = {EMBEDDING.removesuffix("weight"): [EMBEDDING_STEP]}
        if "head" in manifest.weights:
            self._modules.setdefault(head_name(manifest.model).removesuffix("weight"), []).append(self.head_step)
        self._modules[FINAL_NORM.removesuffix("weight")] = [EMBEDDING_STEP, self.head_step]

    def steps(self, tensor: str) -> tuple[int, ...]:
        """The steps that read a tensor of the checkpoint's files, ascending; none for one that nothing is made of."""
        layer = _LAYER.match(tensor)
        if layer is not None:
            step = layer_step(int(layer[1]))
            return (step,) if step < self.head_step else ()
        return tuple(self._modules.get(tensor.rpartition(".")[0] + ".", ()))


def layer_step(layer: int) -> int:
    """The step of a layer."""
    return layer + 1
