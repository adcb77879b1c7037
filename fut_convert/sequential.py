"""Sequential calibration: each projection sees what the quantized ones before it make of the windows.

Frantar et al. 2022, section 3.3 of the paper and its code: a layer is calibrated behind the quantized layers, and
inside a layer qkv comes before o, gate_up and down, so that each makes good for what those before it lost as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from fut_convert.calibration import Calibration
from fut_runtime.reference.layer import LayerWeights, Sixteen, attention, gated
from fut_runtime.reference.numerics import ACTIVATION_DTYPE, EXACT, row_factor
from fut_runtime.reference.projection import Projection, normalized

#: Whether a product of BF16 matrices can leave its FP32 sums unrounded (CUDA, from this version of PyTorch on).
_FP32_RESULTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

#: quantize(module, hessian) -> the module as it will multiply. The Hessian is FP32 [in, in], the mean of xxᵀ over the
#: inputs x of its product.
Quantize = Callable[[str, Tensor], Projection]


class SequentialCalibration(Calibration):
    """Hidden states of all windows behind the layers that are quantized already."""

    @torch.inference_mode()
    def quantize_layer(
        self, gains: Mapping[str, Tensor], head_norms: tuple[Tensor, Tensor] | None, quantize: Quantize
    ) -> None:
        """Have a layer quantized module by module, and advance every window through the result.

        Args:
            gains: FP32 [in] of the RMSNorm before `qkv` and `gate_up`, where it is multiplied into the activation; a
                gain that is folded into the weights must not be here, because then the product never sees it.
            head_norms: Qwen3's q and k gains, or None.
            quantize: called for qkv, o, gate_up and down in this order.
        """
        projections: dict[str, Projection] = {}
        norms = (None, None) if head_norms is None else tuple(n.to(self.device) for n in head_norms)
        layer = LayerWeights(projections, *norms)
        products = Sixteen(EXACT, self.model.rms_norm_eps)

        projections["qkv"] = quantize("qkv", self._after_norm(gains.get("qkv")))

        attended = self.room("attended", self.model.module_shape("o")[1])
        for batch in self.batches():
            h = batch.states.float()
            attended.store(batch.windows, attention(self.model, layer, products, EXACT, h, batch.rope, batch.attend))
        inputs = (attended.load(batch.windows).flatten(0, 1) for batch in self.batches())
        projections["o"] = quantize("o", self._mean_square(inputs))
        for batch in self.batches():
            x = attended.load(batch.windows).flatten(0, 1).float()
            self.advance(batch, batch.states.float() + products.plain(layer, "o", x))
        attended.close()

        projections["gate_up"] = quantize("gate_up", self._after_norm(gains.get("gate_up")))

        # Twice computed rather than kept: it is the widest activation of the layer.
        wide = (gated(layer, products, batch.states.float()) for batch in self.batches())
        projections["down"] = quantize("down", self._mean_square(wide))
        for batch in self.batches():
            h = batch.states.float()
            self.advance(batch, h + products.plain(layer, "down", gated(layer, products, h)))

    @torch.inference_mode()
    def head_hessian(self, gain: Tensor | None) -> Tensor:
        """FP32 [hidden, hidden], the Hessian of the head; `gain` is that of the final norm where it is not folded."""
        return self._after_norm(gain)

    def _after_norm(self, gain: Tensor | None) -> Tensor:
        """Hessian of a projection that follows an RMSNorm of the hidden states."""
        gain = None if gain is None else gain.to(self.device)
        eps = self.model.rms_norm_eps
        hidden = (batch.states.float() for batch in self.batches())
        return self._mean_square(normalized(h, row_factor(h, eps), gain) for h in hidden)

    def _mean_square(self, inputs: Iterable[Tensor]) -> Tensor:
        """Mean of xxᵀ, FP32 [in, in], over inputs [tokens, in] that are rounded to 16 bits first."""
        total, count = torch.zeros((), device=self.device), 0
        for x in inputs:
            product = outer_products(x.to(ACTIVATION_DTYPE))
            total = product if count == 0 else total.add_(product)
            count += len(x)
        return total.div_(count)


def outer_products(x: Tensor) -> Tensor:
    """xᵀx of a BF16 matrix [tokens, in], summed in FP32: float32 [in, in]."""
    if x.is_cuda and _FP32_RESULTS:
        return torch.mm(x.T, x, out_dtype=torch.float32)
    # BF16 numbers are exact in FP32, and in TF32 should that be on; so are their products.
    x = x.float()
    return x.T @ x
