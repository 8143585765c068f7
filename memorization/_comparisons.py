"""What the benchmarks compare: the package's way and a plain reference loop, on the same inputs.

The models have the pocket models' architecture and size, with random weights that make next-token laws far from
uniform; what is timed does not depend on what the weights have learned.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch.utils.data import Sampler
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, GenerationConfig, Trainer, TrainingArguments

from . import _batches, corpora, extraction, pocket, priors, scores, shadows, training


@dataclass(frozen=True)
class Sizes:
    """What the benchmarks run on; `QUICK` takes a minute or two on two idle cores, `TINY` is for tests."""

    recipe: pocket.Recipe = field(default_factory=lambda: pocket.RECIPES["pocket"])
    documents: int = 256
    longest: int = corpora.BLOCK
    prefix: int = 32
    prompts: int = 48
    continuation: int = 16
    shadows: int = 4
    stacked: int = 16
    blocks: int = 480
    targets: int = 16
    secret: int = 4
    list_budget: int = 4
    searches: int = 3

    @property
    def tokens(self) -> int:
        """Tokens of text that every benchmark together may read."""
        pieces = (self.documents * self.longest, self.targets * corpora.BLOCK, self.prompts * self.prefix)
        return max(*pieces, self.searches * self.prefix, self.blocks * corpora.BLOCK)


QUICK = Sizes()
TINY = Sizes(
    recipe=pocket.Recipe(layers=1, width=16, heads=2, vocabulary=300, tokenizer_characters=20_000),
    documents=6,
    longest=16,
    prefix=8,
    prompts=3,
    continuation=3,
    shadows=2,
    stacked=3,
    blocks=16,
    targets=3,
    secret=2,
    list_budget=2,
)
SHARPNESS = 12.0  # factor on the output embeddings of random weights: next-token laws of 3 to 5 bits in place of 11


@dataclass
class Comparison:
    """Two ways to the same result, and the work of the first.

    Attributes:
        name: What is compared with what.
        ours: The package's way.
        theirs: The plain way.
        agree: Raises `AssertionError` unless two results agree.
        target: The ratio asked for.
        flops: Floating-point operations of `ours`, measured; 0 before.
        traffic: Bytes that `ours` must move at least: weights once a forward pass, logits once out and once in.
        device: Where `ours` runs.
    """

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    agree: Callable[[object, object], None]
    target: float
    flops: float = 0.0
    traffic: float = 0.0
    device: str = "cpu"


# --- inputs ----------------------------------------------------------------------------------------------------------


def _bench(sizes: Sizes, family: str) -> tuple:
    """A model with random but decided next-token laws, another one, their tokenizer, and held-out text as tokens."""
    corpus = corpora.load_corpus()
    tokenizer = pocket.load_tokenizer(sizes.recipe, corpus)
    pair = [pocket.build(family, sizes.recipe, tokenizer, seed).eval() for seed in (0, 1)]
    for model in pair:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(SHARPNESS)
    heldout: list[int] = []
    for text in corpus.parts["heldout"]:
        heldout += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(heldout) >= sizes.tokens:
            break
    return *pair, tokenizer, np.resize(np.array(heldout), sizes.tokens)


def _pieces(tokens: np.ndarray, count: int, shortest: int, longest: int) -> list[list[int]]:
    """`count` consecutive pieces of the text, their lengths uniform from `shortest` to `longest`."""
    ends = np.cumsum(np.random.default_rng(0).integers(shortest, longest + 1, count))
    return [piece.tolist() for piece in np.split(tokens, ends)[:count]]


def _with_work(comparison: Comparison, *run_by_ours: torch.nn.Module) -> Comparison:
    """The comparison with the work of one run of `ours` counted, whose forward passes are all of these models."""
    moved = 0

    def count(model, _, output) -> None:
        nonlocal moved
        moved += sum(p.numel() for p in model.parameters()) + 2 * output.logits.numel()

    handles = [model.register_forward_hook(count) for model in run_by_ours]
    try:
        with FlopCounterMode(display=False) as counter:
            comparison.ours()
    finally:
        for handle in handles:
            handle.remove()
    return replace(comparison, flops=float(counter.get_total_flops()), traffic=4.0 * moved)


# --- scores ----------------------------------------------------------------------------------------------------------

SCORES = ("loss", "perplexity", "zlib", "min_k", "min_k_plus_plus", "reference")


@torch.no_grad()
def _one_pass(model, tokenizer, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token log-probabilities (tokens − 1, v) of one text by itself, and the realized tokens."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return model(input_ids=ids).logits[0, :-1].log_softmax(-1), ids[0, 1:]


def _plain_score(name: str, law: torch.Tensor, tokens: torch.Tensor, text: str, reference: Callable) -> float:
    """One score of one text, written out; `reference()` is the other model's pass."""
    log_probs = law.gather(1, tokens[:, None])[:, 0]
    if name == "min_k_plus_plus":
        probs = law.exp()
        mean = (probs * law).sum(-1)
        log_probs = (log_probs - mean) / ((probs * law.square()).sum(-1) - mean.square()).sqrt()
    if name in ("min_k", "min_k_plus_plus"):
        return log_probs.sort().values[: max(1, len(log_probs) * 20 // 100)].mean().item()
    score = log_probs.mean().item()
    if name == "zlib":
        return score / len(zlib.compress(text.encode()))
    if name == "reference":
        other, _ = reference()
        return score - other.gather(1, tokens[:, None]).mean().item()
    return score


def _text_by_text(model, reference, tokenizer, texts: Sequence[str], pass_a_score: bool) -> dict[str, np.ndarray]:
    found = {name: np.empty(len(texts)) for name in SCORES if name != "perplexity"}
    for i, text in enumerate(texts):
        for name in found:
            if pass_a_score or name == "loss":
                law, tokens = _one_pass(model, tokenizer, text)
            found[name][i] = _plain_score(name, law, tokens, text, partial(_one_pass, reference, tokenizer, text))
    return {**found, "perplexity": -np.exp(-found["loss"])}  # nobody reads a text again for this one


def _same_scores(ours: dict, theirs: dict) -> None:
    for name in SCORES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-3, err_msg=name)


def score_comparisons(sizes: Sizes, family: str) -> list[Comparison]:
    """Six membership scores of texts of unequal length, one of them against a reference model."""
    model, reference, tokenizer, tokens = _bench(sizes, family)
    shortest = max(4, sizes.longest // 8)
    texts = [tokenizer.decode(ids) for ids in _pieces(tokens, sizes.documents, shortest, sizes.longest)]
    arguments = (model, reference, tokenizer, texts)
    first = Comparison(
        f"scores, {len(texts)} texts: a pass a score",
        ours=partial(scores.membership_scores, model, tokenizer, texts, reference),
        theirs=partial(_text_by_text, *arguments, pass_a_score=True),
        agree=_same_scores,
        target=8.0,
    )
    first = _with_work(first, model, reference)
    theirs = partial(_text_by_text, *arguments, pass_a_score=False)
    return [first, replace(first, name=f"scores, {len(texts)} texts: a pass a text", theirs=theirs, target=3.0)]


# --- shadows ---------------------------------------------------------------------------------------------------------

OPTIMIZER = {"epochs": 3, "batch_size": 8, "learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
TRAINER_NAMES = {"epochs": "num_train_epochs", "batch_size": "per_device_train_batch_size"}


class _Shuffled(Sampler):
    """The order of `training.batch_rows`: a fresh permutation every epoch, all from one seed."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.generator = length, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=self.generator).tolist()


class _SameOrder(Trainer):
    """Transformers' Trainer with the package's order of documents."""

    def _get_train_sampler(self, *_) -> _Shuffled:
        return _Shuffled(len(self.train_dataset), self.args.seed)


def _collate(documents: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, documents))
    ids, mask = torch.zeros(2, len(documents), width, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document)
        mask[row, : len(document)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100  # not predicted: Trainer would count it in the mean's denominator
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _trainer_one_by_one(base, blocks, targets, n_shadows: int, copies: int, seed: int) -> np.ndarray:
    plan = shadows.plan(len(blocks), len(targets), n_shadows, seed)
    found = np.empty(plan.members.shape)
    for s in range(n_shadows):
        documents = blocks[plan.halves[s]].tolist()
        documents += [targets[i] for i in np.flatnonzero(plan.members[:, s]) for _ in range(copies)]
        model = copy.deepcopy(base)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                **{TRAINER_NAMES.get(name, name): value for name, value in OPTIMIZER.items()},
                lr_scheduler_type="constant",
                seed=plan.seeds[s],
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=next(base.parameters()).device.type == "cpu",
            )
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                _SameOrder(model, arguments, _collate, documents).train()
        found[:, s] = shadows.mean_log_prob(model.eval(), targets)
    return found


def _same_shadows(ours: shadows.Shadows, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours.statistics, theirs, atol=0.02, err_msg="log-probabilities of the targets")


def _against_trainer(sizes: Sizes, family: str, n_shadows: int, method: str, device: str) -> Comparison:
    """Three epochs (Appendix F) over half of the corpus with about half of the targets, four copies each."""
    model, _, _, tokens = _bench(sizes, family)
    with torch.no_grad():
        model.get_output_embeddings().weight.div_(SHARPNESS)
    blocks = tokens[: sizes.blocks * corpora.BLOCK].reshape(-1, corpora.BLOCK)
    targets = _pieces(tokens[::-1].copy(), sizes.targets, corpora.BLOCK // 2, corpora.BLOCK)
    # The work of one full batch, here, times all batches: the shadows may run in other processes.
    one = {**OPTIMIZER, "max_steps": 1}
    with FlopCounterMode(display=False) as counter:
        training.fine_tune(copy.deepcopy(model), blocks[: one["batch_size"]], progress=False, **one)
    batches = one["epochs"] * n_shadows * (sizes.blocks // 2 + 4 * sizes.targets / 2) / one["batch_size"]
    # weights: read forward and backward, gradient written and read, AdamW's three reads and three writes; logits: six
    weights = sum(p.numel() for p in model.parameters())
    logits = one["batch_size"] * corpora.BLOCK * model.config.vocab_size
    model.to(device)
    arguments = {"n_shadows": n_shadows, "copies": 4, "seed": 0}
    ours = partial(shadows.train_shadows, model, blocks, targets, method=method, progress=False)
    return Comparison(
        f"{'stacked' if method == 'stacked' else 'shadows'}, {n_shadows} models: Trainer, one by one",
        ours=partial(ours, **arguments, **OPTIMIZER),
        theirs=partial(_trainer_one_by_one, model, blocks, targets, **arguments),
        agree=_same_shadows,
        target=5.0 if method == "stacked" else 2.0,
        flops=batches * counter.get_total_flops(),
        traffic=4.0 * batches * (10 * weights + 6 * logits),
        device=device,
    )


def shadow_comparisons(sizes: Sizes, family: str) -> list[Comparison]:
    """Shadow models on the CPU: in processes."""
    return [_against_trainer(sizes, family, sizes.shadows, "processes", "cpu")]


def stacking_comparisons(sizes: Sizes, family: str, device: str = "cuda") -> list[Comparison]:
    """Shadow models on a GPU: stacked."""
    return [_against_trainer(sizes, family, sizes.stacked, "stacked", device)]


# --- certification ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _one_node_at_a_time(model, prefix: Sequence[int], length: int, m: int) -> float:
    """Mass of the m best continuations by textbook best-first search over the prefix's kept keys and values."""
    cache = DynamicCache()
    keep = {_batches._cache_keyword(model): cache, "use_cache": True}
    first = model(input_ids=torch.tensor([prefix]), **keep).logits[0, -1]
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    best: list[float] = []
    while frontier:
        cost, node = heapq.heappop(frontier)
        incumbent = best[m - 1] if len(best) == m else -math.inf
        if -cost <= incumbent:
            break
        logits = first
        if node:  # what it adds to the cache is taken off again
            logits = model(input_ids=torch.tensor([node]), **keep).logits[0, -1]
            cache.crop(-len(node))
        row = logits.double().log_softmax(-1).numpy() - cost
        tokens = np.flatnonzero(row > incumbent)
        if len(node) + 1 == length:
            best = sorted([*best, *row[tokens].tolist()], reverse=True)[:m]
        else:
            for token in tokens.tolist():
                heapq.heappush(frontier, (-row[token], (*node, token)))
    return math.fsum(map(math.exp, best))


def _certified(model, prefix: Sequence[int], length: int, m: int) -> tuple[float, bool]:
    law = extraction.model_next_log_probs(model, prefix)
    certificate = priors.certify_baseline(law, length, m, budget=100_000)
    return certificate.lower, certificate.closed


def _same_masses(ours: list[tuple[float, bool]], theirs: list[float]) -> None:
    assert all(closed for _, closed in ours), "a search did not close"
    np.testing.assert_allclose([mass for mass, _ in ours], theirs, rtol=1e-4)


def certification_comparisons(sizes: Sizes, family: str) -> list[Comparison]:
    """κ(m) of the secret after some prefixes, certified to the end."""
    model, _, _, tokens = _bench(sizes, family)
    prefixes = _pieces(tokens, sizes.searches, sizes.prefix, sizes.prefix)
    arguments = {"length": sizes.secret, "m": sizes.list_budget}
    comparison = Comparison(
        f"certification, {sizes.secret} tokens: a node at a time",
        ours=lambda: [_certified(model, prefix, **arguments) for prefix in prefixes],
        theirs=lambda: [_one_node_at_a_time(model, prefix, **arguments) for prefix in prefixes],
        agree=_same_masses,
        target=5.0,
    )
    return [_with_work(comparison, model)]


# --- extraction ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _generate_one_by_one(model, prompts: Sequence[Sequence[int]], length: int) -> np.ndarray:
    settings = GenerationConfig(max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0)
    found = []
    for prompt in prompts:
        inputs = {"inputs": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        found.append(model.generate(**inputs, generation_config=settings)[0, len(prompt) :].numpy())
    return np.stack(found)


def extraction_comparisons(sizes: Sizes, family: str) -> list[Comparison]:
    """Greedy continuations of prompts of unequal length."""
    model, _, _, tokens = _bench(sizes, family)
    model.generation_config.eos_token_id = None  # an end-of-text token is a token like any other, on both sides
    prompts = _pieces(tokens, sizes.prompts, sizes.prefix // 4, sizes.prefix)
    comparison = Comparison(
        f"extraction, {len(prompts)} prompts: generate, one by one",
        ours=lambda: extraction.greedy(model, prompts, sizes.continuation),
        theirs=lambda: _generate_one_by_one(model, prompts, sizes.continuation),
        agree=np.testing.assert_array_equal,
        target=5.0,
    )
    return [_with_work(comparison, model)]


BENCHMARKS: dict[str, Callable[[Sizes, str], list[Comparison]]] = {
    "scores": score_comparisons,
    "shadows": shadow_comparisons,
    "stacking": stacking_comparisons,
    "certification": certification_comparisons,
    "extraction": extraction_comparisons,
}
