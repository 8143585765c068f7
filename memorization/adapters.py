"""One game for tables and networks: a table behind a language model's interface, and the other way round.

`TableModel` lets `extraction` and `scores` run on an explicit conditional table as they do on a network;
`NetworkTable` lets the constructions and kernels of `constructions` be put over a network.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from . import _batches
from .tables import Conditionals, Prefix


class TableModel(torch.nn.Module):
    """A table as a causal language model: `forward(input_ids).logits` are its log-probabilities after every prefix.

    Attributes:
        table: the model that answers.
        config: what the package reads of a transformers configuration.
    """

    def __init__(self, table: Conditionals, device: str | torch.device = "cpu", dtype=torch.float32) -> None:
        """Wrap `table`; logits come on `device` in `dtype`."""
        super().__init__()
        self.table = table
        self.config = SimpleNamespace(vocab_size=table.vocabulary, bos_token_id=None)
        self.place = torch.nn.Parameter(torch.zeros(0, device=device, dtype=dtype), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """Logits (b, t, v): entry [i, j] is the law after the first j + 1 tokens of row i."""
        ids = input_ids.cpu().numpy()
        laws = np.stack([self.table.next_log_probs(ids[:, : end + 1]) for end in range(ids.shape[1])], axis=1)
        return SimpleNamespace(logits=torch.from_numpy(laws).to(self.place))


class NetworkTable(Conditionals):
    """A causal language model of transformers as a family of next-token laws, in float64; prompts of at least a token.

    Attributes:
        model: the network that answers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Wrap `model`; its mode is restored after every query."""
        self.model, self.vocabulary = model, _batches.vocabulary_size(model)

    def row(self, prefix: Prefix) -> NDArray[np.float64]:
        """The next-token law (vocabulary,) after one prompt."""
        return self.next_probs([prefix])[0]

    def next_probs(self, prefixes: ArrayLike) -> NDArray[np.float64]:
        """Next-token probabilities (b, vocabulary) after prompts (b, t)."""
        return np.exp(self.next_log_probs(prefixes))

    def next_log_probs(self, prefixes: ArrayLike) -> NDArray[np.float64]:
        """Natural-log next-token probabilities (b, vocabulary), from one forward pass.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, a prompt beyond the context.
            FloatingPointError: the model gives NaN.
        """
        arrays = _batches.token_sequences("prefixes", self._prefixes(prefixes), self.model)
        with _batches.evaluation(self.model):
            logits = _batches.read(self.model, arrays).logits.float().cpu().double()
        if not torch.isfinite(logits.amax(-1)).all():
            raise _batches.broken("a prompt")
        return torch.log_softmax(logits, dim=-1).numpy()


class SymbolTokenizer:
    """The tokenizer of a table: token i is written as the i-th symbol, so that a score can compress the text."""

    bos_token_id = None

    def __init__(self, symbols: str = string.ascii_lowercase + string.ascii_uppercase + string.digits) -> None:
        """Write token i as `symbols[i]`."""
        self.symbols = symbols

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        """Token ids of every text."""
        return {"input_ids": [[self.symbols.index(symbol) for symbol in text] for text in texts]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return "".join(self.symbols[token] for token in ids)
