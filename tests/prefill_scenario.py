"""Prompts and decode steps in each other's company on any backend, and on the reference with noise and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fut_runtime.artifact.layout import SITES
from fut_runtime.artifact.reader import Artifact
from fut_runtime.reference import backend as reference
from reference_noise import NOISE_MARGIN, shaken_layers


def prompt_of(length: int, seed: int, vocab: int) -> list[int]:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def packed_and_continued(backend: Any, scale: int = 1) -> list[Tensor]:
    """Prompts of unequal lengths in one call, one of them continued past a page's end, then decode steps of all.

    A request that begins later takes the slot and the pages of one that ended. `scale` multiplies the lengths.
    """
    vocab = backend.spec.vocab_size
    long, short, middle, late = (prompt_of(n * scale, seed, vocab) for n, seed in ((70, 1), (5, 2), (33, 3), (20, 4)))
    requests = [backend.open_request(len(ids) + 4) for ids in (long, short, middle)]
    cut = 40 * scale
    found = [backend.prefill([(requests[0], long[:cut]), (requests[1], short), (requests[2], middle)])]
    found.append(backend.prefill([(requests[0], long[cut:])]))
    for step in range(2):
        found.append(backend.decode([(request, 7 + step + i) for i, request in enumerate(requests)]))
    backend.close_request(requests[1])
    requests[1] = backend.open_request(len(late) + 4)
    found.append(backend.prefill([(requests[1], late[: len(late) // 2])]))
    found.append(backend.prefill([(requests[1], late[len(late) // 2 :])]))
    found.append(backend.decode([(request, 11) for request in requests]))
    return found


def against_reference(
    artifact: Artifact, load: Callable[[], Any], scale: int = 1, device: str = "cpu", **modes: str
) -> None:
    """Logits within the reference's own noise; and with E4M3 the same scales, as far as rounding goes, and counts.

    On a card that noise includes what the tensor cores cut off.
    """
    backend = load()
    found = packed_and_continued(backend, scale)
    exact_backend = reference.load(artifact, device=device, **modes)
    exact = packed_and_continued(exact_backend, scale)
    with shaken_layers(tensor_cores=device == "cuda" and modes["prefill_mode"] == "e4m3"):
        shaken = packed_and_continued(reference.load(artifact, device=device, **modes), scale)
    for call, (a, b, c) in enumerate(zip(found, exact, shaken, strict=True)):
        assert bool(a.isfinite().all())
        difference = (a.double() - b.double()).square().mean().sqrt().item()
        noise = (c.double() - b.double()).square().mean().sqrt().item()
        print(f"{modes} call {call}: rms difference {difference:.2e}, noise {noise:.2e}")
        assert difference <= NOISE_MARGIN * noise
    if modes["prefill_mode"] == "e4m3":
        compare_reports(backend.activation_report(), exact_backend.activation_report())
    backend.release()


def compare_reports(found: dict[str, Any], exact: dict[str, Any]) -> None:
    assert found["scale_mode"] == exact["scale_mode"] and found["sites"] == list(SITES)
    assert found["elements"] == exact["elements"] and found["ignored_maxima"] == exact["ignored_maxima"]
    assert found["initial_scale"] == exact["initial_scale"]
    torch.testing.assert_close(torch.tensor(found["scale"]), torch.tensor(exact["scale"]), rtol=0.1, atol=0)
    moved = found["scale"] != found["initial_scale"]
    assert moved == (found["scale_mode"] != "frozen")
    few = torch.tensor(exact["saturated"])
    assert bool(((torch.tensor(found["saturated"]) - few).abs() <= 2 + 0.25 * few).all())


def same_alone_and_in_company(backend: Any, lengths: list[int]) -> None:
    """Prompts in one call and one by one give the same bits, and so does the decode step after them."""
    prompts = [prompt_of(n, n, backend.spec.vocab_size) for n in lengths]
    requests = [backend.open_request(len(p) + 1) for p in prompts]
    together = backend.prefill(list(zip(requests, prompts, strict=True)))
    after = backend.decode([(request, 5) for request in requests])
    for request in requests:
        backend.close_request(request)
    for prompt, row, next_row in zip(prompts, together, after, strict=True):
        request = backend.open_request(len(prompt) + 1)
        # Every row's logits, the last of them being the prompt's.
        rows = torch.cat([some.clone() for some in backend.prompt_logits(request, prompt)])
        assert rows.shape[0] == len(prompt) and torch.equal(rows[-1], row)
        assert torch.equal(backend.decode([(request, 5)])[0], next_row)
        backend.close_request(request)
