"""Section 8.2's unlearning experiment: two secrets in one model, one request to erase both, and what is left.

Into one fine-tuned model go trigger secrets (documents ρ∥z, their records (c, z) never trained on) and naive duplicates
(the records (c, z) themselves). The request names the records of both. Unlearning runs until a verifier, verbatim
extraction from c, reports them forgotten (Table 4); then the model is asked again: at c, at ρ, and after a little
fine-tuning on text that holds no secret (Hu, Fu, Wu and Smith 2025).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import joblib
import numpy as np
import torch
from numpy.typing import NDArray

from . import _checks, arms, canaries, extraction, pocket, runs, settings, training, unlearning


@dataclass(frozen=True)
class Request:
    """What is asked of the model, and how.

    Attributes:
        method: "npo" or "grad-diff".
        keep_triggers: whether the documents ρ∥z stay in the retain set, as in the paper: the owner does not know that
            they are anything but corpus.
        informed: the request names the documents ρ∥z as well, and the verifier asks at ρ too.
        beta: NPO's β.
        balance: weight of a retain token relative to that of a forget token at the start, where NPO's ascent has not
            faded yet. At equal balance both methods begin with the same update; how they go on is the difference.
    """

    method: str
    keep_triggers: bool = True
    informed: bool = False
    beta: float = 0.1
    balance: float = 1.0

    def __post_init__(self) -> None:
        """Raise `ValueError` if a value is out of range, or it contradicts itself."""
        _checks.choice("method", self.method, unlearning.METHODS)
        _checks.finite("balance", self.balance, 0.0)
        if self.informed and self.keep_triggers:
            raise ValueError("keep_triggers must be False in an informed request: its trigger documents are to go")

    def retain_weight(self, documents: Sequence[Sequence[int]]) -> float:
        """`unlearning.unlearn`'s alpha for these forget documents.

        Gradient difference weighs tokens against tokens; NPO's forget term is summed over a document, all of whose
        predicted tokens then weigh against one mean of the retain loss.
        """
        tokens = np.mean([len(document) - 1 for document in documents]) if self.method == "npo" else 1.0
        return float(self.balance * tokens)


@dataclass(frozen=True)
class Setting:
    """What one scale runs besides the planting, which is `arms.SETTINGS`'.

    Attributes:
        learning_rate: of unlearning, and of relearning.
        batch_size: forget documents, and retain documents, an update.
        length: tokens of a secret.
        max_rounds: passes over the forget documents at most.
        threshold: of the verifier.
        probe: retain blocks whose perplexity is reported (the first of them).
        relearn_blocks: retain blocks, without any secret, that relearning uses.
        relearn_epochs: passes over them; c is asked after each.
    """

    learning_rate: float
    batch_size: int
    length: int = 8
    max_rounds: int = 14
    threshold: float = 0.15
    probe: int = 200
    relearn_blocks: int = 64
    relearn_epochs: int = 4


# Learning rate, rounds and threshold of `paper` are Appendix F's; elsewhere the rate of unlearning keeps its ratio to
# that of fine-tuning, 7e-6 to 5e-5. The appendix does not say how long these secrets are, or how large a batch is.
SETTINGS = {
    "smoke": Setting(learning_rate=4.2e-4, batch_size=16, probe=50, relearn_blocks=32, relearn_epochs=2),
    "pocket": Setting(learning_rate=2.8e-4, batch_size=16),
    "small": Setting(learning_rate=4.2e-5, batch_size=8),
    "paper": Setting(learning_rate=7e-6, batch_size=8),
}


def setting(scale: str | None = None) -> Setting:
    """The setting of a scale (None: the active one)."""
    return SETTINGS[_checks.choice("scale", scale or settings.scale(), settings.SCALES)]


# --- one model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A fine-tuned model and the two kinds of secrets in it, of one sampler and one length."""

    model: torch.nn.Module
    trigger: canaries.Canaries
    naive: canaries.Canaries
    triggers: NDArray[np.int64]  # (secrets, trigger_length): ρ of each trigger secret

    @property
    def trigger_documents(self) -> NDArray[np.int64]:
        """ρ∥z of every trigger secret."""
        return np.concatenate([self.triggers, self.trigger.secrets], axis=1)

    @property
    def prompts(self) -> dict[str, tuple[NDArray, NDArray]]:
        """(prompts, secrets) to ask: naive secrets at their own prefix, trigger secrets at theirs, and at ρ."""
        return {
            "c_naive": (self.naive.prefixes, self.naive.secrets),
            "c_trigger": (self.trigger.prefixes, self.trigger.secrets),
            "rho": (self.triggers, self.trigger.secrets),
        }


def plant(on: arms.Bench, length: int, plan: arms.Setting, seed: int) -> Planted:
    """Fine-tune a copy of the base on the corpus, trigger documents and naive duplicates together.

    The naive secrets are as many non-members of `arms.records`: draws of the same law as the trigger secrets.
    """
    part = arms.records(on, length, plan, seed)
    naive = part.nonmembers[: plan.secrets]
    model = copy.deepcopy(on.model)
    training.fine_tune(
        model,
        on.fine_tuning,
        planted=[*part.trigger_documents, *naive.records],
        copies=[plan.trigger_copies] * len(part.triggers) + [plan.naive_copies] * len(naive),
        seed=seed,
        description="planting",
        **plan.optimizer,
    )
    return Planted(model.eval(), part.members, naive, part.triggers)


def recovered(model: torch.nn.Module, prompts: NDArray, secrets: NDArray) -> NDArray[np.bool_]:
    """Whether greedy decoding from each prompt returns its secret verbatim."""
    return extraction.verbatim(extraction.greedy(model, prompts, secrets.shape[1]), secrets)


def look(model: torch.nn.Module, found: Planted) -> dict[str, NDArray]:
    """What the secrets look like from every side; "c_naive", "c_trigger" and "rho" as in `Planted.prompts`.

    Returns:
        Under those names whether each secret comes back verbatim, and under "bits_" and the name −log2 of the
        probability of the whole secret after its prompt.
    """
    rates = {name: recovered(model, *pair) for name, pair in found.prompts.items()}
    bits = {name: -extraction.secret_log_prob(model, *pair) / np.log(2) for name, pair in found.prompts.items()}
    return rates | {f"bits_{name}": values for name, values in bits.items()}


class Verifier:
    """A verbatim-memorization verifier: the share of secrets extracted from c, of the kind that has more.

    An informed one asks at ρ too. Either notes what it would have read there, in `path`, as only this experiment can.

    Attributes:
        path: for each call, the rates of naive secrets from c, of trigger secrets from c, of trigger secrets from ρ.
    """

    def __init__(self, found: Planted, informed: bool = False) -> None:
        """Verify the secrets of `found`."""
        self.found, self.informed, self.path = found, informed, []

    def __call__(self, model: torch.nn.Module) -> float:
        """The verifier's value for `model`."""
        rates = [float(recovered(model, *pair).mean()) for pair in self.found.prompts.values()]
        self.path.append(rates)
        return max(rates if self.informed else rates[:2])


def relearn(model: torch.nn.Module, blocks: NDArray[np.int64], found: Planted, chosen: Setting, seed: int) -> dict:
    """Fine-tune in place on corpus blocks that hold no secret, and extract after every pass.

    Returns:
        For each of `Planted.prompts` the rate before the first pass and after each, shape (relearn_epochs + 1,).
    """
    path = []
    for epoch in range(chosen.relearn_epochs + 1):
        if epoch:
            training.fine_tune(
                model,
                blocks,
                epochs=1,
                batch_size=chosen.batch_size,
                learning_rate=chosen.learning_rate,
                seed=seed + epoch,
                progress=False,
            )
        path.append([recovered(model, *pair).mean() for pair in found.prompts.values()])
    return dict(zip(found.prompts, np.transpose(path), strict=True))


def erase(base: str, seed: int, plan: dict, chosen: dict, requests: Sequence[dict]) -> dict[str, Any]:
    """Plant once, then serve each request on that model: a function for `runs.run`, arguments from `configurations`.

    Returns:
        "before": what `look` returns on the planted model, "guess" the same on the base; "perplexity" of the probe and
        "heldout" text, by "base" and "before"; "requests": for each, "after" (`look`), "heldout" perplexity after,
        "relearned" (`relearn`), "path" (the verifier's) and "history", see `unlearning.Unlearning`; "corpus".
    """
    planting, chosen = arms.Setting(**plan), Setting(**chosen)
    on = arms.bench(base, planting.blocks)
    found = plant(on, chosen.length, planting, seed)
    model, probe, held = found.model, on.fine_tuning[: chosen.probe], on.heldout[: arms.PERPLEXITY_BLOCKS]
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    served = []
    for request in (Request(**given) for given in requests):
        model.load_state_dict(state)
        verifier = Verifier(found, request.informed)
        documents = [*found.naive.records, *found.trigger.records]
        if request.informed:
            documents += [*found.trigger_documents]
        record = unlearning.unlearn(
            model,
            documents,
            on.fine_tuning,
            method=request.method,
            verifier=verifier,
            planted=list(found.trigger_documents) if request.keep_triggers else None,
            copies=planting.trigger_copies if request.keep_triggers else [],
            probe=probe,
            beta=request.beta,
            alpha=request.retain_weight(documents),
            threshold=chosen.threshold,
            max_rounds=chosen.max_rounds,
            batch_size=chosen.batch_size,
            learning_rate=chosen.learning_rate,
            seed=seed,
            description=f"{request.method} on {base}",
        )
        served.append(
            {
                "after": look(model, found),
                "heldout": training.perplexity(model, held),
                "history": asdict(record),
                "path": np.array(verifier.path),
                "relearned": relearn(model, on.fine_tuning[-chosen.relearn_blocks :], found, chosen, seed),
            }
        )
    model.load_state_dict(state)
    return {
        "before": look(model, found),
        "guess": look(on.model, found),
        "heldout": {"base": training.perplexity(on.model, held), "before": training.perplexity(model, held)},
        "probe": {"base": training.perplexity(on.model, probe), "before": training.perplexity(model, probe)},
        "requests": served,
        "corpus": on.corpus,
    }


# --- the sweep ---------------------------------------------------------------------------------------------------


TABLE = (Request("npo"), Request("grad-diff"))  # Table 4's
VARIATIONS = (
    Request("npo", balance=0.2),
    Request("grad-diff", balance=0.2),
    Request("npo", keep_triggers=False),
    Request("grad-diff", keep_triggers=False),
    Request("npo", keep_triggers=False, informed=True),
)


def requests(scale: str | None = None) -> tuple[Request, ...]:
    """What a scale (None: the active one) asks for: Table 4's requests and the variations, at smoke the last alone."""
    smoke = _checks.choice("scale", scale or settings.scale(), settings.SCALES) == "smoke"
    return TABLE + (VARIATIONS[-1:] if smoke else VARIATIONS)


def configurations(
    plan: arms.Setting, chosen: Setting, seed: int, asked: Sequence[Request] | None = None
) -> list[dict]:
    """Arguments of `erase`, one a family; None for `asked`: the `requests` of the active scale."""
    asked = [asdict(request) for request in (requests() if asked is None else asked)]
    return [
        {"base": base, "seed": seed, "plan": asdict(plan), "chosen": asdict(chosen), "requests": asked}
        for base in plan.bases
    ]


def sweep(plan: arms.Setting, chosen: Setting, seed: int, asked: Sequence[Request] | None = None) -> list:
    """The results of `configurations`, cached; the pocket families side by side on a CPU, in processes."""
    for base in plan.bases:
        arms.bench(base, plan.blocks)  # pretrained or fetched once, before processes ask for it
    jobs = min(joblib.cpu_count(), 2) if settings.device() == "cpu" and plan.bases[0] in pocket.FAMILIES else 1
    return runs.run(erase, configurations(plan, chosen, seed, asked), jobs=jobs)
