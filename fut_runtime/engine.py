"""`Engine`: an artifact loaded into a backend, ready to generate."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fut_runtime.backend import Backend, ReportsActivations, available_backends, load_backend
from fut_runtime.errors import FutError
from fut_runtime.generate import DEFAULT_MAX_BATCH, DEFAULT_PREFILL_CHUNK, GenerationBatch, PromptError
from fut_runtime.resolve import resolve_artifact
from fut_runtime.results import Completion, TokenEvent
from fut_runtime.sampling import SamplingParams
from fut_runtime.saturation import saturation_warning
from fut_runtime.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from fut_runtime.artifact.manifest import Manifest
    from fut_runtime.conversation import Conversation

__all__ = ["Backend", "Engine", "Message", "Prompt", "ReportsActivations", "available_backends", "resolve_artifact"]

_LOG = logging.getLogger(__name__)

#: A message of a conversation: `role`, `content`, and what else the chat template knows.
Message = Mapping[str, Any]
#: Plain text to continue, token ids to continue, or a conversation for the chat template.
Prompt = str | Sequence[int] | Sequence[Message]


class Engine:
    """A loaded artifact.

    Prompts are plain text or token ids, which the model continues, or a list of messages, which the model's chat
    template turns into the beginning of the assistant's turn. Not thread-safe: one generation at a time.

    Attributes:
        backend: the loaded model.
        tokenizer: the artifact's tokenizer, or None where it has none.
        manifest: the artifact's manifest, or None for an engine made from a backend.
        path: the artifact's directory, or None likewise.
        eos_ids: tokens that end a text: the model's, and the tokenizer's end token.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str = "auto",
        device: str | None = None,
        decode_mode: str | None = None,
        prefill_mode: str | None = None,
        kv_cache: str | None = None,
        scale_mode: str | None = None,
        compute: str | None = None,
        planned_tokens: int | None = None,
        revision: str | None = None,
        verify: bool = False,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        max_batch: int = DEFAULT_MAX_BATCH,
    ) -> None:
        """Load an artifact.

        Args:
            model: directory of an artifact, or the Hub id of one.
            backend: `auto`, `cuda` or `reference`.
            device: torch device; None takes a CUDA card where there is one.
            decode_mode: weights of the decode path, `int4`, `fp8` or `bf16`; None for int4, on CUDA the first of them
                that the artifact has.
            prefill_mode: `e4m3`, `bf16`, or `decode` (prompts take the decode path); None for e4m3, on CUDA the first
                of them that the artifact has weights for.
            kv_cache: `int4` or `bf16`; None for what the artifact says.
            scale_mode: where E4M3 activation scales come from, `request` (default), `delayed` or `frozen`.
            compute: `exact` (default) rounds activations as the kernels do, `fp32` does not.
            planned_tokens: longest context of a request. A dynamic RoPE scaling fixes its base there, and on CUDA the
                cache is made for `max_batch` such requests, once and for all. None for the model's context, on CUDA as
                far as the card's memory goes.
            revision: branch, tag or commit of a Hub repository.
            verify: check the hash of every file first.
            prefill_chunk: prompts are read in chunks of this many tokens.
            max_batch: most requests that hold a KV cache at once; others wait.

        Raises:
            ArtifactError: no such artifact, or it is damaged.
            UnsupportedError: the backend does not work here, or the artifact lacks the weights a mode needs.
        """
        from fut_runtime.artifact.reader import Artifact

        self.path: Path | None = resolve_artifact(model, revision)
        artifact = Artifact.open(self.path, verify=verify)
        self.manifest: Manifest | None = artifact.manifest
        tokenizer = Tokenizer.from_directory(self.path) if (self.path / "tokenizer.json").is_file() else None
        loaded = load_backend(
            artifact,
            backend,
            device=device,
            decode_mode=decode_mode,
            prefill_mode=prefill_mode,
            kv_cache=kv_cache,
            scale_mode=scale_mode,
            compute=compute,
            planned_tokens=planned_tokens,
            planned_requests=max_batch,
        )
        self._set_up(loaded, tokenizer, prefill_chunk, max_batch)

    @classmethod
    def from_backend(
        cls,
        backend: Backend,
        tokenizer: Tokenizer | None = None,
        *,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        max_batch: int = DEFAULT_MAX_BATCH,
    ) -> Engine:
        """An engine over a backend that is loaded already, such as one of your own."""
        engine = cls.__new__(cls)
        engine.path = engine.manifest = None
        engine._set_up(backend, tokenizer, prefill_chunk, max_batch)
        return engine

    def _set_up(self, backend: Backend, tokenizer: Tokenizer | None, prefill_chunk: int, max_batch: int) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        end = None if tokenizer is None else tokenizer.eos_token_id
        self.eos_ids = frozenset(backend.spec.eos_token_ids) | (frozenset() if end is None else {end})
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._closed = False

    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Generate for several prompts as one batch; the completions are in the order of the prompts.

        Args:
            prompts: a list of prompts, or one text.
            params: for all prompts (each then draws from its own generator, with the same seed), or one each.
                The default is greedy, 256 tokens.

        Raises:
            FutError: a prompt or a parameter is unusable, or the backend fails.
        """
        finished = [event.completion for event in self.events(prompts, params) if event.completion is not None]
        return sorted(finished, key=lambda completion: completion.index)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[TokenEvent, None, None]:
        """Generate for one prompt, an event a token; the last one carries the completion.

        Closing the iterator early, or leaving its loop, cancels the request.
        """
        return self.events([prompt], params)

    def events(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[TokenEvent, None, None]:
        """Generate for several prompts as one batch, an event a token as they come; `event.index` tells whose.

        Prompts are checked here, before the first event is asked for. Arguments as for `generate`.
        """
        return _run(self.new_batch(prompts, params))

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The assistant's next turn of a conversation."""
        return self.generate([messages], params)[0]

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[TokenEvent, None, None]:
        """The assistant's next turn of a conversation, an event a token."""
        return self.stream(messages, params)

    def conversation(self, system: str | None = None) -> Conversation:
        """A conversation that keeps its history, and its KV cache from turn to turn."""
        from fut_runtime.conversation import Conversation

        return Conversation(self, system)

    def new_batch(
        self, prompts: str | Sequence[Prompt] = (), params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> GenerationBatch:
        """A batch for callers with a loop of their own, who may add and cancel requests between its steps.

        Arguments as for `generate`. Use it as a context, so that its caches are freed.
        """
        if self._closed:
            raise FutError("this engine is closed")
        batch = GenerationBatch(
            self.backend,
            self.tokenizer,
            eos_ids=self.eos_ids,
            prefill_chunk=self._prefill_chunk,
            max_batch=self._max_batch,
        )
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        if len(params) != len(listed):
            raise FutError(f"{len(params)} sampling parameters for {len(listed)} prompts: give one, or one each")
        for prompt, each in zip(listed, params, strict=True):
            batch.add(self.encode(prompt), each, continues=not _is_conversation(prompt))
        return batch

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text with the BOS the tokenizer asks for, messages through the chat template.

        Raises:
            TokenizerError: text or messages, but no tokenizer or no chat template.
            PromptError: neither text, nor token ids, nor messages.
        """
        if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
            raise PromptError(f"a prompt is {prompt!r}, expected text, a list of token ids or a list of messages")
        if not isinstance(prompt, str) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            return [i for i in prompt if isinstance(i, int)]
        if self.tokenizer is None:
            where = "this engine" if self.path is None else str(self.path)
            raise TokenizerError(f"{where} has no tokenizer (tokenizer.json), so prompts must be token ids")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]

    def activation_report(self) -> Mapping[str, object]:
        """Scales of the E4M3 activations in force, and how many elements saturated: see `ReportsActivations`.

        Raises:
            FutError: the backend has none to report.
        """
        if not isinstance(self.backend, ReportsActivations):
            raise FutError(f"{type(self.backend).__name__} does not report activation scales")
        return self.backend.activation_report()

    def close(self) -> None:
        """Free the model; warns where its activations saturated a lot. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            try:
                if isinstance(self.backend, ReportsActivations):
                    warning = saturation_warning(self.backend.activation_report())
                    if warning is not None:
                        _LOG.warning("%s", warning)
            finally:
                self.backend.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_conversation(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)


def _run(batch: GenerationBatch) -> Generator[TokenEvent, None, None]:
    with batch:
        while batch.unfinished:
            yield from batch.step()
