"""Loads an artifact into the CUDA backend: checks, the plan of the card's memory, weights, tables and the cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.cuda.activations import initial_scales
from fut_runtime.cuda.arena import ArenaPlan, fill
from fut_runtime.cuda.backend import CudaBackend
from fut_runtime.cuda.decoder import Decoder
from fut_runtime.cuda.device_memory import allocate, free_bytes, size_text
from fut_runtime.cuda.library import Library, library
from fut_runtime.cuda.memory_plan import (
    MAX_SLOTS,
    block_bytes,
    choose_cache,
    decoder_config,
    loaded_formats,
    page_bytes,
    rope_bytes,
    workspace_bytes,
)
from fut_runtime.cuda.pages import PageAllocator, pages_for
from fut_runtime.cuda.prefill_weights import choose_prefill_mode
from fut_runtime.cuda.prompt_memory import PromptMemory
from fut_runtime.cuda.structs import PAGE_TOKENS
from fut_runtime.cuda.tensors import (
    DECODE_FORMATS,
    DeviceTensors,
    check_supported,
    choose_decode_mode,
    needed_tensors,
)
from fut_runtime.errors import DeviceMemoryError, UnsupportedError
from fut_runtime.rope import rope_tables

#: Requests that the cache is planned for where nobody says how many.
DEFAULT_REQUESTS = 16
#: Where nobody says how many tokens the cache is for, it takes at most this part of the free memory …
_CACHE_SHARE = 0.9
#: … of what the history of prompts leaves, which takes at most this part.
_HISTORY_SHARE = 0.3
#: Loading fails where not even so many fit.
_LEAST_TOKENS = 1024


def load(
    artifact: Artifact,
    *,
    device: str | torch.device = "cuda",
    decode_mode: str | None = None,
    prefill_mode: str | None = None,
    kv_cache: str | None = None,
    scale_mode: str | None = None,
    compute: str | None = None,
    planned_tokens: int | None = None,
    planned_requests: int | None = None,
) -> CudaBackend:
    """Load an artifact onto a Hopper card.

    Args:
        decode_mode: `int4`, `fp8` (E4M3 weights, 16-bit activations) or `bf16`; None takes the first of these that the
            artifact has weights for.
        prefill_mode: `e4m3`, `bf16` or `decode` (prompts take the decode path); None takes the first of these that the
            artifact has weights for.
        kv_cache: `int4`, `bf16`, or None for what the artifact says.
        scale_mode: of E4M3 prefill: `request`, which is also what None means, `delayed` or `frozen`.
        compute: `exact`, which is also what None means.
        planned_tokens: longest context of a request. The cache is made for `planned_requests` such requests; None for
            the model's positions, or as many tokens as fit into most of the free memory. A dynamic RoPE fixes its base
            there.
        planned_requests: None for DEFAULT_REQUESTS.

    Raises:
        UnsupportedError: an option that this backend lacks, weights that the artifact lacks, or a card that the kernels
            do not run on.
        DeviceMemoryError: the card has too little free memory; the message says for what, how much, and what is free.
    """
    card = check_card(torch.device(device))
    if compute not in (None, "exact"):
        raise UnsupportedError(
            f"the CUDA backend has no compute {compute!r}: choose compute exact, or leave it out, or choose the "
            "reference backend"
        )
    manifest, spec = artifact.manifest, artifact.manifest.model
    decode_mode = choose_decode_mode(artifact, decode_mode)
    choice = choose_prefill_mode(manifest, prefill_mode, str(artifact.path))
    if scale_mode is not None and choice.mode != "e4m3":
        raise UnsupportedError(
            f"scale_mode is {scale_mode!r}, but prompts go the way of prefill_mode {choice.mode}: scales belong to "
            "e4m3, leave scale_mode out"
        )
    functions = library()
    weight_format = DECODE_FORMATS[decode_mode]
    check_supported(artifact, weight_format)
    cache = choose_cache(manifest, kv_cache)
    _check_block(functions, cache, spec)

    context = min(spec.max_position_embeddings, planned_tokens or spec.max_position_embeddings)
    requests = planned_requests or DEFAULT_REQUESTS
    wanted = requests * pages_for(context)
    plan = ArenaPlan.of(needed_tensors(manifest, *loaded_formats(weight_format, choice)))
    sizes = decoder_config(DeviceTensors(manifest, weight_format, {}), cache, context_tokens=context, pages=1)
    others = {"weights": plan.nbytes, "steps": rope_bytes(spec, context) + workspace_bytes(sizes)}
    prompts = None
    if choice.weight_format is not None:
        prompts = PromptMemory.plan(choice, manifest, sizes, context, requests, scale_mode or "request")
        others["prompts"] = prompts.workspace_bytes
        left = free_bytes(card) - sum(others.values())
        whole_cache = wanted * page_bytes(spec, cache)
        room = int(left * _HISTORY_SHARE) if planned_tokens is None else left - whole_cache
        others["history of prompts"] = prompts.fit_history(room, context)
    pages = _plan_pages(
        wanted,
        pages_for(min(context, _LEAST_TOKENS)) if planned_tokens is None else wanted,
        page_bytes(spec, cache),
        others,
        card,
        f"{requests} requests of {context} tokens",
    )
    context = min(context, pages * PAGE_TOKENS)

    formats = " and ".join(loaded_formats(weight_format, choice))
    arena = allocate(plan.nbytes, card, f"the {formats} weights of {artifact.path.name}")
    tensors = DeviceTensors(manifest, weight_format, plan.views(arena))
    tensors.tensors["embed"][spec.vocab_size :].zero_()
    fill(arena, plan.pieces(artifact))
    # On the CPU, where the reference's come from: cosines of the card differ in the last bit.
    rope = [t.contiguous().to(card) for t in rope_tables(spec, torch.arange(context), planned_tokens)]
    # Zero, because masked tokens are multiplied by zero, and what memory held before may be NaN.
    pool = allocate(pages * page_bytes(spec, cache), card, f"the cache of {pages} pages", zero=True)
    config = decoder_config(
        tensors,
        cache,
        context_tokens=context,
        pages=pages,
        embed=tensors.tensors["embed"].data_ptr(),
        rope=(rope[0].data_ptr(), rope[1].data_ptr()),
        pool=pool.data_ptr(),
    )
    about = f"{artifact.path.name}, {spec.num_layers} layers, hidden size {spec.hidden_size}"
    decoder = Decoder(functions, config, card, about)
    memory = [arena, tensors, pool, *rope]
    path = None
    if prompts is not None:
        scales = initial_scales(artifact).to(card)
        path = prompts.build(tensors.tensors, decoder, config, scales, memory)
    return CudaBackend(decoder, PageAllocator(pages, MAX_SLOTS), spec, card, decode_mode, context, memory, path)


def check_card(device: torch.device) -> torch.device:
    """The device with its index, once the kernels run on it; UnsupportedError otherwise."""
    if device.type != "cuda":
        raise UnsupportedError(f"device is {device}, expected a CUDA card; the reference backend runs elsewhere")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    capability = torch.cuda.get_device_capability(device)
    if tuple(capability) != (9, 0):
        raise UnsupportedError(
            f"{device} is {torch.cuda.get_device_name(device)} of compute capability {capability[0]}.{capability[1]}; "
            "the kernels need a Hopper card (9.0): choose another device, or the reference backend"
        )
    return device


def _check_block(functions: Library, cache: KVCacheSpec, spec: ModelSpec) -> None:
    """The library lays the cache out as the plan assumes; UnsupportedError otherwise."""
    found = functions.fut_kv_block_bytes(cache.bits, spec.head_dim)
    expected = block_bytes(cache.bits, spec.head_dim)
    if found != expected:
        raise UnsupportedError(
            f"the CUDA kernels keep 64 tokens of head_dim {spec.head_dim} at {cache.bits} bits in {found} bytes, "
            f"expected {expected}: this head_dim is not supported, or the library is of another version"
        )


def _plan_pages(
    wanted: int, least: int, each: int, others: Mapping[str, int], device: torch.device, purpose: str
) -> int:
    """Pages of the cache: as many as wanted, or as fit; DeviceMemoryError where not even the least do."""
    free = free_bytes(device)
    left = free - sum(others.values())
    pages = min(wanted, max(least, int(left * _CACHE_SHARE) // each))
    if pages * each > left:
        parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in others.items())
        needed = sum(others.values()) + pages * each
        raise DeviceMemoryError(
            f"this model needs {size_text(needed)} on {device} ({parts}, cache {size_text(pages * each)}), and "
            f"{size_text(free)} are free; the cache is for {purpose}: plan for fewer tokens or requests, or free memory"
        )
    return pages
