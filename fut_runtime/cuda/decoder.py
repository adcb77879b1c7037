"""One decoder of the library: its workspace, its steps, and the logits and tokens that they leave."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from fut_runtime.backend import Draw
from fut_runtime.cuda.device_memory import allocate
from fut_runtime.cuda.library import CudaCallError, Library
from fut_runtime.cuda.memory_plan import MAX_ROWS, workspace_bytes
from fut_runtime.cuda.structs import DecoderConfig, Sampling, Status, Step
from fut_runtime.errors import FutError, UnsupportedError


@dataclass(frozen=True)
class Row:
    """One token of a step: its id, its position in its request, and the request's slot."""

    token: int
    position: int
    slot: int


class Decoder:
    """Steps over device memory that the configuration names and the caller keeps alive.

    Work goes to PyTorch's current stream of the device. A step that fails in CUDA leaves a decoder that refuses to go
    on, because what the card holds is unknown then; one whose arguments are refused leaves it as it was.
    """

    def __init__(self, library: Library, config: DecoderConfig, device: torch.device, about: str) -> None:
        """Create a decoder.

        Args:
            config: everything but the workspace, which is allocated here.
            about: the model, for messages.

        Raises:
            DeviceMemoryError: no memory for the workspace.
            UnsupportedError: the library refuses the configuration.
            CudaCallError: CUDA fails.
        """
        self.library, self._config, self._device, self._about = library, config, device, about
        self._broken: str | None = None
        self._handle = c_void_p()
        # Zero, because counters in it must be.
        self._workspace = allocate(workspace_bytes(config), device, "the steps of decoding", zero=True)
        config.workspace = self._workspace.data_ptr()
        config.workspace_bytes = self._workspace.numel()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()
            try:
                library.call("fut_decoder_create", ctypes.byref(config), ctypes.byref(self._handle), about=about)
            except CudaCallError as error:
                if error.status is Status.INVALID:  # the model is not one that the kernels compute
                    raise UnsupportedError(str(error)) from error
                raise
            address = library.fut_decoder_logits(self._handle)
        first = address - self._workspace.data_ptr()
        count = MAX_ROWS * config.vocab
        if not 0 <= first <= self._workspace.numel() - 4 * count:
            raise FutError("the library's logits lie outside its workspace; it is of another version: build it again")
        self._logits = self._workspace[first : first + 4 * count].view(torch.float32).view(MAX_ROWS, config.vocab)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Say in which pages the tokens of a slot's request lie."""
        self._call("fut_decoder_set_pages", slot, 0, (c_int32 * len(pages))(*pages), len(pages), self.stream())

    def step(
        self,
        rows: Sequence[Row],
        head_rows: Sequence[int],
        draws: Sequence[Draw | None] | None = None,
        *,
        chunked: bool = False,
    ) -> None:
        """Run the tokens of some requests through the model, all at once.

        Args:
            rows: at most MAX_ROWS.
            head_rows: indices of the rows that get logits, ascending.
            draws: how to choose the token that follows each of the head rows; None chooses none.
            chunked: rows may be consecutive tokens of one request.
        """
        count, heads = len(rows), len(head_rows)
        sampling = None
        if draws is not None:
            sampling = (Sampling * heads)(*(sampling_struct(draw) for draw in draws))
        step = Step(
            rows=count,
            chunked=int(chunked),
            token=(c_int32 * count)(*(row.token for row in rows)),
            position=(c_int32 * count)(*(row.position for row in rows)),
            slot=(c_int32 * count)(*(row.slot for row in rows)),
            head_rows=heads,
            head_row=(c_int32 * heads)(*head_rows),
            sampling=sampling,
        )
        self._call("fut_decoder_step", ctypes.byref(step), self.stream(), about=f"{count} rows, {heads} with logits")

    def tokens(self, count: int) -> list[int]:
        """Wait for the last step; the tokens it chose, -1 where the logits of a row are not finite."""
        found = (c_int32 * count)()
        self._call("fut_decoder_tokens", found, count, self.stream())
        return list(found)

    def logits(self, count: int) -> Tensor:
        """Logits of the last step's head rows, FP32 [count, vocab]: a view that the next step overwrites."""
        return self._logits[:count]

    def close(self) -> None:
        """Wait for the device and free the library's side; memory goes with this object. No other call may follow."""
        if self._handle:
            handle, self._handle = self._handle, c_void_p()
            with torch.cuda.device(self._device):
                try:
                    torch.cuda.synchronize(self._device)
                finally:
                    self.library.fut_decoder_destroy(handle)

    @property
    def handle(self) -> c_void_p:
        """`fut_decoder*`, for what is made beside the decoder."""
        return self._handle

    def stream(self) -> int:
        """The stream that calls go to."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def call(self, name: str, *arguments: object, about: str = "") -> None:
        """Call the library on the decoder's device; after a failure in CUDA no call is let through."""
        if self._broken is not None:
            raise FutError(f"this backend has failed before and must be loaded again ({self._broken})")
        about = f"{self._about}; {about}" if about else self._about
        try:
            with torch.cuda.device(self._device):
                self.library.call(name, *arguments, about=about)
        except CudaCallError as error:
            if error.status is Status.CUDA:
                self._broken = str(error)
            raise

    def _call(self, name: str, *arguments: object, about: str = "") -> None:
        self.call(name, self._handle, *arguments, about=about)


def sampling_struct(draw: Draw | None) -> Sampling:
    """`fut_sampling` of a draw; a row without one gets the most probable token, which nobody reads."""
    if draw is None:
        return Sampling(top_p=1.0)
    return Sampling(
        uniform=draw.uniform, temperature=draw.temperature, top_p=draw.top_p, min_p=draw.min_p, top_k=draw.top_k
    )
