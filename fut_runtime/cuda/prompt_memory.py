"""Memory of prefill on a card: how much there is to be, and taking it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fut_runtime.artifact.manifest import Manifest
from fut_runtime.cuda.activations import ActivationState
from fut_runtime.cuda.decoder import Decoder
from fut_runtime.cuda.device_memory import allocate
from fut_runtime.cuda.pages import pages_for
from fut_runtime.cuda.prefill import Prefill
from fut_runtime.cuda.prefill_plan import (
    history_page_bytes,
    prefill_config,
    prefill_workspace_bytes,
    run_rows,
    site_widths,
    wanted_history_pages,
)
from fut_runtime.cuda.prefill_weights import PrefillChoice, prefill_layers
from fut_runtime.cuda.prompt_path import PromptPath
from fut_runtime.cuda.structs import PAGE_TOKENS, DecoderConfig
from fut_runtime.cuda.tensors import DeviceTensors

_LOG = logging.getLogger(__name__)
#: The history holds at least a prompt of so many tokens.
_LEAST_TOKENS = 1024


@dataclass
class PromptMemory:
    """What prefill is going to take.

    Attributes:
        choice: the mode and its weights.
        rows: most tokens of a run.
        history_pages: wanted, or as many as fit.
        workspace_bytes: of a run.
        scale_mode: where E4M3 activation scales come from.
    """

    choice: PrefillChoice
    manifest: Manifest
    rows: int
    history_pages: int
    workspace_bytes: int
    scale_mode: str

    @classmethod
    def plan(
        cls,
        choice: PrefillChoice,
        manifest: Manifest,
        decoder: DecoderConfig,
        context_tokens: int,
        requests: int,
        scale_mode: str,
    ) -> PromptMemory:
        """Ask the library what it needs; sizes alone matter in `decoder`."""
        rows, pages = run_rows(context_tokens, requests), wanted_history_pages(context_tokens, requests)
        layers = DeviceTensors(manifest, choice.weight_format or "", {}).layers()
        config = prefill_config(choice.mode, layers, decoder, history_pages=pages, rows=rows, scale_mode=scale_mode)
        return cls(choice, manifest, rows, pages, prefill_workspace_bytes(config, decoder), scale_mode)

    def fit_history(self, room_bytes: int, context_tokens: int) -> int:
        """Make the history smaller where there is not so much room, but for one short prompt; returns its bytes."""
        each = history_page_bytes(self.manifest.model)
        least = pages_for(min(context_tokens, _LEAST_TOKENS))
        self.history_pages = min(self.history_pages, max(least, room_bytes // each))
        if self.history_pages * PAGE_TOKENS < context_tokens:
            _LOG.warning(
                "requests of more than %d tokens take the decode path for their prompts: there is memory for the "
                "history of %d pages; plan for a shorter context, or free memory",
                self.history_pages * PAGE_TOKENS,
                self.history_pages,
            )
        return self.history_pages * each

    def build(
        self,
        tensors: Mapping[str, Tensor],
        decoder: Decoder,
        decoder_config: DecoderConfig,
        initial_scales: Tensor,
        memory: list[object],
        take: Callable[..., Tensor] = allocate,
    ) -> PromptPath:
        """Take the memory and create the prefill.

        Args:
            tensors: of the artifact, on the device.
            initial_scales: F32 [layers, 4], on the device.
            memory: gets what must live as long as the result.
            take: gives the memory.

        Raises:
            DeviceMemoryError: there is not enough memory.
            UnsupportedError: the library refuses the model.
        """
        device, model = initial_scales.device, self.manifest.model
        layers, made = prefill_layers(DeviceTensors(self.manifest, self.choice.weight_format or "", tensors))
        activations = None
        if self.choice.mode == "e4m3":
            margin = self.manifest.activation.margin
            activations = ActivationState(initial_scales, margin, self.scale_mode, decoder_config.max_slots)
        history = take(
            self.history_pages * history_page_bytes(model), device, f"the history of {self.history_pages} pages"
        )
        config = prefill_config(
            self.choice.mode,
            layers,
            decoder_config,
            history_pages=self.history_pages,
            rows=self.rows,
            scale_mode=self.scale_mode,
            history=history.data_ptr(),
            activations=activations,
        )
        # Zero, because counters in it must be.
        workspace = take(
            prefill_workspace_bytes(config, decoder_config, decoder.library), device, "runs of prompts", zero=True
        )
        config.workspace, config.workspace_bytes = workspace.data_ptr(), workspace.numel()
        prefill = Prefill(config, decoder)
        memory += [history, workspace, made, activations]
        return PromptPath(self.choice.mode, prefill, activations, decoder_config.max_slots, site_widths(model))
