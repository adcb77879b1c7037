"""A backend without a model: logits are a fixed function of the tokens so far, and every call is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fut_runtime.artifact.spec import ModelSpec, RopeSpec


def model_spec(vocab_size: int, *, context: int = 64, eos: tuple[int, ...] = ()) -> ModelSpec:
    """The smallest specification that says what the token loop asks."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=vocab_size,
        rms_norm_eps=1e-5,
        max_position_embeddings=context,
        rope=RopeSpec(),
        tie_word_embeddings=True,
        eos_token_ids=eos,
    )


@dataclass
class FakeBackend:
    """Logits depend on the last three tokens; `script` may instead name the next token, given all tokens so far."""

    spec: ModelSpec
    script: Callable[[Sequence[int]], int] | None = None
    calls: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    open: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    released: bool = False
    _next: int = 0

    @property
    def max_context_tokens(self) -> int:
        return self.spec.max_position_embeddings

    def open_request(self, capacity_tokens: int) -> int:
        assert 0 < capacity_tokens <= self.max_context_tokens
        self._next += 1
        self.open[self._next] = (capacity_tokens, [])
        return self._next

    def prefill(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        assert len({request for request, _ in chunks}) == len(chunks) > 0
        self.calls.append(("prefill", [(request, len(ids)) for request, ids in chunks]))
        return torch.stack([self._append(request, ids) for request, ids in chunks])

    def decode(self, tokens: Sequence[tuple[int, int]]) -> Tensor:
        self.calls.append(("decode", [(request, 1) for request, _ in tokens]))
        return torch.stack([self._append(request, [token]) for request, token in tokens])

    def close_request(self, request: int) -> None:
        del self.open[request]

    def release(self) -> None:
        self.released = True

    def _append(self, request: int, ids: Sequence[int]) -> Tensor:
        capacity, tokens = self.open[request]
        tokens.extend(ids)
        assert len(ids) > 0 and len(tokens) <= capacity
        if self.script is not None:
            logits = torch.full((self.spec.vocab_size,), -10.0)
            logits[self.script(tokens)] = 10.0
            return logits
        seed = sum(token * 1009**place for place, token in enumerate(reversed(tokens[-3:])))
        return 3 * torch.randn(self.spec.vocab_size, generator=torch.Generator().manual_seed(seed))


def say(reply: Sequence[int], prompt_length: int) -> Callable[[Sequence[int]], int]:
    """A script that answers a prompt of a given length with `reply`, again and again."""
    return lambda tokens: reply[(len(tokens) - prompt_length) % len(reply)]
