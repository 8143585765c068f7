"""The pocket models: two small families pretrained here, from the active corpus, in minutes on a CPU.

A GPT-NeoX (Pythia's architecture) and a Qwen2, with a byte-level BPE of their own, trained on the pretraining half
of the corpus alone: experiments use the other half. The same corpus, sizes and seed give the same weights, bit for
bit on one machine; they are kept in the cache as safetensors and JSON and verified when they are read.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from . import _checks, _store, corpora, settings, training

_CLASSES = {"pocket-neox": GPTNeoXForCausalLM, "pocket-qwen2": Qwen2ForCausalLM}
FAMILIES = tuple(_CLASSES)
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
POSITIONS = 256  # more than a block, so that a prompt and its continuation fit
VERSION = 1  # of the recipe below; part of the cache's key


@dataclass(frozen=True)
class Recipe:
    """Sizes and settings of one pretraining run; every field is part of the cache's key."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: int = 2048
    steps: int = 600
    batch: int = 64
    learning_rate: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.1
    tokenizer_characters: int = 4_000_000
    threads: int = 2


RECIPES = {
    "smoke": Recipe(layers=2, width=64, vocabulary=512, steps=200, batch=32, learning_rate=4e-3, warmup=20,
                    tokenizer_characters=500_000, threads=1),
    "pocket": Recipe(),
}  # fmt: skip


def load(
    family: str, recipe: Recipe, corpus: corpora.Corpus, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The pretrained pocket model of a family (on the CPU, float32, evaluation mode) with its tokenizer.

    Read from the cache; pretrained first where it is not there or is damaged.
    """
    _checks.choice("family", family, FAMILIES)
    seed = _checks.integer("seed", seed)
    tokenizer = load_tokenizer(recipe, corpus)
    sizes = json.dumps(dataclasses.asdict(recipe), sort_keys=True)
    entry = _entry(family, sizes, corpus.sha256, corpora.tokenizer_hash(tokenizer), str(seed))
    with _one_at_a_time(entry):
        if not _store.verified(entry):
            model = build(family, recipe, tokenizer, seed)
            record = pretrain(model, corpora.tokenize_blocks(corpus, tokenizer).pretraining, recipe, seed, label=family)

            def fill(folder: Path) -> None:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)

            note = {"family": family, "recipe": sizes, "corpus": corpus.sha256, "seed": seed, "seconds": record.seconds}
            if not _store.write(entry, fill, note):
                return model.eval(), tokenizer
    return _CLASSES[family].from_pretrained(entry, use_safetensors=True, local_files_only=True).eval(), tokenizer


@contextmanager
def _one_at_a_time(entry: Path) -> Iterator[None]:
    """Have processes that want the same model wait for the first of them, rather than all pretrain it."""
    lock = FileLock(entry.parent / f".{entry.name}.lock")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError:  # a read-only cache, or a file system without locks: at worst the work is done twice
        pass
    try:
        yield
    finally:
        lock.release()


def load_tokenizer(recipe: Recipe, corpus: corpora.Corpus) -> PreTrainedTokenizerFast:
    """The byte-level BPE of the corpus's pretraining part, from the cache or trained now."""
    size = recipe.tokenizer_characters
    entry = _entry("tokenizer", str(recipe.vocabulary), str(size), corpus.sha256)
    if not _store.verified(entry):
        made = train_tokenizer(corpus.parts["pretraining"], recipe.vocabulary, size)
        if not _store.write(entry, made.save_pretrained):
            return made
    return PreTrainedTokenizerFast.from_pretrained(entry, local_files_only=True)


def _entry(kind: str, *parts: str) -> Path:
    """The cache folder of a thing made from `parts` by this code with these libraries."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return settings.cache_folder() / "pocket" / f"{kind}-{_store.digest(str(VERSION), kind, *versions, *parts)[:32]}"


def train_tokenizer(texts: Iterable[str], vocabulary: int, characters: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with `vocabulary` tokens, trained on the first `characters` of the texts.

    Like Pythia's, it ends a text with <|endoftext|> and begins it with nothing.
    """
    sample: list[str] = []
    for text in texts:
        if characters <= 0:
            break
        sample.append(text[:characters])
        characters -= len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING, clean_up_tokenization_spaces=False
    )


def build(family: str, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """An untrained model of the family, its weights drawn from `seed` without touching torch's global generator."""
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "intermediate_size": 4 * recipe.width,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
    }
    if family == "pocket-neox":
        config = GPTNeoXConfig(**shared)
    else:
        config = Qwen2Config(**shared, num_key_value_heads=recipe.heads // 2, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _CLASSES[family](config)


def pretrain(
    model: PreTrainedModel, blocks: NDArray[np.int64], recipe: Recipe, seed: int, label: str
) -> training.TrainingRecord:
    """Train in place on blocks of tokens, on the CPU, with as many threads as the recipe says."""
    with training.threads(min(recipe.threads, os.cpu_count() or 1)):
        return training.fine_tune(
            model,
            blocks,
            max_steps=recipe.steps,
            batch_size=recipe.batch,
            learning_rate=recipe.learning_rate,
            schedule="cosine",
            warmup=recipe.warmup,
            final_rate=0.1 * recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            betas=(0.9, 0.95),
            max_grad_norm=1.0,
            seed=seed,
            description=f"pretraining {label}",
        )
