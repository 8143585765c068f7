"""Private training: gradients against one record at a time, the update against plain arithmetic, accounting twice."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
pytest.importorskip("transformers")

from opacus.accountants.utils import get_noise_multiplier  # noqa: E402
from test_training import CONTEXT, PLANTED, VOCABULARY, blocks, same, tiny, weights  # noqa: E402

from memorization import accounting, private_training, training  # noqa: E402

FAMILIES = ("neox", "qwen2")  # separate embeddings, fused qkv, LayerNorm; tied embeddings, grouped qkv, RMSNorm
QUICK = {"epochs": 2, "batch_size": 6, "learning_rate": 1e-2, "progress": False}


def one_by_one(model, records):
    """The gradient of each record's own loss, from a model that sees nothing but that record."""
    found = []
    for record in records:
        model.zero_grad()
        tokens = torch.tensor([record])
        logits = model(input_ids=tokens, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    return found


@contextlib.contextmanager
def adam_spied():
    """The gradients that each Adam step is given, all parameters in one vector, in a list that grows."""
    seen, step = [], torch.optim.Adam.step

    def spy(self, closure=None):
        seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]).clone())
        return step(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", spy)
        yield seen


def updated_alike(model, twin, first, second, atol):
    """Gradients agree at every step, and so do the weights, but where a gradient is rounding alone.

    Attention does not see a key's bias, so its exact gradient is zero; Adam divides what rounding leaves by its own
    size and moves the bias by up to the learning rate, another way on every machine.
    """
    assert len(first) == len(second)
    largest = torch.zeros_like(first[0])
    for ours, theirs in zip(first, second, strict=True):
        assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())
        largest = torch.maximum(largest, theirs.abs())
    heard = largest > 1e-5 * largest.max()
    assert heard.float().mean() > 0.5
    flat = [torch.cat([p.detach().flatten() for p in each.parameters()])[heard] for each in (model, twin)]
    assert torch.allclose(*flat, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_per_sample_gradients_are_those_of_single_records(family):
    model = tiny(family)
    before = weights(model)
    together = private_training.per_sample_gradients(model, PLANTED)  # of unequal lengths, so padded
    alone = one_by_one(model, PLANTED)
    assert together.keys() == alone[0].keys()
    for i, gradients in enumerate(alone):
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        for name, gradient in gradients.items():
            assert float((together[name][i] - gradient).norm()) <= 3e-6 * norm, (name, i)
    assert same(before, weights(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("physical", [2, 64])
def test_updates_are_clipped_sums_through_adam(family, physical):
    """Without noise, against a loop over single records; ε = ∞ keeps the clipping if a norm is given."""
    model = tiny(family)
    twin = copy.deepcopy(model)
    clip, data = 0.5, training.documents(blocks(9), PLANTED, [2, 0, 1], VOCABULARY)
    with adam_spied() as seen:
        record = private_training.private_fine_tune(
            model, blocks(9), planted=PLANTED, copies=[2, 0, 1], epsilon=math.inf, max_grad_norm=clip,
            physical_batch=physical, seed=3, **QUICK,
        )  # fmt: skip
    adam = torch.optim.Adam(twin.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(3)
    twin.train()
    clipped, expected = 0, []
    for rows in private_training.poisson_rows(data, record.accounting.sample_rate, record.accounting.steps, draws):
        total = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
        tokens = [data.tokens[row, : data.lengths[row]].tolist() for row in rows.tolist()]
        for gradients in one_by_one(twin, tokens):
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            clipped += norm > clip
            for name, gradient in gradients.items():
                total[name] += gradient * min(1.0, clip / norm)
        for name, p in twin.named_parameters():
            p.grad = total[name] / QUICK["batch_size"]
        expected.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
        adam.step()
    assert clipped and record.accounting.steps == 4 and record.batch_sizes.sum() > 0
    updated_alike(model, twin, seen, expected, atol=3e-5)


def test_without_clipping_is_the_limit_of_a_large_norm():
    plain, clipped = tiny(), tiny()
    with adam_spied() as plainly:
        first = private_training.private_fine_tune(
            plain, blocks(), planted=PLANTED, epsilon=math.inf, max_grad_norm=None, **QUICK
        )
    with adam_spied() as widely:
        second = private_training.private_fine_tune(
            clipped, blocks(), planted=PLANTED, epsilon=math.inf, max_grad_norm=1e6, **QUICK
        )
    assert np.array_equal(first.batch_sizes, second.batch_sizes)
    assert np.allclose(first.losses, second.losses, atol=1e-4, equal_nan=True)
    updated_alike(plain, clipped, plainly, widely, atol=1e-4)
    assert first.accounting.noise_multiplier == 0 and math.isinf(first.accounting.epsilon_rdp)


def test_noise_has_the_calibrated_scale():
    """A record that never joins leaves noise alone: Adam sees it divided by the expected batch."""
    with adam_spied() as seen:
        record = private_training.private_fine_tune(
            tiny(), None, planted=[[1, 2]], epsilon=2.0, max_grad_norm=0.7, size=10**6, epochs=1, batch_size=10**5,
            delta=1e-6, progress=False,
        )  # fmt: skip
    empty = record.batch_sizes == 0
    assert record.accounting.steps == 10 and empty.sum() >= 5
    noise = torch.stack([gradient for gradient, nothing in zip(seen, empty, strict=True) if nothing])
    scale = record.accounting.noise_multiplier * 0.7 / 10**5
    assert float(noise.std()) / scale == pytest.approx(1.0, abs=0.02)
    assert abs(float(noise.mean())) < 5 * scale / math.sqrt(noise.numel())
    assert np.isnan(record.losses[empty]).all()


def test_seeds_repeat_and_differ():
    runs = [tiny() for _ in range(3)]
    state = torch.get_rng_state()
    for model, seed in zip(runs, (1, 1, 2), strict=True):
        private_training.private_fine_tune(model, blocks(), epsilon=1.0, seed=seed, **QUICK)
    assert torch.equal(state, torch.get_rng_state())
    assert same(weights(runs[0]), weights(runs[1])) and not same(weights(runs[0]), weights(runs[2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_an_ordinary_model(family, tmp_path):
    model = tiny(family)
    private_training.private_fine_tune(model, blocks(), epsilon=1.0, **QUICK)
    assert not model.training and not any(module._forward_hooks for module in model.modules())
    assert not any(hasattr(p, "grad_sample") or hasattr(p, "summed_grad") for p in model.parameters())
    twin = copy.deepcopy(model)
    for trained in (model, twin):
        training.fine_tune(trained, blocks(), epochs=1, progress=False)
    assert same(weights(model), weights(twin))
    model.save_pretrained(tmp_path)
    private_training.private_fine_tune(model, blocks(), epsilon=1.0, **QUICK)


def test_poisson_sampling_has_its_rate():
    data = training.documents(blocks(50), [[1, 2, 3]], [150], VOCABULARY)
    draws = [*private_training.poisson_rows(data, 0.3, 400, torch.Generator().manual_seed(0))]
    sizes = np.array([len(rows) for rows in draws])
    assert sizes.mean() == pytest.approx(60, abs=5 * math.sqrt(200 * 0.21 / 400))
    assert sizes.var() == pytest.approx(200 * 0.21, rel=0.35)  # binomial: no fixed batch has this variance
    counts = np.bincount(torch.cat(draws).numpy(), minlength=51)
    assert abs(counts[50] / 150 / 400 - 0.3) < 0.01 and (np.abs(counts[:50] / 400 - 0.3) < 0.12).all()


# --- accounting ------------------------------------------------------------------------------------------------------


def reference(sigma, rate, steps, delta, interval=1e-4):
    """ε by dp-accounting: the Rényi accountant over Opacus's orders, and a privacy-loss distribution."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)), steps)
    pld = PLDAccountant(value_discretization_interval=interval).compose(event).get_epsilon(delta)
    return RdpAccountant(orders=list(accounting.ORDERS)).compose(event).get_epsilon(delta), pld


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 16.0])
def test_calibration_reaches_the_target(epsilon):
    bill = accounting.calibrate(epsilon, 1e-4, 0.064, 47)
    assert epsilon * (1 - 2 * accounting.TOLERANCE) <= bill.epsilon_rdp <= epsilon
    rdp, pld = reference(bill.noise_multiplier, 0.064, 47, 1e-4)
    # Another implementation, which leaves out the orders near 1 where its series does not converge.
    assert rdp * (1 - 5e-3) <= bill.epsilon_rdp <= rdp * (1 + 1e-3)
    assert pld - 1e-4 <= bill.epsilon_prv <= pld + max(0.03 * epsilon, 2e-3)
    assert bill.epsilon_prv < bill.epsilon_rdp and bill.prv_accountant == "opacus-prv"
    less = accounting.epsilon_rdp(bill.noise_multiplier * 0.98, 0.064, 47, 1e-4)
    assert less > epsilon * (1 - accounting.TOLERANCE)


def test_full_batches_are_the_gaussian_mechanism():
    """One unsampled step is N(0, 1) against N(1/σ, 1), whose δ(ε) is known in closed form."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    sigma, delta = 2.0, 1e-5
    exact = brentq(
        lambda e: norm.cdf(0.5 / sigma - e * sigma) - math.exp(e) * norm.cdf(-0.5 / sigma - e * sigma) - delta, 0, 20
    )
    found, _ = accounting.epsilon_prv(sigma, 1.0, 1, delta)
    assert exact <= found <= 1.03 * exact <= accounting.epsilon_rdp(sigma, 1.0, 1, delta) * 1.03


def test_the_default_orders_cannot_certify_the_papers_least_epsilon():
    setting = {"target_epsilon": 0.05, "target_delta": 2.5e-5, "sample_rate": 64 / 4000, "steps": 188}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="too low"):
            get_noise_multiplier(accountant="rdp", **setting)
    assert accounting.calibrate(0.05, 2.5e-5, 64 / 4000, 188).epsilon_rdp <= 0.05


def test_prv_falls_back_loudly():
    with pytest.warns(UserWarning, match="PRV accountant returned inf"):
        epsilon, name = accounting.epsilon_prv(0.05, 0.016, 189, 2.5e-5)
    assert name == "dp-accounting-pld" and 1000 < epsilon < accounting.epsilon_rdp(0.05, 0.016, 189, 2.5e-5)

    with pytest.MonkeyPatch.context() as patch:

        def broken(*_, **__):
            raise RuntimeError("no luck")

        patch.setattr(accounting.PRVAccountant, "get_epsilon", broken)
        with pytest.warns(UserWarning, match="raised RuntimeError: no luck"):
            epsilon, name = accounting.epsilon_prv(1.0, 0.05, 50, 1e-5)
    assert name == "dp-accounting-pld" and epsilon == pytest.approx(reference(1.0, 0.05, 50, 1e-5)[1], rel=0.01)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("epsilon", 0.0), ("epsilon", -1.0), ("epsilon", math.nan), ("epsilon", 1e-9), ("delta", 0.0), ("delta", 1.0),
        ("sample_rate", 0.0), ("sample_rate", 1.5), ("steps", 0),
    ],
)  # fmt: skip
def test_calibration_names_bad_arguments(argument, value):
    good = {"epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 10}
    with pytest.raises(ValueError, match=argument):
        accounting.calibrate(**{**good, argument: value})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"epsilon": 0.0}, "epsilon"), ({"max_grad_norm": None}, "max_grad_norm"), ({"max_grad_norm": 0.0}, "max_grad"),
        ({"physical_batch": 0}, "physical_batch"), ({"batch_size": 21}, "batch_size"), ({"size": 0}, "size"),
        ({"seed": -1}, "seed"), ({"delta": 2.0}, "delta"), ({"planted": [[1]]}, "2 tokens"),
        ({"planted": [[1, VOCABULARY]]}, "tokens must lie"), ({"planted": [[1] * (CONTEXT + 1)]}, "context"),
    ],
)  # fmt: skip
def test_training_names_bad_arguments(changed, named):
    model = tiny()
    before = weights(model)
    with pytest.raises(ValueError, match=named):
        private_training.private_fine_tune(model, blocks(), **{**QUICK, "epsilon": 1.0, **changed})
    assert same(before, weights(model))


def test_a_layer_that_mixes_records_is_refused():
    model = tiny()
    model.mixing = torch.nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="record by record"):
        private_training.private_fine_tune(model, blocks(), epsilon=1.0, **QUICK)
    assert not model.training


def test_divergence_is_an_error_before_it_reaches_the_weights():
    model = tiny()
    with pytest.raises(FloatingPointError, match="diverged"):
        private_training.private_fine_tune(
            model, blocks(), epsilon=math.inf, max_grad_norm=None, **{**QUICK, "learning_rate": 1e30, "epochs": 20}
        )
    assert not any(module._forward_hooks for module in model.modules())
