"""Extraction: against one-example loops without a cache, brute force over every string, and mpmath."""

from __future__ import annotations

import copy
import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import CONTEXT, FAMILIES, VOCABULARY, IdsOnly, absolute_model, device, tiny_model  # noqa: E402

from memorization import extraction, priors  # noqa: E402

FEW = settings(max_examples=100, deadline=None, derandomize=True)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, VOCABULARY, length) for length in (9, 1, 4, 17, 9, 2, 30)]
SECRETS = [RNG.integers(0, VOCABULARY, length) for length in (3, 1, 8, 2, 5, 8, 4)]


def next_law(model, ids, temperature=1.0):
    """Log-probabilities of the next token after `ids`, one sequence, no cache, float64 weights."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        logits = exact(torch.tensor([[int(i) for i in ids]], device=device()), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits / temperature, 0).cpu().numpy()


def slow_greedy(model, ids, length):
    ids = [int(i) for i in ids]
    for _ in range(length):
        ids.append(int(next_law(model, ids).argmax()))
    return ids[-length:]


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "absolute"])
def test_greedy_matches_a_loop_without_cache_for_any_batch(family):
    model = absolute_model() if family == "absolute" else tiny_model(family)
    expected = np.array([slow_greedy(model, prompt, 6) for prompt in PROMPTS])
    assert len(np.unique(expected)) > 5  # the loop is no fixed point
    for batch_size in (1, 2, 64):
        decoded = extraction.greedy(model, PROMPTS, 6, batch_size=batch_size)
        assert decoded.dtype == np.int64
        np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(extraction.greedy(model, PROMPTS[::-1], 6), expected[::-1])
    np.testing.assert_array_equal(extraction.greedy(model, PROMPTS, 1), expected[:, :1])
    np.testing.assert_array_equal(extraction.greedy(IdsOnly(model), PROMPTS, 6), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_do_not_depend_on_the_batch_and_repeat(family):
    model = tiny_model(family)

    def draw(seed=1, **options):
        return extraction.sample(model, PROMPTS, 4, 0.8, 5, torch.Generator().manual_seed(seed), **options)

    expected = draw()
    assert expected.shape == (len(PROMPTS), 5, 4) and expected.dtype == np.int64
    for batch_size in (1, 2, 5, 7, 10, 1000):
        np.testing.assert_array_equal(draw(batch_size=batch_size), expected)
    assert (draw(seed=2) != expected).any()
    # Cold enough, sampling is greedy decoding.
    cold = extraction.sample(model, PROMPTS, 4, 1e-6, 2, torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(cold, extraction.greedy(model, PROMPTS, 4)[:, None].repeat(2, axis=1))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_samples_follow_the_tempered_law(temperature):
    model, prompt, n = tiny_model("neox"), PROMPTS[2], 20_000
    draws = extraction.sample(model, [prompt], 2, temperature, n, torch.Generator().manual_seed(3), batch_size=4096)[0]
    law = np.exp(next_law(model, prompt, temperature))
    first = int(law.argmax())
    after = draws[draws[:, 0] == first, 1]
    second = np.exp(next_law(model, [*prompt, first], temperature))
    for tokens, expected in ((draws[:, 0], law), (after, second)):
        assert len(tokens) > 500
        counts, rare = np.bincount(tokens, minlength=VOCABULARY), expected * len(tokens) < 5
        pooled = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected * len(tokens))]
        keep = pooled[1] > 0
        assert stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue > 1e-4


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]]).repeat(4, 1)
    uniform = torch.tensor([0.0, 1 - 2**-53, 1 / (1 + math.e) - 1e-12, 1 / (1 + math.e) + 1e-12], dtype=torch.float64)
    assert extraction._draw(logits, 1.0, uniform).tolist() == [1, 3, 1, 3]
    assert extraction._draw(logits, 1e-300, uniform).tolist() == [3, 3, 3, 3]


# --- given continuations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_secret_log_prob_matches_a_loop(family, temperature):
    model = tiny_model(family)
    expected = [
        sum(next_law(model, [*c, *z[:t]], temperature)[z[t]] for t in range(len(z)))
        for c, z in zip(PROMPTS, SECRETS, strict=True)
    ]
    for batch_size in (1, 3, 64):
        result = extraction.secret_log_prob(model, PROMPTS, SECRETS, temperature, batch_size)
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        extraction.secret_log_prob(IdsOnly(model), PROMPTS, SECRETS, temperature), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_extraction_strength_is_what_greedy_decoding_completes(family):
    model = tiny_model(family)
    # Secrets that end as the model would go on, from a random point.
    targets = []
    for i, (c, z) in enumerate(zip(PROMPTS, SECRETS, strict=True)):
        targets.append(np.array([*z[: i % 4], *slow_greedy(model, [*c, *z[: i % 4]], 4)]))
    predicted = extraction.forced_predictions(model, PROMPTS, targets)
    expected = []
    for c, target in zip(PROMPTS, targets, strict=True):
        n = len(target)
        k = next(k for k in range(n + 1) if k == n or slow_greedy(model, [*c, *target[:k]], n - k) == [*target[k:]])
        expected.append(1 - k / n)
    np.testing.assert_allclose(extraction.extraction_strength(predicted, targets), expected, rtol=1e-15)
    assert len(set(expected)) > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_next_law_adapter_matches_the_whole_forward_and_keeps_its_prefix(family, wrapped):
    model, prefix = tiny_model(family), PROMPTS[0]
    law = extraction.model_next_log_probs(IdsOnly(model) if wrapped else model, prefix, 0.8, batch_size=2)
    for depth in (0, 1, 3, 0, 3):  # calls leave the prefix as it was
        tails = np.random.default_rng(depth).integers(0, VOCABULARY, (5, depth))
        rows = law(tails)
        assert rows.shape == (5, VOCABULARY) and rows.dtype == np.float64
        np.testing.assert_allclose(np.exp(rows).sum(axis=1), 1.0, rtol=1e-12)
        expected = [next_law(model, [*prefix, *tail], 0.8) for tail in tails]
        np.testing.assert_allclose(rows, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_top_m_is_exact_where_the_search_closes(family):
    model, prompt, vocabulary, length = tiny_model(family, vocabulary=13), [1, 2, 3], 13, 3
    strings = np.array(list(itertools.product(range(vocabulary), repeat=length)))
    mass = extraction.secret_log_prob(model, [prompt] * len(strings), strings, 0.9, batch_size=2048)
    order = np.argsort(-mass, kind="stable")
    for m in (1, 4, 16):
        result = extraction.top_m(model, prompt, length, m, budget=10_000, temperature=0.9)
        assert result.exact and result.method == "best-first" and result.certificate.closed
        np.testing.assert_array_equal(result.sequences, strings[order[:m]])
        np.testing.assert_allclose(result.log_probs, mass[order[:m]], atol=1e-5)
    # A budget too small to close: beam search, said so; as wide as the tree, it finds the same strings.
    wide = extraction.top_m(model, prompt, length, 16, budget=1, temperature=0.9, beam=vocabulary**2)
    assert not wide.exact and wide.method == "beam"
    np.testing.assert_array_equal(wide.sequences, strings[order[:16]])
    narrow = extraction.top_m(model, prompt, length, 2, budget=1, temperature=0.9, beam=1)
    assert narrow.method == "beam" and len(narrow.sequences) == 2
    scored = extraction.secret_log_prob(model, [prompt] * 2, narrow.sequences, 0.9)
    np.testing.assert_allclose(narrow.log_probs, scored, atol=1e-5)
    everything = extraction.top_m(model, prompt, 1, 20, budget=10)
    assert everything.exact and len(everything.sequences) == vocabulary  # no more than there are


def test_certificates_of_a_model_enclose_its_baseline():
    model, prompt = tiny_model("qwen2", vocabulary=13), [4, 5]
    strings = np.array(list(itertools.product(range(13), repeat=3)))
    mass = np.sort(np.exp(extraction.secret_log_prob(model, [prompt] * len(strings), strings, batch_size=2048)))[::-1]
    law = extraction.model_next_log_probs(model, prompt)
    for m, budget in itertools.product((1, 4), (1, 5, 30, 1000)):
        certificate = priors.certify_baseline(law, 3, m, budget)
        assert certificate.lower - 1e-5 <= mass[:m].sum() <= certificate.upper + 1e-5


# --- refusals --------------------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_the_models_beginning_or_an_error():
    with_bos, without = tiny_model("neox", bos=0), tiny_model("neox")
    np.testing.assert_array_equal(
        extraction.greedy(with_bos, [[], [3, 4]], 3), extraction.greedy(without, [[0], [3, 4]], 3)
    )
    for call in (
        lambda: extraction.greedy(without, [[3], []], 3),
        lambda: extraction.sample(without, [[]], 3, generator=torch.Generator()),
        lambda: extraction.secret_log_prob(without, [[]], [[1]]),
        lambda: extraction.model_next_log_probs(without, []),
        lambda: extraction.top_m(without, [], 1, 1),
    ):
        with pytest.raises(ValueError, match="no beginning-of-sequence token"):
            call()


FULL = list(range(1, CONTEXT))  # one token short of the context


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: extraction.greedy(m, [], 1), "prompts must hold at least one"),
        (lambda m: extraction.greedy(m, [[1]], 0), "length"),
        (lambda m: extraction.greedy(m, [[1]], 1.5), "length"),
        (lambda m: extraction.greedy(m, [[1]], 1, batch_size=0), "batch_size"),
        (lambda m: extraction.greedy(m, ["text"], 1), "whole token ids"),
        (lambda m: extraction.greedy(m, "text", 1), "sequence of token-id sequences"),
        (lambda m: extraction.greedy(m, [[1, VOCABULARY]], 1), "do tokenizer and model belong together"),
        (lambda m: extraction.greedy(m, [[1], FULL], 2), rf"prompts\[1\].*context of {CONTEXT}"),
        (lambda m: extraction.sample(m, [[1]], 1, 0.0, generator=torch.Generator()), "temperature"),
        (lambda m: extraction.sample(m, [[1]], 1, 1.0), "generator"),
        (lambda m: extraction.sample(m, [[1]], 1, 1.0, 0, torch.Generator()), "n must be"),
        (lambda m: extraction.secret_log_prob(m, [[1]], [[]]), r"secrets\[0\] is empty"),
        (lambda m: extraction.secret_log_prob(m, [[1]], [FULL + FULL]), rf"secrets\[0\].*context of {CONTEXT}"),
        (lambda m: extraction.secret_log_prob(m, [FULL], [[1, 2]]), r"prompts\[0\] with its secret.*context"),
        (lambda m: extraction.secret_log_prob(m, [[1], [2]], [[1]]), "one entry for each of prompts"),
        (lambda m: extraction.secret_log_prob(m, [[1]], [[1]], -1.0), "temperature"),
        (lambda m: extraction.model_next_log_probs(m, [1], math.inf), "temperature"),
        (lambda m: extraction.model_next_log_probs(m, FULL)(np.ones((1, 2), dtype=int)), "context"),
        (lambda m: extraction.top_m(m, FULL, 2, 1), "context"),
        (lambda m: extraction.top_m(m, [1], 2, 0), "m must be"),
        (lambda m: extraction.verbatim([[1, 2]], [[1, 2, 3]]), r"secrets\[0\] must have 1 to 2"),
        (lambda m: extraction.verbatim([[1, 2]], [[]]), r"secrets\[0\]"),
        (lambda m: extraction.verbatim([[1, 2]], []), "one entry"),
        (lambda m: extraction.verbatim([1, 2], [[1]]), "predicted must have shape"),
        (lambda m: extraction.extraction_strength([], []), "not empty"),
        (lambda m: extraction.extraction_strength([1, 2], [1]), "equally long"),
        (lambda m: extraction.extraction_strength([[1]], [[1], [2]]), "one entry"),
        (lambda m: extraction.discoverable_probability(0.1, 1), "log_p"),
        (lambda m: extraction.discoverable_probability(-1.0, -1), "n must"),
        (lambda m: extraction.discoverable_probability(-1.0, math.inf), "n must"),
        (lambda m: extraction.discoverable_probability(math.nan, 1), "log_p"),
        (lambda m: extraction.discoverable_queries(-1.0, 1.1), "p must"),
        (lambda m: extraction.discoverable_queries(1.0, 0.5), "log_p"),
    ],
)
def test_bad_input(call, message):
    model = tiny_model("neox").train()
    with pytest.raises(ValueError, match=message):
        call(model)
    assert model.training


def test_modes_are_restored_and_a_broken_checkpoint_is_named():
    model, still = tiny_model("neox", dropout=0.5).train(), tiny_model("neox")
    model.gpt_neox.layers[1].eval()
    modes = [module.training for module in model.modules()]
    np.testing.assert_array_equal(extraction.greedy(model, PROMPTS, 4), extraction.greedy(still, PROMPTS, 4))
    law = extraction.model_next_log_probs(model, [1, 2])
    expected = extraction.model_next_log_probs(still, [1, 2])(np.array([[3]]))
    np.testing.assert_array_equal(law(np.array([[3]])), expected)
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    for call in (
        lambda: extraction.greedy(model, PROMPTS, 2),
        lambda: extraction.sample(model, PROMPTS, 2, generator=torch.Generator()),
        lambda: extraction.secret_log_prob(model, PROMPTS, SECRETS),
        lambda: extraction.forced_predictions(model, PROMPTS, SECRETS),
        lambda: extraction.model_next_log_probs(model, [1]),
        lambda: law(np.array([[3]])),
        lambda: extraction.top_m(model, [1], 2, 1),
    ):
        with pytest.raises(FloatingPointError, match="NaN"):
            call()
    assert [module.training for module in model.modules()] == modes


# --- what was extracted ----------------------------------------------------------------------------------------------


def test_verbatim_compares_tokens():
    predicted = np.array([[1, 2, 3], [1, 2, 3], [4, 5, 6]])
    secrets = [[1, 2, 3], [1, 3], torch.tensor([4])]
    np.testing.assert_array_equal(extraction.verbatim(predicted, secrets), [True, False, True])
    draws = np.stack([predicted, predicted[::-1]], axis=1)
    np.testing.assert_array_equal(extraction.verbatim(draws, secrets), [[True, False], [False, False], [True, False]])


@FEW
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8))
def test_extraction_strength_by_its_definition(pairs):
    predicted, target = (list(side) for side in zip(*pairs, strict=True))
    n = len(target)
    expected = 1 - min(k for k in range(n + 1) if predicted[k:] == target[k:]) / n
    assert extraction.extraction_strength(predicted, target) == expected
    both = extraction.extraction_strength([predicted, target], [target, target])
    np.testing.assert_array_equal(both, [expected, 1.0])
    assert extraction.extraction_strength(predicted[:-1] + [9], target) == 0.0


def exact_probability(log_p, n):
    with mpmath.workdps(DIGITS):
        miss = 1 - mpmath.exp(mpmath.mpf(log_p))
        chance = -mpmath.expm1(mpmath.mpf(n) * mpmath.log(miss)) if miss else mpmath.mpf(n > 0)
        return float(chance), float(mpmath.log(chance)) if chance else -math.inf


DIGITS = 750  # 1 − e^−800 differs from one in the 348th digit
LOG_P = st.one_of(st.floats(-800, -1e-12), st.floats(-1, -1e-300), st.floats(-40, -30))


@FEW
@given(LOG_P, st.one_of(st.floats(0, 10), st.floats(0, 1e300), st.integers(1, 1000).map(float)))
def test_discoverable_probability_in_high_precision(log_p, n):
    if log_p > -1e-50:
        log_p = -1e-50
    chance, log_chance = exact_probability(log_p, n)
    assert math.isclose(extraction.discoverable_probability(log_p, n), chance, rel_tol=5e-13, abs_tol=1e-300)
    logged = extraction.discoverable_probability(log_p, n, log=True)
    assert math.isclose(logged, log_chance, rel_tol=1e-12, abs_tol=1e-300) or logged == log_chance


@FEW
@given(LOG_P, st.floats(1e-300, 1 - 1e-16))
def test_discoverable_queries_in_high_precision_and_back(log_p, p):
    log_p = min(log_p, -1e-50)
    with mpmath.workdps(DIGITS):
        exact = mpmath.log(1 - mpmath.mpf(p)) / mpmath.log(1 - mpmath.exp(mpmath.mpf(log_p)))
        n, log_n = float(exact), float(mpmath.log(exact))
    assert math.isclose(extraction.discoverable_queries(log_p, p, log=True), log_n, rel_tol=1e-13, abs_tol=1e-13)
    queries = extraction.discoverable_queries(log_p, p)
    assert math.isclose(queries, n, rel_tol=1e-12) or (queries == n == math.inf)
    if math.isfinite(queries) and 1e-290 < p < 0.99:
        assert math.isclose(extraction.discoverable_probability(log_p, queries), p, rel_tol=1e-11)


def test_discoverable_extremes():
    probability, queries = extraction.discoverable_probability, extraction.discoverable_queries
    assert probability(-800.0, 1, log=True) == -800.0 and probability(0.0, 1) == probability(0.0, 0.1) == 1.0
    assert probability(0.0, 0) == probability(-math.inf, 1e300) == probability(-1.0, 0) == 0.0
    assert probability(-math.inf, 5, log=True) == probability(-3.0, 0, log=True) == -math.inf
    assert probability(-1e-5, 1e300, log=True) == 0.0
    assert queries(-800.0, 0.5) == math.inf
    assert math.isclose(queries(-800.0, 0.5, log=True), 800 + math.log(math.log(2)), rel_tol=1e-15)
    assert queries(-1.0, 0.0) == queries(0.0, 0.5) == queries(0.0, 1.0) == queries(-math.inf, 0.0) == 0.0
    assert queries(-1.0, 1.0) == queries(-math.inf, 0.5) == queries(-math.inf, 1.0) == math.inf
    assert queries(-1.0, 1.0, log=True) == math.inf and queries(0.0, 0.5, log=True) == -math.inf
    assert queries(math.log(0.5), 0.5) == 1.0
    grid = probability(np.array([[-1.0], [-2.0]]), np.array([1.0, 2.0, 3.0]))
    assert grid.shape == (2, 3) and math.isclose(grid[1, 2], 1 - (1 - math.exp(-2)) ** 3, rel_tol=1e-14)
    assert isinstance(probability(-1.0, 1), float) and isinstance(queries(-1.0, 0.5), float)
