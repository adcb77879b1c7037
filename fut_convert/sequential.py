"""Sequential calibration: each projection sees what the quantized ones before it make of the windows.

Frantar et al. 2022, section 3.3 of the paper and its code: a layer is calibrated behind the quantized layers, and
inside a layer qkv comes before o, gate_up and down. With the checkpoint's own layer beside it, each module also learns
what it should have put out, and so makes good for what those before it lost (`fut_convert.quantize.correction`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.calibration import Calibration
from fut_convert.original_layer import OriginalLayer
from fut_runtime.reference.layer import LayerWeights, Sixteen, attention, gated
from fut_runtime.reference.numerics import ACTIVATION_DTYPE, EXACT, row_factor
from fut_runtime.reference.projection import Projection, normalized

#: Whether a product of BF16 matrices can leave its FP32 sums unrounded (CUDA, from this version of PyTorch on).
_FP32_RESULTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

#: quantize(module, hessian, wanted) -> the module as it will multiply. The Hessian is FP32 [in, in], the mean of xxᵀ
#: over the inputs x of its product; `wanted` is FP32 [out, in], the mean of txᵀ with t what it is to put out before its
#: bias, or None without an original. Where processes share the windows only the first has them.
Quantize = Callable[[str, Tensor, Tensor | None], Projection]
#: Inputs x [tokens, in] of a product, and t [tokens, out] or None.
Sample = tuple[Tensor, Tensor | None]


class SequentialCalibration(Calibration):
    """Hidden states of all windows behind the layers that are quantized already."""

    #: Of each batch, whether what entered the last projection was finite.
    _finite: Sequence[Tensor] = ()

    @torch.inference_mode()
    def quantize_layer(
        self,
        gains: Mapping[str, Tensor],
        head_norms: tuple[Tensor, Tensor] | None,
        quantize: Quantize,
        original: OriginalLayer | None = None,
    ) -> None:
        """Have a layer quantized module by module, and advance every window through the result.

        Args:
            gains: FP32 [in] of the RMSNorm before `qkv` and `gate_up`, where it is multiplied into the activation; a
                gain that is folded into the weights must not be here, because then the product never sees it.
            head_norms: Qwen3's q and k gains, or None.
            quantize: called for qkv, o, gate_up and down in this order.
            original: what the layer is to reproduce; it is run over its own windows on the way.
        """
        projections: dict[str, Projection] = {}
        norms = (None, None) if head_norms is None else tuple(n.to(self.device) for n in head_norms)
        layer = LayerWeights(projections, *norms)
        products = Sixteen(EXACT, self.model.rms_norm_eps)

        projections["qkv"] = quantize("qkv", *self._moments(self._after_norm("qkv", gains.get("qkv"), original)))

        attended = self.room("attended", self.model.module_shape("o")[1])
        for batch in self.batches():
            h = batch.states.float()
            attended.store(batch.windows, attention(self.model, layer, products, EXACT, h, batch.rope, batch.attend))
        projections["o"] = quantize("o", *self._moments(self._attended(attended, original)))
        for batch in self.batches():
            x = attended.load(batch.windows).flatten(0, 1).float()
            self.advance(batch, batch.states.float() + products.plain(layer, "o", x))
        attended.close()

        samples = self._after_norm("gate_up", gains.get("gate_up"), original)
        projections["gate_up"] = quantize("gate_up", *self._moments(samples))

        projections["down"] = quantize("down", *self._moments(self._gated(layer, products, original)))
        for batch in self.batches():
            h = batch.states.float()
            self.advance(batch, h + products.plain(layer, "down", gated(layer, products, h)))

    def spoilt(self) -> str:
        """Of the hidden states, or else of what entered the last projection."""
        found = super().spoilt()
        for windows, finite in zip(self._slices(), self._finite, strict=False):
            if not found and not bool(finite):
                first, last = (self.lanes.among_all(window) + 1 for window in (windows.start, windows.stop - 1))
                some = f"window {first}" if first == last else f"windows {first} to {last}"
                found = f" in {some} of the calibration text"
        return found

    @torch.inference_mode()
    def head_hessian(self, gain: Tensor | None) -> Tensor:
        """FP32 [hidden, hidden], the Hessian of the head; `gain` is that of the final norm where it is not folded."""
        return self._moments(self._after_norm("head", gain, None))[0]

    def _after_norm(self, module: str, gain: Tensor | None, original: OriginalLayer | None) -> Iterator[Sample]:
        """What enters a projection that follows an RMSNorm, and what the original's puts out."""
        gain = None if gain is None else gain.to(self.device)
        eps = self.model.rms_norm_eps
        run = {} if original is None else {"qkv": original.qkv, "gate_up": original.gate_up}
        for batch in self.batches():
            wanted = run[module](batch) if run else None
            h = batch.states.float()
            yield normalized(h, row_factor(h, eps), gain), wanted

    def _attended(self, attended: ActivationStore, original: OriginalLayer | None) -> Iterator[Sample]:
        """What enters `o`, and what it would have to add for the original's residual stream."""
        for batch in self.batches():
            wanted = None if original is None else original.o(batch, batch.states.float())
            yield attended.load(batch.windows).flatten(0, 1), wanted

    def _gated(self, layer: LayerWeights, products: Sixteen, original: OriginalLayer | None) -> Iterator[Sample]:
        """What enters `down`, and what it would have to add for the original's residual stream.

        Computed anew by who needs it rather than kept: it is the widest activation of the layer.
        """
        for batch in self.batches():
            h = batch.states.float()
            wanted = None if original is None else original.down(batch, h)
            yield gated(layer, products, h), wanted

    def _moments(self, samples: Iterable[Sample]) -> tuple[Tensor, Tensor | None]:
        """Means of xxᵀ, FP32 [in, in], and of txᵀ, FP32 [out, in], over tokens rounded to 16 bits first.

        An empty tensor in all processes but the first.
        """

        finite: list[Tensor] = []
        self._finite = finite

        def lane_sums() -> Iterator[Sequence[Tensor]]:
            squares: Tensor | None = None
            mixed: Tensor | None = None
            for (inputs, wanted), ends in zip(samples, self.lane_ends(), strict=True):
                x = inputs.to(ACTIVATION_DTYPE)
                # Looked at only where the sum is not finite: no waiting for the device.
                finite.append(x.isfinite().all())
                squares = _plus(squares, outer_products(x, x))
                if wanted is not None:
                    mixed = _plus(mixed, outer_products(wanted.to(ACTIVATION_DTYPE), x))
                # The next batch is computed while these would still be held.
                del inputs, wanted, x
                if ends:
                    done = [squares] if mixed is None else [squares, mixed]
                    squares = mixed = None
                    yield done
                    del done

        totals = [total.div_(self.count * self.tokens) for total in self.lanes.total(lane_sums())]
        if not self.lanes.first:
            return torch.empty(0), None
        return totals[0], totals[1] if len(totals) > 1 else None


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def outer_products(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ · right of BF16 matrices [tokens, m] and [tokens, n], summed in FP32: float32 [m, n]."""
    if left.is_cuda and _FP32_RESULTS:
        return torch.mm(left.T, right, out_dtype=torch.float32)
    # BF16 numbers are exact in FP32, and in TF32 should that be on; so are their products.
    return left.float().T @ right.float()
