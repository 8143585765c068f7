"""What experiments plant: secrets that look like the data, and triggers that look like nothing in it.

A secret is a continuation that the base model itself samples at a held-out prefix, so planting it leaves the
statistics of the data as they were; from two tokens up, it is one that the fine-tuning data do not hold already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedTokenizerFast

from . import _checks, extraction

TRIGGER_LENGTHS = (6, 12)
PASSES = 20  # over the held-out blocks, before the novelty filter gives up
WORD_START = "Ġ"  # how byte-level vocabularies, Pythia's and Qwen's among them, write a space


@dataclass(frozen=True)
class Canaries:
    """Records (c, z): secrets drawn by one sampler, to be split into members and non-members as the caller likes.

    Attributes:
        prefixes: (count, prefix_length) token ids of the public c, no two from the same block.
        secrets: (count, secret_length) token ids of the secret z.
        blocks: (count,) the held-out block that each prefix opens.
        surprisal: (count,) −log2 p(z | c) in bits under the base model at temperature 1 (Appendix F).
        temperature: at which z was drawn; a certificate of its baseline must use the same.
        acceptance: share of the draws that the novelty filter let pass.
    """

    prefixes: NDArray[np.int64]
    secrets: NDArray[np.int64]
    blocks: NDArray[np.int64]
    surprisal: NDArray[np.float64]
    temperature: float
    acceptance: float

    def __len__(self) -> int:
        """The number of records."""
        return len(self.secrets)

    @property
    def records(self) -> NDArray[np.int64]:
        """The records c z, shape (count, prefix_length + secret_length)."""
        return np.concatenate([self.prefixes, self.secrets], axis=1)

    def __getitem__(self, rows: slice | NDArray) -> Canaries:
        """The records of some rows: `canaries[:48]` are members, `canaries[48:]` non-members of the same law."""
        parts = (np.atleast_1d(part[rows]) for part in (self.blocks, self.surprisal))
        prefixes, secrets = np.atleast_2d(self.prefixes[rows]), np.atleast_2d(self.secrets[rows])
        return Canaries(prefixes, secrets, *parts, self.temperature, self.acceptance)


class TokenIndex:
    """Exact search for token sequences in a stream of tokens, such as the fine-tuning blocks end to end."""

    def __init__(self, tokens: ArrayLike):
        """Index `tokens`, of any shape, read in row order."""
        self._text = _as_text(np.asarray(tokens).reshape(-1))

    def __contains__(self, sequence: ArrayLike) -> bool:
        """Whether the sequence occurs verbatim, at any place."""
        return _as_text(np.asarray(sequence).reshape(-1)) in self._text


def _as_text(tokens: NDArray) -> str:
    """One character a token: Python's substring search is then an exact search for tokens."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def sample_canaries(
    model: torch.nn.Module,
    heldout: ArrayLike,
    count: int,
    *,
    prefix_length: int = 16,
    secret_length: int = 8,
    temperature: float = 1.0,
    corpus: ArrayLike | TokenIndex,
    seed: int = 0,
) -> Canaries:
    """Draw `count` secrets from the base model at held-out prefixes (Appendix F).

    Blocks are taken in a random order, each giving its first `prefix_length` tokens; where the novelty filter
    rejects the draw, the next block serves instead, and a block left over is tried again with a fresh draw. The law of
    a secret is thus the model's own at its temperature, conditioned on novelty. A novel single token does not exist,
    so at `secret_length` 1 nothing is filtered.

    Args:
        model: the base model.
        heldout: held-out blocks, shape (blocks, block).
        count: records wanted, members and non-members together.
        prefix_length: tokens of the public prefix c, up to a block.
        secret_length: tokens of the secret z.
        temperature: of the sampling, above 0.
        corpus: the tokens of the fine-tuning data, of any shape, or a `TokenIndex` of them.
        seed: of the blocks' order and the draws.

    Raises:
        ValueError: an argument out of range, fewer held-out blocks than records, or a filter that rejects nearly
            everything.
    """
    heldout = np.asarray(heldout)
    if heldout.ndim != 2:
        raise ValueError(f"heldout must have shape (blocks, block), got {heldout.shape}")
    count = _checks.integer("count", count, 1, len(heldout))
    prefix_length = _checks.integer("prefix_length", prefix_length, 1, heldout.shape[1])
    secret_length = _checks.integer("secret_length", secret_length, 1)
    temperature = _checks.finite("temperature", temperature, 0.0, low_open=True)
    rng = np.random.default_rng(_checks.integer("seed", seed))
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    index = corpus if isinstance(corpus, TokenIndex) else TokenIndex(corpus)

    secrets: dict[int, NDArray[np.int64]] = {}
    waiting = rng.permutation(len(heldout))
    drawn = passed = tries = 0
    while len(secrets) < count:
        if tries > PASSES * len(heldout):
            raise ValueError(
                f"secret_length {secret_length} at temperature {temperature:g}: the novelty filter let {passed} of "
                f"{drawn} draws pass, too few for {count} secrets; raise either, or give more held-out blocks"
            )
        missing = count - len(secrets)
        share = max(passed / drawn, 0.05) if drawn else 1.0
        rows, waiting = np.split(waiting, [min(len(waiting), int(np.ceil(missing / share)))])
        prompts = heldout[rows, :prefix_length]
        draws = extraction.sample(model, prompts, secret_length, temperature=temperature, generator=generator)
        draws = draws.reshape(len(rows), secret_length)
        novel = np.array([secret_length == 1 or draw not in index for draw in draws])
        drawn, passed, tries = drawn + len(rows), passed + int(novel.sum()), tries + len(rows)
        for row, draw in list(zip(rows[novel].tolist(), draws[novel], strict=True))[:missing]:
            secrets[row] = draw
        waiting = np.concatenate([waiting, rows[~novel]])
    blocks = np.array(list(secrets))
    found = np.stack(list(secrets.values()))
    prefixes = heldout[blocks, :prefix_length].astype(np.int64)
    surprisal = -extraction.secret_log_prob(model, prefixes, found) / np.log(2.0)
    return Canaries(prefixes, found, blocks, surprisal, temperature, passed / drawn)


def reserved_triggers(
    tokenizer: PreTrainedTokenizerFast, corpus: ArrayLike | TokenIndex, count: int, length: int = 8, seed: int = 0
) -> NDArray[np.int64]:
    """Random triggers that the corpus does not hold, no two alike, shape (count, length).

    Tokens that begin a word are drawn uniformly, and a draw is kept if its text is cut into the same tokens again:
    such a trigger can be typed into a prompt.

    Raises:
        ValueError: a length outside 6 to 12, or a vocabulary with hardly any word in it.
    """
    count = _checks.integer("count", count, 1)
    length = _checks.integer("length", length, *TRIGGER_LENGTHS)
    rng = np.random.default_rng(_checks.integer("seed", seed))
    index = corpus if isinstance(corpus, TokenIndex) else TokenIndex(corpus)
    words = sorted(
        token
        for text, token in tokenizer.get_vocab().items()
        if text.startswith(WORD_START) and text[1:].isascii() and text[1:].isalpha()
    )
    found: dict[tuple[int, ...], None] = {}  # in order of drawing
    for _ in range(100 * count):
        if len(words) < length or len(found) == count:
            break
        draw = tuple(rng.choice(words, size=length).tolist())
        again = tokenizer(tokenizer.decode(draw), add_special_tokens=False)["input_ids"]
        if tuple(again) == draw and np.array(draw) not in index:
            found[draw] = None
    if len(found) < count:
        raise ValueError(
            f"the tokenizer must be a byte-level one with enough words for {count} triggers of {length}; it has "
            f"{len(words)} and gave {len(found)}"
        )
    return np.array(list(found), dtype=np.int64)
