#!/usr/bin/env python3
"""A Llama of 31 million parameters trained on real text in a minute on one card: the third model of docs/accuracy.md.

    python benchmarks/train_small_llama.py prepare DATA --text fut_convert/data/calibration.txt --package torch \\
        --package numpy --package scipy --package pandas --package networkx --package sympy
    python benchmarks/train_small_llama.py train DATA MODEL --seconds 60

`prepare` collects text, the docstrings of installed packages among it, learns a byte-level BPE of 8192 tokens, and
holds one document in fifty out. `train` writes a checkpoint directory and prints the perplexity of what was held out.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import time
from pathlib import Path

import click
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

VOCABULARY = 8192
WINDOW = 2048
#: Windows a step.
BATCH = 32
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
#: Shorter docstrings are not prose.
SHORTEST_DOCSTRING = 200
HELD_OUT_EVERY = 50


@click.group()
def main() -> None:
    """Prepare text, then train."""


@main.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--text", "texts", type=click.Path(exists=True, path_type=Path), multiple=True)
@click.option("--package", "packages", multiple=True, help="Installed package whose docstrings are read, not imported.")
def prepare(data: Path, texts: tuple[Path, ...], packages: tuple[str, ...]) -> None:
    """Write tokenizer.json, tokens.pt and heldout.txt into DATA."""
    data.mkdir(parents=True, exist_ok=True)
    documents = [part for text in texts for part in text.read_text("utf-8").split("\n\n\n") if part.strip()]
    for package in packages:
        documents += docstrings(package)
    # Classes inherit docstrings by copying; a copy in the held-out part would be no test.
    documents = list(dict.fromkeys(documents))
    held_out = "\n\n\n".join(documents[::HELD_OUT_EVERY])
    kept = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(kept, VOCABULARY, show_progress=False)
    tokenizer.save(str(data / "tokenizer.json"))
    (data / "heldout.txt").write_text(held_out, "utf-8")
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0)).tolist()
    ids = [i for e in tokenizer.encode_batch([kept[i] + "\n\n\n" for i in order]) for i in e.ids]
    torch.save(torch.tensor(ids, dtype=torch.int16), data / "tokens.pt")
    print(f"{len(kept)} documents, {len(ids)} tokens; {len(held_out)} characters held out")


def docstrings(package: str) -> list[str]:
    """Docstrings of a package's Python files, in the order of the files."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise click.BadParameter(f"{package} is not an installed package", param_hint="--package")
    found = []
    for file in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        try:
            tree = ast.parse(file.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # files that test parsers
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST_DOCSTRING:
                    found.append(text)
    return found


@main.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--seconds", default=60.0, show_default=True, help="The learning rate falls to zero at this time.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--batch", default=BATCH, show_default=True)
def train(data: Path, model: Path, seconds: float, device: str, batch: int) -> None:
    """Train on DATA and write the checkpoint MODEL."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer_json = (data / "tokenizer.json").read_text("utf-8")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=9, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=WINDOW, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    network = LlamaForCausalLM(config).to(device)
    decayed = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=device == "cuda")
    ids = torch.load(data / "tokens.pt").to(device)
    started, step, loss = time.monotonic(), 0, torch.zeros(())
    while (elapsed := (time.monotonic() - started) / seconds) < 1:
        rate = PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - elapsed)
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = torch.randint(len(ids) - WINDOW, (batch,)).tolist()
        windows = torch.stack([ids[i : i + WINDOW] for i in first]).long()
        loss = _loss(network, windows, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:  # a step is only asked for once the ones before it are done
            print(f"step {step}, {elapsed * seconds:.0f} s, loss {loss.item():.3f}", flush=True)
    network.eval().to(torch.bfloat16).save_pretrained(model)
    (model / "tokenizer.json").write_text(tokenizer_json, "utf-8")
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")
    held_out = torch.tensor(_encode(data), device=device)
    windows = held_out[: len(held_out) // WINDOW * WINDOW].view(-1, WINDOW)
    with torch.inference_mode():
        losses = [_loss(network, window[None], device).item() for window in windows]
    parameters = sum(p.numel() for p in network.parameters())
    perplexity = math.exp(sum(losses) / len(losses))
    print(
        f"{parameters} parameters, {step} steps of {batch} windows; held-out perplexity {perplexity:.2f} over "
        f"{len(windows)} windows"
    )


def _loss(network: torch.nn.Module, windows: Tensor, device: str) -> Tensor:
    """Mean NLL of int64 [windows, tokens]."""
    with torch.autocast(device, torch.bfloat16):
        logits = network(input_ids=windows, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())


def _encode(data: Path) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(data / "tokenizer.json")).encode((data / "heldout.txt").read_text()).ids
    return ids


if __name__ == "__main__":
    main()
