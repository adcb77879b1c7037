#!/usr/bin/env python3
"""A long run of decoding with requests that join and leave at random: nothing leaks, nothing drifts.

    python benchmarks/soak_decode.py OUT --steps 20000
    python benchmarks/soak_decode.py OUT --backend reference --device cpu --steps 300 --probe-every 100 --longest 60

OUT is an artifact. Prompts are random tokens read in random chunks, sampling parameters are random, some requests are
cancelled, some calls refused, and some prompts interrupted between two steps and read again. Every --probe-every steps
a fixed set of requests runs in the company of all that are open: its logits must be bit by bit those of the beginning,
which must be within the noise of tests/reference_noise.py of the reference's. Memory of the device must be the same at
every probe after the first, that of the process must not grow, and at the end every page and slot must be free. Prints
a JSON line; exit code 1 where something is wrong.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from soak_traffic import Traffic  # noqa: E402

from fut_runtime.artifact.reader import Artifact  # noqa: E402
from fut_runtime.backend import Backend, load_backend  # noqa: E402
from fut_runtime.bench.machine import source_commit  # noqa: E402
from fut_runtime.cuda.backend import CudaBackend  # noqa: E402
from fut_runtime.reference import backend as reference  # noqa: E402
from fut_runtime.reference.backend import ReferenceBackend  # noqa: E402
from reference_noise import NOISE_MARGIN, logits_and_noise  # noqa: E402

#: Prompt and continuation of the probes: less than a page, ends of pages, several steps of 64 rows.
PROBES = ((1, 6), (40, 30), (64, 3), (150, 10))
#: What the process may grow by from the second quarter of a run to the last one.
RSS_TOLERANCE = 16 << 20
#: What a card's free memory may lose: PyTorch keeps blocks, and a block that is in use in part cannot be given back.
FREE_TOLERANCE = 32 << 20


class Interrupted(Exception):  # noqa: N818
    """Raised between two steps of a prompt, as an interrupt from the keyboard would be."""


class Probes:
    """Requests whose logits must never change."""

    def __init__(self, backend: Backend, longest: int) -> None:
        generator = torch.Generator().manual_seed(17)
        vocab = backend.spec.vocab_size
        self._backend = backend
        fitting = [(first, more) for first, more in PROBES if first + more <= longest]
        self.tokens = [
            (torch.randint(vocab, (first + more,), generator=generator).tolist(), first) for first, more in fitting
        ]
        self._places: list[int] = []
        self.expected = self.run()

    def run(self, company: Callable[[], None] = lambda: None, *, interrupted: bool = False) -> list[Tensor]:
        """Logits [tokens of the continuation + 1, vocab] of each probe; `company` runs between its steps."""
        self.leave()
        requests = [self._backend.open_request(len(ids)) for ids, _ in self.tokens]
        rows: list[list[Tensor]] = []
        for request, (ids, first) in zip(requests, self.tokens, strict=True):
            if interrupted and isinstance(self._backend, CudaBackend) and first > 64:
                _interrupt(self._backend, request, ids[:first])
            rows.append([self._backend.prefill([(request, ids[:first])])[0].cpu()])
            company()
        for place in range(max(len(ids) - first for ids, first in self.tokens)):
            going = [i for i, (ids, first) in enumerate(self.tokens) if first + place < len(ids)]
            pairs = [(requests[i], self.tokens[i][0][self.tokens[i][1] + place]) for i in going]
            for i, row in zip(going, self._backend.decode(pairs), strict=True):
                rows[i].append(row.cpu())
            company()
        # Others must not take the room that the next run needs.
        for request, (ids, _) in zip(requests, self.tokens, strict=True):
            self._backend.close_request(request)
            self._places.append(self._backend.open_request(len(ids)))
        return [torch.stack(found) for found in rows]

    def leave(self) -> None:
        """Give back the room between two runs."""
        for place in self._places:
            self._backend.close_request(place)
        self._places.clear()

    def drifted(self, found: list[Tensor]) -> int:
        """Logits that are not the same bits as in the beginning."""
        return sum(int((a != b).sum()) for a, b in zip(found, self.expected, strict=True))

    def against(self, loaded: ReferenceBackend) -> tuple[float, float]:
        """RMS difference of the logits from the reference's, and the reference's own noise, over all probes."""
        differences, noises, rows = 0.0, 0.0, 0
        for (ids, first), found in zip(self.tokens, self.expected, strict=True):
            exact, noise = logits_and_noise(loaded, ids)
            difference = found.double() - exact[first - 1 :].cpu()
            differences += len(difference) * difference.square().mean().item()
            noises += len(difference) * noise**2
            rows += len(difference)
        return (differences / rows) ** 0.5, (noises / rows) ** 0.5


def _interrupt(backend: CudaBackend, request: int, ids: list[int]) -> None:
    """Begin a prompt of several steps and stop after the first: the request must hold nothing of it."""
    decoder, step = backend._decoder, backend._decoder.step

    def once(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        raise Interrupted

    decoder.step = once  # type: ignore[method-assign]
    try:
        backend.prefill([(request, ids)])
    except Interrupted:
        return
    finally:
        del decoder.step
    raise AssertionError("a prompt of several steps ran although it was interrupted")


def memory(device: torch.device) -> dict[str, int]:
    """Bytes of the process, and on a card those that PyTorch has handed out and those that are free."""
    with open("/proc/self/statm", encoding="ascii") as file:
        found = {"rss": int(file.read().split()[1]) * 4096}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        found |= {"allocated": torch.cuda.memory_allocated(device), "free": torch.cuda.mem_get_info(device)[0]}
    return found


def memory_faults(samples: list[dict[str, int]]) -> list[str]:
    """What leaks, in words; samples from the end of the warm-up on, at least four of them."""
    faults = []
    if len({sample.get("allocated") for sample in samples}) > 1:
        faults.append(f"tensors on the device took {[sample['allocated'] for sample in samples]} bytes")
    if samples[0].get("free", 0) - samples[-1].get("free", 0) > FREE_TOLERANCE:
        faults.append(f"the device's free memory went from {samples[0]['free']} to {samples[-1]['free']} bytes")
    rss = [sample["rss"] for sample in samples]
    quarter = max(1, len(rss) // 4)
    growth = statistics.median(rss[-quarter:]) - statistics.median(rss[quarter : 2 * quarter])
    if growth > RSS_TOLERANCE:
        faults.append(f"the process grew by {growth / 1e6:.1f} MB")
    return faults


def leftovers(backend: Backend) -> list[str]:
    """What requests that have left still hold, in words."""
    if isinstance(backend, CudaBackend):
        allocator = backend._allocator
        if allocator.open_requests or allocator.free_pages != allocator.pages:
            return [f"{allocator.open_requests} slots and {allocator.pages - allocator.free_pages} pages are not free"]
    elif getattr(backend, "_requests", None):
        return [f"{len(backend._requests)} requests are open"]  # type: ignore[attr-defined]
    return []


def soak(
    backend: Backend,
    loaded: ReferenceBackend,
    device: torch.device,
    *,
    steps: int,
    probe_every: int,
    most_open: int,
    longest: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the soak; returns the line, whose `faults` are empty where nothing is wrong.

    Args:
        loaded: the same artifact and modes in the reference backend, prompts through the decode path.
        most_open: requests besides the probes; pages must be enough for the probes in any case.
        longest: most tokens of a request.
    """
    traffic = Traffic(backend, random.Random(seed), most_open, longest)
    probes = Probes(backend, longest)
    difference, noise = probes.against(loaded)
    faults = []
    if not difference <= NOISE_MARGIN * noise:
        faults.append(f"logits are {difference:.2e} from the reference's, whose noise is {noise:.2e}")
    drifted, samples, started = 0, [], time.monotonic()
    for step in range(1, steps + 1):
        traffic.step()
        if step % probe_every:
            continue
        found = probes.run(traffic.step, interrupted=step // probe_every % 2 == 1)
        wrong = probes.drifted(found)
        drifted += wrong > 0
        samples.append(memory(device))
        say(f"step {step}: {wrong} logits differ, {samples[-1]}, {dict(traffic.counts)}")
    traffic.close()
    probes.leave()
    seconds = time.monotonic() - started
    if drifted:
        faults.append(f"{drifted} of {len(samples)} probes differ from the first")
    if len(samples) < 5:
        faults.append(f"{len(samples)} probes are too few to see a leak: more steps, or probe more often")
    else:
        faults += memory_faults(samples[1:])
    faults += leftovers(backend)
    return {
        "steps": steps, "probes": len(samples), "most_open": most_open, "longest": longest, "seed": seed,
        "seconds": round(seconds, 1), "reference_rms": difference, "reference_noise": noise, "drifted": drifted,
        "memory_first": samples[0] if samples else None, "memory_last": samples[-1] if samples else None,
        **traffic.counts, "faults": faults, "passed": not faults,
    }  # fmt: skip


@click.command()
@click.argument("artifact", metavar="OUT")
@click.option("--backend", type=click.Choice(["cuda", "reference"]), default="cuda", show_default=True)
@click.option("--device", help="[default: cuda; cpu with --backend reference]")
@click.option("--decode-mode", default="int4", show_default=True)
@click.option("--kv-cache", default="int4", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=20000, show_default=True)
@click.option("--probe-every", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--most-open", type=click.IntRange(1), default=40, show_default=True, help="Requests at once.")
@click.option("--longest", type=click.IntRange(16), default=700, show_default=True, help="Most tokens of a request.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the JSON line.")
def main(
    artifact: str, backend: str, device: str | None, decode_mode: str, kv_cache: str, out: Path | None, **sizes: int
) -> None:
    """Soak one backend."""
    where = torch.device(device or ("cuda" if backend == "cuda" else "cpu"))
    opened = Artifact.open(artifact)
    modes = {"device": str(where), "decode_mode": decode_mode, "kv_cache": kv_cache}
    longest = sizes["longest"] = max(sizes["longest"], *map(sum, PROBES))
    loaded = reference.load(opened, prefill_mode="decode", planned_tokens=longest, **modes)  # type: ignore[arg-type]
    # Room for half of the requests at their longest, so that the cache is full now and then.
    room = sizes["most_open"] // 2 + len(PROBES)
    tested = (
        load_backend(opened, "cuda", planned_tokens=longest, planned_requests=room, prefill_mode="decode", **modes)
        if backend == "cuda"
        else reference.load(opened, prefill_mode="decode", planned_tokens=longest, **modes)  # type: ignore[arg-type]
    )
    try:
        line = soak(tested, loaded, where, say=lambda text: print(text, flush=True), **sizes)  # type: ignore[arg-type]
    finally:
        tested.release()
    facts = {"benchmark": "soak_decode", "model": Path(artifact).name, "backend": backend, **modes}
    text = json.dumps(facts | line | {"torch": torch.__version__, "commit": source_commit()})
    print(text)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    sys.exit(not line["passed"])


if __name__ == "__main__":
    main()
