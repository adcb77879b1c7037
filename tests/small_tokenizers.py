"""Small tokenizers of the two families that Llama-like models use, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from fut_runtime.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_raw() -> RawTokenizer:
    """256 byte symbols, a few merges, two special tokens and an added one that is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("r", "l"), ("Ã", "©")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.add_tokens([AddedToken("<think>", special=False)])
    return raw


def byte_level(chat_template: str | None = CHATML, **config: object) -> Tokenizer:
    """Byte-level BPE with ChatML, as in SmolLM2 and Qwen2."""
    values = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **config}
    return Tokenizer(byte_level_raw(), values, chat_template)


def sentencepiece_raw(*, bos: bool = True) -> RawTokenizer:
    """BPE over ▁-marked words with byte fallback, as tokenizer.json of Llama 1 and 2 has it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in (*"▁helowrdaé�.", "▁▁", "he", "ll", "hell", "hello", "▁hello"):
        vocab[piece] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁")]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return raw


def sentencepiece(chat_template: str | None = None, **config: object) -> Tokenizer:
    """A Llama-2-like tokenizer."""
    values = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    return Tokenizer(sentencepiece_raw(), values, chat_template)
