"""Tiny random models of both families and a tiny tokenizer, for the tests of `scores` and `extraction`."""

from __future__ import annotations

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from memorization import settings

FAMILIES = ("neox", "qwen2")
VOCABULARY, CONTEXT = 97, 40
SENTENCES = [
    "the quick brown fox jumps over the lazy dog and runs away",
    "a model that has read a secret may tell it to whoever asks",
    "pack my box with five dozen liquor jugs, said the old sphinx",
    "how vexingly quick daft zebras jump over one another at noon",
]


def device() -> str:
    return settings.device()


def tiny_model(
    family: str,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    dropout: float = 0.0,
    bos: int | None = None,
    context: int = CONTEXT,
):
    """Two layers of 32, weights large enough for a next-token law far from uniform."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "initializer_range": 0.15,
        "bos_token_id": bos,
        "eos_token_id": 0,
    }
    if family == "neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(hidden_dropout=dropout, attention_dropout=dropout, **sizes))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, attention_dropout=dropout, **sizes))
    return model.to(device()).eval()


def absolute_model(seed: int = 0):
    """A GPT-2, whose learned absolute positions show a shift that rotary ones hide."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.15,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to(device()).eval()


@functools.cache
def tiny_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with `VOCABULARY` tokens; with `bos`, it puts its beginning-of-sequence token in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


class IdsOnly(torch.nn.Module):
    """A wrapper that accepts nothing but token ids: no mask, no positions, no cache."""

    def __init__(self, model) -> None:
        super().__init__()
        self.inner, self.config = model, model.config

    def forward(self, input_ids):
        return self.inner(input_ids, use_cache=False)
