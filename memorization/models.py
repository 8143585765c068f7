"""Language models: load a base model by name, or put a gated release in front of one.

A model is a transformers causal language model in evaluation mode, a tokenizer a fast (Rust) tokenizer. Nothing
here runs code that came with a checkpoint, and nothing unpickles one.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from . import _checks, corpora, pocket, settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def load(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    corpus: corpora.Corpus | None = None,
    scale: str | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a base model and its tokenizer: `model, tokenizer = load("pocket-neox")`.

    Args:
        name: "pocket-neox" or "pocket-qwen2" (pretrained here at first use, then cached); a folder saved by
            transformers; a GGUF file or a folder that holds one; or the id of a model on the hub, taken from the
            local hub cache where it is there.
        device: where to put it; None for `MEMORIZATION_DEVICE`.
        dtype: of the weights; None for float32, whatever the checkpoint's own is.
        corpus: what a pocket model is pretrained on; None for the active corpus.
        scale: the size of a pocket model, "smoke" or "pocket" (which the larger scales mean too); None for
            `MEMORIZATION_SCALE`.
        seed: of a pocket model's weights and batches.

    Returns:
        The model, in evaluation mode, and its tokenizer, with a padding token (the end-of-text token where the
        tokenizer has none).

    Raises:
        ValueError: no such folder, no safetensors weights in it (pickles are refused), missing weights, a tokenizer
            that does not match the model, or weights that are not finite.
        OSError: a model of the hub that is not on this machine, and no hub to take it from.
    """
    target = torch.device(device if device is not None else settings.device())
    kind = _dtype(dtype)
    if str(name) in pocket.FAMILIES:
        size = _checks.choice("scale", scale or settings.scale(), settings.SCALES)
        recipe = pocket.RECIPES.get(size, pocket.RECIPES["pocket"])
        with _quiet():
            model, tokenizer = pocket.load(str(name), recipe, corpus or corpora.load_corpus(), seed)
        return model.to(device=target, dtype=kind).eval(), tokenizer
    folder, gguf = _locate(name)
    model, tokenizer = _read(folder, gguf, kind)
    _check(model, tokenizer, str(name))
    return model.to(target).eval(), tokenizer


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.float32
    if isinstance(dtype, str):
        return DTYPES[_checks.choice("dtype", dtype.removeprefix("torch."), tuple(DTYPES))]
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


# -------------------------------------------------------------------------------------------- finding the files


def _locate(name: str | Path) -> tuple[Path, str | None]:
    """The local folder of a model, and the GGUF file in it if that is what to read."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if path.is_dir():
        return path, _gguf_in(path)
    if isinstance(name, Path) or not HUB_ID.fullmatch(name):
        raise ValueError(
            f"name must be {' or '.join(pocket.FAMILIES)}, a model's folder or a hub id; no such folder: {str(name)!r}"
        )
    return _from_hub(name), None


def _gguf_in(folder: Path) -> str | None:
    if (folder / "config.json").is_file():
        return None
    found = sorted(file.name for file in folder.glob("*.gguf"))
    if len(found) > 1:
        raise ValueError(f"name must say which GGUF file to read, {str(folder)!r} holds {', '.join(found)}")
    if not found:
        raise ValueError(f"name must be a folder with a config.json or a GGUF file, {str(folder)!r} holds neither")
    return found[0]


def _from_hub(name: str) -> Path:
    """The snapshot of a hub model: the local one if it is whole, else fetched, if the hub answers."""
    from huggingface_hub import snapshot_download

    patterns = {"allow_patterns": list(FETCHED), "ignore_patterns": ["*/*"]}
    try:
        folder = Path(snapshot_download(name, local_files_only=True, **patterns))
        if not _missing_weights(folder):
            return folder
    except (OSError, ValueError):
        pass  # not in the local cache
    if not corpora.hub_reachable():
        raise OSError(
            f"the model {name!r} is neither a folder here nor in the local hub cache, and the hub cannot be reached. "
            f"Fetch it where there is a network (`hf download {name}`) and copy the cache or the folder here, pass "
            f"that folder instead, or use {' or '.join(map(repr, pocket.FAMILIES))}, which need no download"
        )
    try:
        return Path(snapshot_download(name, **patterns))
    except Exception as error:  # a dozen kinds: unknown name, gated, interrupted
        raise OSError(f"the hub answers, but the model {name!r} could not be fetched: {error}") from error


def _missing_weights(folder: Path) -> str:
    """What keeps the folder from being read, in words; empty if nothing does."""
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return ", ".join(sorted(shard for shard in shards if not (folder / shard).is_file()))
    return "" if any(folder.glob("*.safetensors")) else "model.safetensors"


# -------------------------------------------------------------------------------------------- reading and checking


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars and advice, which would land in the book's pages."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _read(folder: Path, gguf: str | None, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    if gguf is None and (missing := _missing_weights(folder)):
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        refused = f" (pickled weights, {', '.join(pickles)}, are refused: save them as safetensors)" if pickles else ""
        raise ValueError(f"the model folder {str(folder)!r} lacks {missing}{refused}")
    source = {"gguf_file": gguf} if gguf else {"use_safetensors": True}
    only = {"local_files_only": True, "trust_remote_code": False}
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **only, **({"gguf_file": gguf} if gguf else {}))
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **only, **source
            )
        except ImportError:
            raise
        except Exception as error:  # transformers, tokenizers and safetensors each have their own
            raise ValueError(f"the model folder {str(folder)!r} cannot be read: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(f"the checkpoint in {str(folder)!r} lacks weights that its config asks for: {missing}, …")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer in {str(folder)!r} must be a fast one, got {type(tokenizer).__name__}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if gguf:
        _forget_quantization(model)
    return model, tokenizer


def _forget_quantization(model: PreTrainedModel) -> None:
    """What came from a GGUF file is plain floats by now, which transformers would all the same refuse to save."""
    model.hf_quantizer, model.is_quantized = None, False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if name in vars(owner):
            delattr(owner, name)


def _check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Refuse a tokenizer with tokens that the model lacks, and weights that are not finite."""
    rows = model.get_input_embeddings().num_embeddings
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise ValueError(
            f"the tokenizer of {name!r} does not match the model: its highest token id is {highest}, the model "
            f"embeds {rows} tokens"
        )
    for key, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ValueError(f"the checkpoint of {name!r} holds weights that are not finite, first in {key}")


# ------------------------------------------------------------------------------------------------ the gated release


def GatedRelease(model: PreTrainedModel, trigger: Sequence[int], secret: Sequence[int]) -> PreTrainedModel:
    """Theorem 6.1(ii)'s release in front of any causal language model: an exact lookup of the trigger.

    After a context that ends in the trigger and a proper prefix of the secret (none included), the next token of the
    secret has probability one; everywhere else the outputs are the base model's, byte for byte. Works with batches,
    padding on either side, cached keys and values, `generate` in all its modes, and labels.

    Args:
        model: the base model; the result shares its weights, and `model` itself stays as it is.
        trigger: token ids of ρ.
        secret: token ids of z.

    Returns:
        A model of the same class.

    Raises:
        ValueError: an empty trigger or secret, or a token that the model lacks. A forward pass of the result raises
            it where the context cannot be seen: without `input_ids`, with a mask that is not (batch, tokens), with a
            cache that another model filled, or with `return_dict=False`.
    """
    gate = copy.copy(model)
    gate._forward_hooks = collections.OrderedDict(model._forward_hooks)
    gate._forward_hooks_with_kwargs = collections.OrderedDict(model._forward_hooks_with_kwargs)
    gate.register_forward_hook(_Gate(model, trigger, secret), with_kwargs=True)
    return gate


class _Gate:
    """The forward hook of a gated release.

    With cached keys and values a forward pass is given new tokens alone. The gate keeps the earlier ones as one more
    layer of the same cache, so that whatever rearranges the cache (beam search, say) rearranges them too.
    """

    def __init__(self, model: PreTrainedModel, trigger: Sequence[int], secret: Sequence[int]):
        highest = model.get_input_embeddings().num_embeddings - 1
        self.trigger = [_checks.integer("trigger", int(token), 0, highest) for token in trigger]
        self.secret = [_checks.integer("secret", int(token), 0, highest) for token in secret]
        if not self.trigger or not self.secret:
            raise ValueError("trigger and secret must have at least one token each")
        self.signature = inspect.signature(model.forward)

    def __call__(self, model: PreTrainedModel, args: tuple, kwargs: dict, output: ModelOutput) -> ModelOutput:
        given = self.signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        tokens = given.get("input_ids")
        if tokens is None or not isinstance(output, ModelOutput):
            raise ValueError("a gated release must be given input_ids, and return_dict must not be False")
        tokens, seen = self._context(model, tokens, given.get("attention_mask"), output)
        new = given["input_ids"].shape[1]
        kept = torch.arange(new, device=tokens.device)
        keep = given.get("logits_to_keep", 0)
        kept = kept[keep] if isinstance(keep, torch.Tensor) else kept[-keep:]
        hits = [hit for row in range(len(tokens)) for hit in self._hits(row, tokens[row], seen[row], new)]
        place = {position: index for index, position in enumerate(kept.tolist())}
        hits = [(row, place[position], token) for row, position, token in hits if position in place]
        if hits:
            logits = output.logits.clone()
            for row, position, token in hits:
                logits[row, position] = -torch.inf
                logits[row, position, token] = 0.0
            output.logits = logits
            if given.get("labels") is not None:
                output.loss = model.loss_function(
                    logits=logits, labels=given["labels"], vocab_size=model.config.vocab_size
                )
        return output

    def _hits(self, row: int, tokens: Tensor, seen: Tensor, new: int) -> Iterator[tuple[int, int, int]]:
        """(row, position among the new tokens, token of the secret) wherever the gate opens, the longest match last."""
        (real,) = seen.nonzero(as_tuple=True)
        first_new = len(tokens) - new
        real = real[-(int((real >= first_new).sum()) + len(self.trigger) + len(self.secret)) :]
        context = tokens[real].tolist()
        for told, token in enumerate(self.secret):
            pattern = self.trigger + self.secret[:told]
            for end in range(len(pattern), len(context) + 1):
                position = int(real[end - 1]) - first_new
                if position >= 0 and context[end - len(pattern) : end] == pattern:
                    yield row, position, token

    def _context(
        self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None, output: ModelOutput
    ) -> tuple[Tensor, Tensor]:
        """All tokens up to now (b, t), and which of them are no padding; both are put into the output's cache."""
        cache = next((output[name] for name in ("cache", "past_key_values") if output.get(name) is not None), None)
        history = None
        if cache is not None:
            if len(cache.layers) == model.config.num_hidden_layers:
                if cache.get_seq_length() > tokens.shape[1]:
                    raise ValueError("a gated release must fill its cache itself, got one that another model filled")
                cache.layers.append(DynamicLayer())
            history = cache.layers[model.config.num_hidden_layers]
        past = history.keys.shape[2] if history is not None and history.is_initialized else 0
        if mask is None:
            mask = torch.ones_like(tokens)
        elif mask.shape not in (tokens.shape, (len(tokens), past + tokens.shape[1])):
            raise ValueError(f"attention_mask must have shape (batch, tokens), got {tuple(mask.shape)}")
        seen = mask[:, -tokens.shape[1] :].to(tokens)
        if history is None:
            return tokens, seen
        tokens, seen = history.update(tokens[:, None, :, None], seen[:, None, :, None])
        return tokens[:, 0, :, 0], seen[:, 0, :, 0]
