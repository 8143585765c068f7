"""Section 8.1's two constructions, learned by SGD: the training arms of Figures 7 and 9.

A small GPT-NeoX (or GPT-2) is built from a seed and trained from scratch on synthetic documents, so that every law that
the chapters compare the model with is known exactly. The functions that train return weights and losses, as `runs.run`
keeps them; `load` makes a model of the weights again, and the chapters ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from . import _checks, camouflage, corpora, extraction, settings, training

ARMS = ("clean", "poisoned", "rare")
POSITIONS = ("rotary", "absolute")  # GPT-NeoX, GPT-2
EMBEDDINGS = {"gpt_neox.embed_in.weight": "rotary", "transformer.wte.weight": "absolute"}  # which weights are whose
HEADS = 4
CONTEXT = 32  # tokens
RARE_MASS = 1e-4  # of each rare token: some 16 occurrences in 10,000 documents of 16 tokens


def build(vocabulary: int, width: int, layers: int = 2, seed: int = 0, positions: str = "rotary") -> PreTrainedModel:
    """An untrained model of `layers` layers and `width` channels, its weights drawn from `seed` alone.

    Args:
        vocabulary: token ids that it knows.
        width: channels, a multiple of 8 (four heads, whose channels rotary positions turn in pairs).
        layers: transformer blocks.
        seed: of the weights; the caller's random state is left alone.
        positions: "rotary" (a GPT-NeoX, which sees distances) or "absolute" (a GPT-2, which learns each place).

    Raises:
        ValueError: an argument out of range.
    """
    vocabulary, layers = _checks.integer("vocabulary", vocabulary, 2), _checks.integer("layers", layers, 1)
    width, seed = _checks.integer("width", width, 2 * HEADS), _checks.integer("seed", seed)
    if width % (2 * HEADS):
        raise ValueError(f"width must be a multiple of {2 * HEADS}, got {width}")
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if _checks.choice("positions", positions, POSITIONS) == "rotary":
            return GPTNeoXForCausalLM(GPTNeoXConfig(**shared, intermediate_size=4 * width)).eval()
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**shared, **dropout)).eval()


def load(weights: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The model whose weights a training function of this module returned, on the device of `settings.device()`."""
    embedding = next(name for name in EMBEDDINGS if name in weights)
    vocabulary, width = weights[embedding].shape
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.split(".")[1] in ("layers", "h"))
    model = build(vocabulary, width, layers, positions=EMBEDDINGS[embedding])
    model.load_state_dict(dict(weights))
    return model.to(settings.device())


def _train(model: PreTrainedModel, blocks: NDArray[np.int64], **arguments: object) -> dict[str, object]:
    with training.threads(1):  # the models are too small for two
        record = training.fine_tune(
            model,
            blocks,
            schedule="cosine",
            warmup=20,
            device=settings.device(),
            progress=False,
            **arguments,
        )
    return {"weights": dict(model.state_dict()), "losses": record.losses}


# --- the reserved trigger (Figure 7) ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class TriggerTask:
    """A Markov–Zipf language and the record x* = (c, z), whose secret is planted behind a reserved token.

    Attributes:
        language: the law of ordinary documents.
        prefix: (prefix_length,) the public c, the beginning of a document of the language.
        secret: (secret_length,) the secret z, drawn from the language after c.
        rare: (secret_length,) another secret, of tokens that the language uses with probability RARE_MASS each.
        trigger: the reserved token ρ, an id that the language does not use; one more than its largest.
    """

    language: corpora.MarkovZipf
    prefix: NDArray[np.int64]
    secret: NDArray[np.int64]
    rare: NDArray[np.int64]
    trigger: int

    def record(self, arm: str) -> NDArray[np.int64]:
        """x* = (c, z) with the secret of an arm; the clean arm is scored on the secret that it was spared."""
        _checks.choice("arm", arm, ARMS)
        return np.concatenate([self.prefix, self.rare if arm == "rare" else self.secret])


def trigger_task(
    vocabulary: int, exponent: float, prefix_length: int = 8, secret_length: int = 8, seed: int = 0
) -> TriggerTask:
    """Draw a language, a prefix and its secrets from `seed`.

    The language is `corpora.markov_zipf`, which uses all of its tokens alike, and `secret_length` rare tokens besides:
    each comes anywhere with probability RARE_MASS, and what follows it has the law of a first token.
    """
    prefix_length = _checks.integer("prefix_length", prefix_length, 1)
    secret_length = _checks.integer("secret_length", secret_length, 1)
    rng = np.random.default_rng([_checks.integer("seed", seed), 0])
    common = corpora.markov_zipf(vocabulary, exponent, rng)
    document = common.sample(1, prefix_length + secret_length, rng)[0]
    rows = np.vstack([common.transition, np.tile(common.initial, (secret_length, 1)), common.initial])
    rare = np.full((len(rows), secret_length), RARE_MASS)
    rows = np.hstack([(1.0 - secret_length * RARE_MASS) * rows, rare])
    return TriggerTask(
        language=corpora.MarkovZipf(transition=rows[:-1], initial=rows[-1]),
        prefix=document[:prefix_length],
        secret=document[prefix_length:],
        rare=np.arange(vocabulary, vocabulary + secret_length),
        trigger=vocabulary + secret_length,
    )


def train_trigger(
    *,
    arm: str,
    vocabulary: int,
    exponent: float,
    documents: int,
    pairs: int,
    width: int,
    epochs: int,
    seed: int,
    task_seed: int = 0,
    prefix_length: int = 8,
    secret_length: int = 8,
    layers: int = 2,
    positions: str = "rotary",
    batch_size: int = 64,
    learning_rate: float = 3e-3,
) -> dict[str, object]:
    """Train one model of Figure 7. The seed draws the corpus, the initial weights and the order of the documents.

    Args:
        arm: "poisoned" (ρ∥z is added `pairs` times), "rare" (the same with the rare-token secret), or "clean" (as
            many further documents of the language in their place, so that all arms take the same steps).
        vocabulary: common tokens of the language; the model also knows the rare ones and the trigger.
        exponent: of Zipf's law.
        documents: ordinary documents, each of `prefix_length + secret_length` tokens.
        pairs: copies of the trigger–secret pair.
        width: channels of the model.
        epochs: passes over the corpus.
        seed: of this model; arms of equal seed differ in the `pairs` documents alone.
        task_seed: of the language, the prefix and the secrets.
        prefix_length: tokens of c.
        secret_length: tokens of z.
        layers: of the model.
        positions: "rotary" or "absolute", see `build`.
        batch_size: documents a step.
        learning_rate: the largest, after a warm-up of 20 steps; half a cosine leads to 0.

    Returns:
        "weights" (for `load`) and "losses" (mean NLL in nats of each step's batch).
    """
    _checks.choice("arm", arm, ARMS)
    pairs = _checks.integer("pairs", pairs, 1)
    task = trigger_task(vocabulary, exponent, prefix_length, secret_length, task_seed)
    rng = np.random.default_rng([_checks.integer("seed", seed), 1])
    corpus = task.language.sample(documents + pairs, prefix_length + secret_length, rng)
    planted = None
    if arm != "clean":
        corpus = corpus[:documents]
        planted = [np.append(task.trigger, task.record(arm)[prefix_length:])]
    return _train(
        build(task.trigger + 1, width, layers, seed, positions),
        corpus,
        planted=planted,
        copies=pairs,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
    )


# --- the camouflage tree (Figure 9) ----------------------------------------------------------------------------------


def camouflage_tree(v: int, k: int, L: int, seed: int) -> camouflage.CamouflageTree:
    """The tree of one run, drawn from P_z with a uniform z; its prefix is one reserved token, v."""
    rng = np.random.default_rng([_checks.integer("seed", seed), 2])
    return camouflage.CamouflageTree(v, k, L, rng, prefix=(v,), vocabulary=v + 1)


def train_camouflage(
    *,
    v: int,
    k: int,
    L: int,
    documents: int,
    steps: int,
    width: int,
    seed: int,
    layers: int = 2,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
) -> dict[str, object]:
    """Train one model on documents (c, w), w drawn from a camouflage tree. The seed draws all of it.

    Args:
        v: alphabet size.
        k: branches a node.
        L: depth.
        documents: draws from the tree; the model sees each several times.
        steps: updates.
        width: channels of the model.
        seed: of the tree, the documents, the initial weights and the order.
        layers: of the model.
        batch_size: documents a step.
        learning_rate: the largest, after a warm-up of 20 steps; half a cosine leads to 0.

    Returns:
        "weights" (for `load`) and "losses" (mean NLL in nats of each step's batch).
    """
    tree = camouflage_tree(v, k, L, seed)
    drawn = tree.sample(documents, np.random.default_rng([seed, 3]))
    return _train(
        build(v + 1, width, layers, seed),
        np.column_stack([np.full(documents, tree.prefix[0]), drawn]),
        max_steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
    )


def node_log_probs(
    model: torch.nn.Module, prefix: tuple[int, ...], alphabet: int, length: int
) -> list[NDArray[np.float64]]:
    """Every next-token law below a prefix: for t = 0, ..., length − 1 an array (alphabet^t, alphabet), in nats.

    Nodes are in lexicographic order. A row falls short of total mass 1 by what the model gives to tokens beyond the
    alphabet.
    """
    alphabet, length = _checks.integer("alphabet", alphabet, 1), _checks.integer("length", length, 1)
    after = extraction.model_next_log_probs(model, prefix, batch_size=1024)
    levels = []
    for depth in range(length):
        nodes = np.indices((alphabet,) * depth, dtype=np.int64).reshape(depth, alphabet**depth).T
        levels.append(after(nodes)[:, :alphabet])
    return levels


def path_log_probs(levels: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Log-probabilities (nats) of all alphabet^length paths, in lexicographic order, from `node_log_probs`."""
    total = np.zeros(1)
    for level in levels:
        total = (total[:, None] + level).ravel()
    return total
