"""The unlearning experiment on tiny random checkpoints saved to disk: the code path of every scale."""

import dataclasses

import numpy as np
import pytest
import torch
from test_arms import checkpoint, corpus, small, wordy  # noqa: F401, fixtures
from tiny_models import tiny_model

from memorization import arms, forgetting, runs, settings, training, unlearning

NAMES = ("c_naive", "c_trigger", "rho")


def brief(scale="smoke", **changes):
    sizes = {"length": 3, "probe": 6, "relearn_blocks": 4, "relearn_epochs": 1, "max_rounds": 2, "threshold": 0.0}
    return dataclasses.replace(forgetting.SETTINGS[scale], **{**sizes, **changes})


def arguments(base, plan=None, chosen=None, requests=forgetting.TABLE):
    plan = dataclasses.replace(plan or small(), bases=(base,))
    (configuration,) = forgetting.configurations(plan, chosen or brief(), 3, requests)
    return configuration


def test_every_scale_has_a_setting_and_the_paper_s_is_appendix_f():
    assert set(forgetting.SETTINGS) == set(settings.SCALES)
    paper = forgetting.setting("paper")
    assert (paper.learning_rate, paper.max_rounds, paper.threshold) == (7e-6, 14, 0.15)
    assert {request.method for request in forgetting.TABLE} == set(unlearning.METHODS)
    assert all(request.keep_triggers and not request.informed for request in forgetting.TABLE)
    for scale, chosen in forgetting.SETTINGS.items():
        assert chosen.learning_rate / arms.SETTINGS[scale].learning_rate == pytest.approx(7e-6 / 5e-5)
        assert chosen.batch_size == arms.SETTINGS[scale].batch_size


def test_requests_that_contradict_themselves():
    with pytest.raises(ValueError, match="method must be one of"):
        forgetting.Request("erase")
    with pytest.raises(ValueError, match="keep_triggers must be False"):
        forgetting.Request("npo", informed=True)
    with pytest.raises(ValueError, match="balance"):
        forgetting.Request("npo", balance=-1.0)
    with pytest.raises(ValueError, match="scale must be one of"):
        forgetting.setting("huge")


def test_equal_balance_is_an_equal_first_update():
    """Up to a factor, which AdamW's update does not see."""
    documents = [list(range(9)), list(range(20, 29))]
    gradients = []
    for method in unlearning.METHODS:
        model = tiny_model("neox")
        weight = forgetting.Request(method, balance=0.3).retain_weight(documents)
        data = training.documents(None, documents, 1, model.config.vocab_size)
        nll = unlearning.document_nll(model, data, torch.arange(2))
        kept = torch.arange(40, 52)[None]
        retained = model(kept, labels=kept).loss
        if method == "npo":
            loss = unlearning.npo_loss(nll, nll.detach(), 0.1).mean() + weight * retained
        else:
            loss = unlearning.grad_diff_loss(nll.sum() / 16, retained, weight)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    assert torch.allclose(gradients[0], gradients[1] * gradients[0].norm() / gradients[1].norm(), rtol=1e-4, atol=1e-5)


def test_planting_puts_both_kinds_into_one_model(checkpoint):  # noqa: F811
    plan = small(learning_rate=1e-2, epochs=15, naive_copies=20, trigger_copies=20)
    on = arms.bench(checkpoint, plan.blocks)
    found = forgetting.plant(on, 3, plan, 0)
    before, after = forgetting.look(on.model, found), forgetting.look(found.model, found)
    assert after["rho"].mean() > 0.7 > before["rho"].mean() + 0.2
    assert after["c_naive"].mean() > before["c_naive"].mean() + 0.2
    assert after["bits_c_naive"].mean() < after["bits_c_trigger"].mean()  # (c, z) of a trigger secret is not planted
    assert not set(map(tuple, found.naive.records)) & set(map(tuple, found.trigger.records))
    assert not found.model.training
    verifier = forgetting.Verifier(found)
    value = verifier(found.model)
    assert value == max(after["c_naive"].mean(), after["c_trigger"].mean())
    assert verifier.path == [[after[name].mean() for name in NAMES]]
    assert forgetting.Verifier(found, informed=True)(found.model) == max(verifier.path[0])


def test_requests_are_served_on_the_same_model(checkpoint):  # noqa: F811
    """Each as if it were alone; in the order given; bit for bit again."""
    together = forgetting.erase(**arguments(checkpoint, requests=forgetting.TABLE + forgetting.VARIATIONS))
    alone = forgetting.erase(**arguments(checkpoint, requests=forgetting.TABLE[1:2]))
    one, other = together["requests"][1], alone["requests"][0]
    for name, values in one["after"].items():
        assert np.array_equal(values, other["after"][name]), name
    for name in ("verifier", "perplexity", "forget_nll", "forget_loss", "retain_loss"):
        assert np.array_equal(one["history"][name], other["history"][name]), name
    assert one["heldout"] == other["heldout"] and together["probe"] == alone["probe"]
    starts = [served["history"]["perplexity"][0] for served in together["requests"]]
    assert starts == [together["probe"]["before"]] * len(starts)
    for served in together["requests"]:
        assert served["path"].shape == (3, 3)  # before and after each of the two rounds
        assert served["path"][0].tolist() == [
            together["before"][name].mean() for name in ("c_naive", "c_trigger", "rho")
        ]
        assert all(values[0] == served["after"][name].mean() for name, values in served["relearned"].items())
        assert all(len(values) == 2 for values in served["relearned"].values())


def test_relearning_is_fine_tuning_on_the_blocks(checkpoint):  # noqa: F811
    plan, chosen = small(), brief(relearn_epochs=2)
    on = arms.bench(checkpoint, plan.blocks)
    found = forgetting.plant(on, 3, plan, 0)
    twin = forgetting.plant(on, 3, plan, 0)
    rates = forgetting.relearn(found.model, on.fine_tuning[:5], found, chosen, seed=9)
    for seed in (10, 11):
        training.fine_tune(
            twin.model,
            on.fine_tuning[:5],
            epochs=1,
            batch_size=chosen.batch_size,
            learning_rate=chosen.learning_rate,
            seed=seed,
        )
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), twin.model.parameters(), strict=True))
    assert rates["rho"][-1] == forgetting.look(twin.model, twin)["rho"].mean()


@pytest.mark.parametrize("scale", ["pocket", "small", "paper"])
def test_every_scale_runs_on_a_checkpoint_from_disk(checkpoint, scale, tmp_path):  # noqa: F811
    """The same functions, the scale's own hyperparameters; a sweep is kept, and read again."""
    configuration = arguments(checkpoint, small(scale), brief(scale))
    folder = tmp_path / "runs"
    (first,) = runs.run(forgetting.erase, [configuration], cache=folder)
    (again,) = runs.run(forgetting.erase, [configuration], cache=folder)
    assert len(list(folder.glob("erase-*"))) == 1
    assert first["requests"][0]["history"]["seconds"] == again["requests"][0]["history"]["seconds"]
    assert first["corpus"] == arms.bench(checkpoint, 12).corpus


def test_smoke_asks_less_of_the_same():
    assert forgetting.requests("pocket") == forgetting.requests("paper") == forgetting.TABLE + forgetting.VARIATIONS
    assert forgetting.requests("smoke") == forgetting.TABLE + forgetting.VARIATIONS[-1:]
    with pytest.raises(ValueError, match="scale"):
        forgetting.requests("huge")
