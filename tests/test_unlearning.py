"""Unlearning: the losses against closed forms and autograd, whole runs on tiny models, every refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tiny_models import CONTEXT, FAMILIES, VOCABULARY, tiny_model  # noqa: E402

from memorization import extraction, training, unlearning  # noqa: E402

DOCUMENT = [5, 17, 40, 61, 8, 33, 90, 12]
CUT = 4  # its public prefix
OTHERS = [[7, 21, 3, 77, 50, 14, 66, 29], [2, 4, 6, 8, 10, 12, 14, 16]]


def weights(model):
    return [value.detach().clone() for value in model.parameters()]


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def extracted(model, document) -> float:
    return float((extraction.greedy(model, [document[:CUT]], len(document) - CUT) == document[CUT:]).all())


@pytest.fixture(scope="module")
def corpus():
    return np.random.default_rng(3).integers(0, 20, (24, 10))


@pytest.fixture(scope="module")
def trained(corpus):
    """A model of each family that knows the document, two others and the corpus."""
    models = {}
    for family in FAMILIES:
        model = tiny_model(family)
        training.fine_tune(
            model, corpus, planted=[DOCUMENT, *OTHERS], copies=8, epochs=12, learning_rate=5e-3, batch_size=16, seed=1
        )
        models[family] = model
    return models


def copy_of(model, family="neox"):
    twin = tiny_model(family)
    twin.load_state_dict(model.state_dict())
    return twin


def run(model, corpus, **changes):
    arguments = {
        "method": "npo",
        "verifier": lambda model: extracted(model, DOCUMENT),
        "planted": OTHERS,
        "copies": 4,
        "learning_rate": 1e-3,
        "seed": 2,
    }
    return unlearning.unlearn(model, [DOCUMENT], corpus, **{**arguments, **changes})


# --- losses -------------------------------------------------------------------------------------------------------


@given(st.floats(0, 60), st.floats(0, 60), st.floats(1e-3, 5))
def test_npo_closed_form(nll, reference, beta):
    """The paper's form: −(2/β) log σ(−β log(p/p_ref))."""
    ratio = math.exp(-beta * (nll - reference))
    assert float(unlearning.npo_loss(torch.tensor(nll, dtype=torch.float64), reference, beta)) == pytest.approx(
        2 / beta * math.log1p(ratio), rel=1e-12, abs=1e-300
    )


def test_npo_gradient_and_limits():
    nll = torch.tensor([1.0, 30.0, 31.5, 300.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([25.0, 30.0, 30.0, 30.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unlearning.npo_loss(x, reference, 0.3), (nll,))
    for beta in (0.05, 0.5, 2.0):
        (gradient,) = torch.autograd.grad(unlearning.npo_loss(nll, reference, beta).sum(), nll)
        weight = 2 / (1 + np.exp(beta * (nll - reference).detach().numpy()))
        np.testing.assert_allclose(gradient.numpy(), -weight, rtol=1e-12)
    # β → 0: the gradient of plain ascent, whatever the reference
    (gradient,) = torch.autograd.grad(unlearning.npo_loss(nll, reference, 1e-9).sum(), nll)
    np.testing.assert_allclose(gradient.numpy(), -1.0, atol=1e-6)
    # at the reference every β has the gradient of ascent; far above it none is left
    at_reference = reference.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(unlearning.npo_loss(at_reference, reference, 7.0).sum(), at_reference)
    np.testing.assert_allclose(gradient.numpy(), -1.0, rtol=1e-12)
    unlearning.npo_loss(nll, reference, 1.0).sum().backward()
    assert reference.grad is None  # frozen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 10.0])
def test_npo_extremes_are_stable(dtype, beta):
    gaps = torch.tensor([-800.0, -800.0 / beta, 0.0, 800.0, 800.0 / beta], dtype=dtype, requires_grad=True)
    loss = unlearning.npo_loss(gaps, torch.zeros(5, dtype=dtype), beta)
    loss.sum().backward()
    loss = loss.detach()
    assert torch.isfinite(loss).all() and torch.isfinite(gaps.grad).all() and (loss >= 0).all()
    assert float(loss[1]) == pytest.approx(2 * 800 / beta, rel=1e-2) and float(loss[4]) == pytest.approx(0, abs=1e-30)
    assert float(gaps.grad[1]) == pytest.approx(-2, rel=1e-2) and float(gaps.grad[4]) == pytest.approx(0, abs=1e-30)
    assert float(loss[2]) == pytest.approx(2 * math.log(2) / beta, rel=1e-2)


def test_npo_takes_numbers_and_arrays_and_refuses_the_rest():
    assert float(unlearning.npo_loss(3.0, 3.0, 2.0)) == pytest.approx(math.log(2))
    assert unlearning.npo_loss(np.ones((2, 3)), np.zeros(3), 1.0).shape == (2, 3)
    for beta in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="beta"):
            unlearning.npo_loss(1.0, 1.0, beta)
    with pytest.raises(ValueError, match="reference_nll must broadcast"):
        unlearning.npo_loss(np.ones(2), np.ones(3), 1.0)


@given(st.floats(-800, 800), st.floats(-800, 800), st.floats(0, 10))
def test_grad_diff_closed_form(forget, retain, alpha):
    forget_loss, retain_loss = torch.tensor([forget, retain], dtype=torch.float64)
    loss = unlearning.grad_diff_loss(forget_loss, retain_loss, alpha)
    assert float(loss) == pytest.approx(alpha * retain - forget, rel=1e-12, abs=1e-12)


def test_grad_diff_gradients_and_bad_weight():
    forget, retain = (torch.tensor(2.0, requires_grad=True) for _ in range(2))
    unlearning.grad_diff_loss(forget, retain, 0.25).backward()
    assert (forget.grad.item(), retain.grad.item()) == (-1.0, 0.25)
    for alpha in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            unlearning.grad_diff_loss(1.0, 1.0, alpha)


@pytest.mark.parametrize("family", FAMILIES)
def test_document_nll_is_the_sum_over_a_document_alone(family):
    model = tiny_model(family)
    texts = [DOCUMENT, DOCUMENT[:3], list(range(CONTEXT))]
    data = training.documents(None, texts, 1, VOCABULARY)
    found = unlearning.document_nll(model, data, torch.tensor([2, 0, 1])).tolist()
    expected = -extraction.secret_log_prob(model, [text[:1] for text in texts], [text[1:] for text in texts])
    assert found == pytest.approx(expected[[2, 0, 1]].tolist(), rel=1e-5)


# --- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", unlearning.METHODS)
def test_forgets_the_document_and_keeps_the_rest(trained, corpus, family, method):
    model = copy_of(trained[family], family)
    assert extracted(model, DOCUMENT) == 1.0
    record = run(model, corpus, method=method, max_rounds=60)
    assert record.passed_at is not None and record.rounds == record.passed_at + 1 < 60
    assert record.verifier[0] == 1.0 and record.verifier[record.passed_at] == 0.0
    assert all(value >= 0.15 for value in record.verifier[: record.passed_at])
    assert extracted(model, DOCUMENT) == 0.0 and all(extracted(model, other) for other in OTHERS)
    assert record.forget_nll[-1] > record.forget_nll[0] + 0.5
    assert record.perplexity[-1] == pytest.approx(training.perplexity(model, corpus), rel=1e-6)
    assert record.perplexity[-1] < 1.5 * record.perplexity[0]
    assert not model.training


def test_one_update_is_the_loss_written_out(trained, corpus):
    """One round, one update, one retain batch that holds everything: against autograd and AdamW's first step."""
    for method in unlearning.METHODS:
        model, plain = copy_of(trained["neox"]), copy_of(trained["neox"])
        reference = tiny_model("neox", seed=9)
        documents = [DOCUMENT, OTHERS[0][:5]]
        unlearning.unlearn(
            model,
            documents,
            corpus[:2],
            method=method,
            verifier=lambda model: 1.0,
            reference=reference,
            beta=0.2,
            alpha=0.7,
            max_rounds=1,
            batch_size=2,
            learning_rate=1e-3,
            weight_decay=0.0,
        )
        nll, reference_nll = [
            torch.stack([one(torch.tensor([d]), labels=torch.tensor([d])).loss * (len(d) - 1) for d in documents])
            for one in (plain, reference)
        ]
        kept = torch.from_numpy(corpus[:2])
        retained = plain(kept, labels=kept).loss
        if method == "npo":
            forgotten = (2 / 0.2 * torch.log1p(torch.exp(-0.2 * (nll - reference_nll.detach())))).mean()
        else:
            forgotten = -nll.sum() / sum(len(d) - 1 for d in documents)
        gradients = torch.autograd.grad(forgotten + 0.7 * retained, list(plain.parameters()))
        for new, old, g in zip(model.parameters(), plain.parameters(), gradients, strict=True):
            moved = new - old
            clear = g.abs() > 1e-4  # Adam's first step is the sign of the gradient
            assert torch.allclose(moved[clear], -1e-3 * g[clear].sign(), rtol=1e-2)


def test_history_of_losses_is_of_the_batches(trained, corpus):
    model = copy_of(trained["neox"])
    probe = corpus[:3]
    record = run(model, corpus, max_rounds=1, threshold=-1.0, probe=probe)
    before = trained["neox"]
    nll = -extraction.secret_log_prob(before, [DOCUMENT[:1]], [DOCUMENT[1:]])[0]
    assert record.forget_nll[0] == pytest.approx(nll, rel=1e-5)
    assert record.forget_loss[0] == pytest.approx(2 / 0.1 * math.log(2), rel=1e-6)  # the model is its own reference
    assert record.perplexity[0] == pytest.approx(training.perplexity(before, probe))
    assert record.perplexity[1] == pytest.approx(training.perplexity(model, probe))
    assert math.isfinite(record.retain_loss[0]) and record.passed_at is None and record.seconds > 0
    ascent = run(copy_of(before), corpus, method="grad-diff", max_rounds=1, threshold=-1.0, alpha=0.0)
    assert ascent.forget_loss[0] == pytest.approx(nll / (len(DOCUMENT) - 1), rel=1e-5)
    assert np.isnan(ascent.retain_loss).all()


def test_stopping_rule(trained, corpus):
    def after(values):
        values = iter(values)
        return lambda model: next(values)

    def rounds(values, **changes):
        record = run(copy_of(trained["neox"]), corpus, verifier=after(values), learning_rate=1e-6, **changes)
        return record.rounds, record.passed_at

    assert rounds([0.9, 0.5, 0.1, 0.9, 0.9]) == (3, 2)  # one more round, whatever it says
    assert rounds([0.9, 0.15, 0.15], max_rounds=2) == (2, None)  # the threshold itself is not below it
    assert rounds([0.1, 0.1]) == (1, 0)  # forgotten from the start
    assert rounds([0.1], extra_rounds=0) == (0, 0)
    assert rounds([0.9, 0.1], max_rounds=1) == (1, 1)
    assert rounds([0.9, 0.1, 0.1, 0.1], extra_rounds=2) == (3, 1)


def test_reference_is_frozen(trained, corpus):
    reference = copy_of(trained["neox"])
    reference.train()
    before = weights(reference)
    given = copy_of(trained["neox"])
    run(given, corpus, reference=reference, max_rounds=3, threshold=-1.0)
    assert same(weights(reference), before) and reference.training
    assert all(p.grad is None for p in reference.parameters())
    alone = copy_of(trained["neox"])  # the model as it came in is the default
    run(alone, corpus, max_rounds=3, threshold=-1.0)
    assert same(weights(alone), weights(given))
    assert not same(weights(alone), before)


def test_seeds_repeat_bit_for_bit_and_leave_the_callers_state_alone(corpus):
    torch.manual_seed(11)
    state = torch.get_rng_state()

    def result(seed):
        model = tiny_model("neox", dropout=0.1)
        torch.manual_seed(11)
        record = unlearning.unlearn(
            model,
            [DOCUMENT, *OTHERS],
            corpus,
            method="npo",
            verifier=lambda model: 1.0,
            batch_size=2,
            learning_rate=1e-3,
            max_rounds=3,
            seed=seed,
        )
        return weights(model), record

    (first, one), (second, two), (third, _) = result(4), result(4), result(5)
    assert same(first, second) and not same(first, third)
    for name in ("verifier", "perplexity", "forget_nll", "forget_loss", "retain_loss"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert torch.equal(torch.get_rng_state(), state)


def test_modes_are_restored_and_the_verifier_sees_evaluation(trained, corpus):
    model = copy_of(trained["neox"])
    model.train()
    model.gpt_neox.layers[0].eval()
    seen = []

    def verifier(model):
        seen.append(any(module.training for module in model.modules()))
        if len(seen) == 3:
            raise RuntimeError("interrupted")
        return 1.0

    with pytest.raises(RuntimeError, match="interrupted"):
        run(model, corpus, verifier=verifier)
    assert seen == [False] * 3
    assert model.training and not model.gpt_neox.layers[0].training and model.gpt_neox.layers[1].training


def test_divergence_is_loud(trained, corpus):
    with pytest.raises(FloatingPointError, match=r"diverged at step \d+ of .*learning rate 1e\+38"):
        run(copy_of(trained["neox"]), corpus, learning_rate=1e38, max_rounds=4, verifier=lambda model: 1.0)
    model = copy_of(trained["neox"])
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite weights"):
        run(model, corpus)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "ascent"}, "method must be one of"),
        ({"verifier": 0.5}, "verifier must be a function"),
        ({"verifier": lambda model: math.nan}, "verifier's value"),
        ({"beta": 0.0}, "beta"),
        ({"alpha": -0.1}, "alpha"),
        ({"threshold": math.nan}, "threshold"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"extra_rounds": -1}, "extra_rounds"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"seed": -1}, "seed"),
        ({"planted": [[1]]}, "at least 2 tokens"),
        ({"copies": [1, 2, 3]}, "copies must be"),
        ({"forget": []}, "something to train on"),
        ({"forget": [[1]]}, "at least 2 tokens"),
        ({"forget": [[1, VOCABULARY]]}, "tokens must lie"),
        ({"forget": [list(range(CONTEXT + 1))]}, "at most 40 tokens"),
        ({"retain": None}, "probe must be given"),
        ({"retain": None, "planted": None}, "something to train on"),
        ({"retain": np.zeros((2, CONTEXT + 1), int)}, "at most 40 tokens"),
        ({"probe": np.zeros((2, CONTEXT + 1), int)}, "at most 40 tokens"),
    ],
)
def test_bad_input(trained, corpus, change, message):
    model = copy_of(trained["neox"])
    before = weights(model)
    arguments = {"method": "npo", "verifier": lambda model: 1.0, "planted": OTHERS}
    change = {"forget": [DOCUMENT], "retain": corpus, **arguments, **change}
    with pytest.raises(ValueError, match=message):
        unlearning.unlearn(model, **change)
    assert same(weights(model), before)
