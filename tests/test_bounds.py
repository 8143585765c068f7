"""Every bound against an extremal problem that does not share its algebra: linear programs, fractions, enumeration."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse, special

from memorization.bounds import (
    entropy_threshold,
    extraction_bound,
    extraction_frontier,
    k_copy_advantage,
    k_copy_orbit,
    memorization_cap,
    refuted_epsilon,
    replace_extraction_bound,
    replace_threshold,
    truncated_loss_cap,
)
from memorization.tradeoff import ApproxDP, GaussianDP, PiecewiseLinear, PureDP, from_distributions

mpmath = pytest.importorskip("mpmath")

quick = settings(max_examples=60, deadline=None, derandomize=True)
epsilons = st.one_of(st.floats(-8, 1.69).map(lambda x: 10.0**x), st.just(0.0), st.just(50.0))
priors = st.lists(st.floats(0, 1) | st.floats(1e-9, 1e-3), min_size=2, max_size=8).filter(lambda w: sum(w) > 0)


def normalized(weights):
    weights = np.asarray(weights, dtype=float)
    return weights / math.fsum(weights)


# --- Linear programs over all private mechanisms -----------------------------------------------------------------


# HiGHS stops at 1e-7 by default, which steep constraints turn into 1e-6 of the objective.
EXACT = {"method": "highs", "options": {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}}


def best(value, neighbors, lines):
    """max Σ value · law over tables of laws (datasets × outcomes) in which every neighbor pair is private.

    `lines` lists (s, δ): every event has P(E) ≤ s P'(E) + δ, both ways round. All of them together are f-DP for
    f(α) = max(0, 1 − δ − sα, …). δ = 0 needs no helper variables.
    """
    value = np.asarray(value, dtype=float)
    datasets, outcomes = value.shape
    ordered = [pair for a, b in neighbors for pair in ((a, b), (b, a))]
    rows, columns, entries, limits = [], [], [], []
    free, row = datasets * outcomes, 0

    def add(items, limit):
        nonlocal row
        for column, entry in items:
            rows.append(row)
            columns.append(column)
            entries.append(entry)
        limits.append(limit)
        row += 1

    for a, b in ordered:
        for steep, delta in lines:
            cells = [[(a * outcomes + o, 1.0), (b * outcomes + o, -steep)] for o in range(outcomes)]
            if delta:
                cells = [[*cell, (free + o, -1.0)] for o, cell in enumerate(cells)]
                add([(free + o, 1.0) for o in range(outcomes)], delta)
                free += outcomes
            for cell in cells:
                add(cell, 0.0)
    total = sparse.kron(sparse.eye(datasets), np.ones(outcomes))
    total = sparse.hstack([total, sparse.csr_array((datasets, free - datasets * outcomes))])
    cost = np.concatenate([-value.ravel(), np.zeros(free - datasets * outcomes)])
    private = sparse.csr_array((entries, (rows, columns)), shape=(row, free))
    solved = optimize.linprog(cost, A_ub=private, b_ub=limits, A_eq=total, b_eq=np.ones(datasets), **EXACT)
    assert solved.status == 0, solved.message
    return -solved.fun


def lists(N, m):
    return [frozenset(c) for c in combinations(range(N), m)]


def extraction_value(prior, m, copies=1):
    """Objective of extraction: row 0 is the corpus without the secret, then `copies` rows for every secret."""
    sets = lists(len(prior), m)
    value = np.zeros((1 + copies * len(prior), len(sets)))
    for z, mass in enumerate(prior):
        value[copies * (z + 1)] = [mass * (z in c) for c in sets]
    steps = [(copies * z + j if j else 0, copies * z + j + 1) for z in range(len(prior)) for j in range(copies)]
    return value, steps


def extraction_program(prior, m, lines, copies=1):
    return best(*extraction_value(prior, m, copies), lines)


def tradeoff_lines(f):
    """Slope and intercept of every segment of F."""
    steep = np.diff(f.power(f.alpha)) / np.diff(f.alpha)
    return [(s, f.power(a) - s * a) for s, a in zip(steep, f.alpha[:-1], strict=True)]


PROGRAMS = [
    ((0.25, 0.25, 0.25, 0.25), 1),
    ((0.5, 0.3, 0.2), 1),
    ((0.7, 0.1, 0.1, 0.06, 0.04), 2),
    ((0.4, 0.4, 0.1, 0.1, 0.0), 3),
    ((0.30, 0.25, 0.2, 0.12, 0.08, 0.05), 1),
    ((0.30, 0.25, 0.2, 0.12, 0.08, 0.05), 3),
    ((0.9, 0.02, 0.02, 0.02, 0.02, 0.02), 2),
]


@pytest.mark.parametrize(("prior", "m"), PROGRAMS)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.5])
def test_frontier_is_the_largest_extraction_of_any_pure_dp_mechanism(prior, m, epsilon):
    found = extraction_frontier(PureDP(epsilon), prior, m)
    assert found.value == pytest.approx(extraction_program(prior, m, [(math.exp(epsilon), 0.0)]), abs=1e-8)
    assert math.fsum(found.inclusion) == pytest.approx(m, abs=1e-12)


@given(weights=priors.filter(lambda w: len(w) <= 5), m=st.integers(1, 3), epsilon=st.floats(0.0, 4.0))
@settings(quick, max_examples=30)
def test_frontier_agrees_with_the_program_on_generated_priors(weights, m, epsilon):
    prior = normalized(weights)
    m = min(m, len(prior) - 1)
    program = extraction_program(prior, m, [(math.exp(epsilon), 0.0)])
    assert extraction_frontier(PureDP(epsilon), prior, m).value == pytest.approx(program, abs=1e-7)


@pytest.mark.parametrize(("prior", "m"), [case for case in PROGRAMS if len(case[0]) <= 5])
@pytest.mark.parametrize("f", [ApproxDP(1.0, 0.05), ApproxDP(0.0, 0.2), PureDP(0.6).compose(ApproxDP(0.9, 0.02))])
def test_frontier_is_the_largest_extraction_for_every_piecewise_linear_guarantee(prior, m, f):
    program = extraction_program(prior, m, tradeoff_lines(f))
    assert extraction_frontier(f, prior, m).value == pytest.approx(program, abs=1e-8)


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize(("prior", "m"), [((0.5, 0.3, 0.2), 1), ((0.25,) * 4, 1), ((0.6, 0.2, 0.15, 0.05), 2)])
def test_frontier_with_copies_is_the_largest_extraction_over_chains_of_neighbors(prior, m, copies):
    program = extraction_program(prior, m, [(math.exp(0.7), 0.0)], copies)
    found = extraction_frontier(PureDP(0.7), prior, m, copies=copies)
    assert found.value == pytest.approx(program, abs=1e-8)
    assert found.value <= extraction_bound(PureDP(0.7).group(copies), sum(sorted(prior)[-m:])) + 1e-12


def test_program_over_margins_shows_that_several_secrets_in_one_corpus_cost_nothing():
    """Beyond the paper on the full graph of corpora with up to two documents of each secret, not only on chains."""
    corpora = list(product(range(3), repeat=3))
    value = np.zeros((27, 3))
    for z, mass in enumerate((0.5, 0.3, 0.2)):
        value[corpora.index(tuple(2 * (i == z) for i in range(3))), z] = mass
    near = [(a, b) for a, b in combinations(range(27), 2) if np.abs(np.subtract(corpora[a], corpora[b])).sum() == 1]
    program = best(value, near, [(math.e, 0.0)])
    assert extraction_frontier(PureDP(1.0), (0.5, 0.3, 0.2), 1, copies=2).value == pytest.approx(program, abs=1e-8)


# --- The frontier beyond linear programs ---------------------------------------------------------------------------


def on_grid(prior, m, steps):
    """Every q on a grid of the hypersimplex, shape (points, N)."""
    free = np.array(list(product(range(steps + 1), repeat=len(prior) - 1)))
    last = m * steps - free.sum(axis=1)
    return np.column_stack([free, last])[(last >= 0) & (last <= steps)] / steps


@pytest.mark.parametrize("f", [GaussianDP(0.3), GaussianDP(1.5), PureDP(1.0), ApproxDP(0.5, 0.1), GaussianDP(0.0)])
@pytest.mark.parametrize(("prior", "m"), [((0.5, 0.3, 0.2), 1), ((0.5, 0.3, 0.2), 2), ((0.55, 0.25, 0.15, 0.05), 2)])
def test_no_grid_point_beats_the_frontier_and_some_come_close(f, prior, m):
    steps = 240 if len(prior) == 3 else 40
    q = on_grid(prior, m, steps)
    found = extraction_frontier(f, prior, m)
    top = (np.asarray(prior) * f.power(q)).sum(axis=1).max()
    assert found.value >= top - 1e-12
    assert found.value <= top + 0.5 / steps
    assert math.fsum(found.inclusion) == pytest.approx(m, abs=1e-12)
    assert found.value == pytest.approx(float(np.dot(prior, f.power(found.inclusion))), abs=1e-12)


@pytest.mark.parametrize("mu", [1e-6, 0.5, 2.0, 6.0])
def test_gaussian_frontier_lies_under_the_program_with_tangents(mu):
    """Tangents lie above the concave F, so a program in (q, F(q)) bounds the optimum from above, and closely."""
    prior, m = np.array([0.4, 0.25, 0.2, 0.1, 0.05]), 2
    t = np.linspace(-9.0, 9.0, 700) - mu / 2
    slope = np.exp(np.clip(-mu * t - mu**2 / 2, -600, 600))
    offset = special.ndtr(t + mu) - slope * special.ndtr(t)
    keep = slope < 1e6
    rows, limits = [], []
    for z in range(5):
        block = np.zeros((keep.sum(), 10))
        block[:, z], block[:, 5 + z] = -slope[keep], 1.0
        rows.append(block)
        limits.append(offset[keep])
    solved = optimize.linprog(
        np.concatenate([np.zeros(5), -prior]),
        A_ub=np.vstack(rows),
        b_ub=np.concatenate(limits),
        A_eq=np.concatenate([np.ones(5), np.zeros(5)])[None],
        b_eq=[m],
        bounds=(0, 1),
        method="highs",
    )
    found = extraction_frontier(GaussianDP(mu), prior, m).value
    assert -solved.fun - 2e-4 <= found <= -solved.fun + 1e-7


def test_gaussian_frontier_to_thirty_digits():
    prior, mu, m = [0.5, 0.3, 0.2], 1.25, 1
    with mpmath.workdps(30):

        def levels(c):
            return [mpmath.ncdf((mpmath.log(p) - c) / mu - mpmath.mpf(mu) / 2) for p in prior]

        c = mpmath.findroot(lambda c: sum(levels(c)) - m, (-2, -0.5), solver="anderson")
        exact = sum(p * mpmath.ncdf((mpmath.log(p) - c) / mu + mpmath.mpf(mu) / 2) for p in prior)
        found = extraction_frontier(GaussianDP(mu), prior, m)
        assert found.value == pytest.approx(float(exact), rel=1e-13)
        assert found.inclusion == pytest.approx([float(q) for q in levels(c)], rel=1e-12)


def neyman_pearson(p, q):
    """Knots (α, β) of the exact trade-off curve between two finite laws."""
    ratio = np.divide(q, p, out=np.full(len(p), np.inf), where=p > 0)
    order = np.argsort(-ratio)
    return np.concatenate([[0], np.cumsum(p[order])]).clip(0, 1), np.concatenate([[1], 1 - np.cumsum(q[order])])


@pytest.mark.parametrize(
    "f", [PureDP(1.0), ApproxDP(0.8, 0.1), GaussianDP(1.2), from_distributions([0.6, 0.3, 0.1], [0.1, 0.3, 0.6])]
)
@pytest.mark.parametrize(("prior", "m"), [((0.5, 0.3, 0.2), 1), ((0.45, 0.3, 0.15, 0.1), 2), ((0.9, 0.06, 0.04), 1)])
def test_a_private_mechanism_attains_the_frontier(f, prior, m):
    """Any law Q with the optimal marginals will do; this one comes from a feasibility program."""
    found, sets, secrets = extraction_frontier(f, prior, m), lists(len(prior), m), range(len(prior))
    holds = np.array([[z in c for c in sets] for z in secrets], dtype=float)
    matched = optimize.linprog(
        np.zeros(len(sets)), A_eq=np.vstack([holds, np.ones(len(sets))]), b_eq=[*found.inclusion, 1.0], method="highs"
    )
    null = np.clip(matched.x, 0.0, None)
    success = 0.0
    for z, mass in enumerate(prior):
        q, planted = float(holds[z] @ null), holds[z] == 1.0
        law = np.where(planted, f.power(found.inclusion[z]) * null / max(q, 1e-300), 0.0)
        if found.inclusion[z] <= 1e-12:
            law[np.flatnonzero(planted)[0]] = f.power(0.0)
        if q < 1.0 - 1e-12:
            law[~planted] = f(found.inclusion[z]) * null[~planted] / (1.0 - q)
        assert law.sum() == pytest.approx(1.0, abs=1e-9)
        for ordered in ((null, law), (law, null)):
            alpha, beta = neyman_pearson(*ordered)
            assert np.all(beta >= f(alpha) - 1e-9)
        success += mass * law[planted].sum()
    assert success == pytest.approx(found.value, abs=1e-9)


CURVES = st.one_of(
    epsilons.map(PureDP),
    st.builds(ApproxDP, epsilons, st.floats(0, 1)),
    st.floats(0, 30).map(GaussianDP),
    st.builds(lambda e, d: ApproxDP(e, d).compose(PureDP(e)), st.floats(0, 3), st.floats(0, 0.5)),
)


@given(f=CURVES, weights=priors, m=st.integers(1, 8), copies=st.integers(1, 4))
@quick
def test_frontier_between_the_blind_guess_and_the_boundary(f, weights, m, copies):
    prior = normalized(weights)
    m = min(m, len(prior))
    found = extraction_frontier(f, prior, m, copies=copies)
    kappa = min(1.0, math.fsum(np.sort(prior)[-m:]))
    assert kappa - 1e-12 <= found.value <= extraction_bound(f.group(copies), kappa) * (1 + 1e-9) + 1e-12
    assert np.all((found.inclusion >= 0) & (found.inclusion <= 1))
    assert math.fsum(found.inclusion) == pytest.approx(m, abs=1e-9)
    order = np.argsort(prior, kind="stable")
    assert np.all(np.diff(found.inclusion[order]) >= -1e-9)  # likelier secrets are listed at least as often


@given(f=CURVES, N=st.integers(1, 300), m=st.integers(1, 300))
@quick
def test_frontier_on_uniform_priors_is_the_boundary(f, N, m):
    m = min(m, N)
    found = extraction_frontier(f, np.full(N, 1.0 / N), m)
    assert found.value == pytest.approx(extraction_bound(f, m / N), rel=1e-11, abs=1e-300)
    assert found.inclusion == pytest.approx(np.full(N, m / N), rel=1e-12)


@given(f=CURVES, weights=priors, m=st.integers(1, 6), share=st.floats(0.01, 1.0), data=st.data())
@quick
def test_bound_with_unlisted_mass_holds_for_every_completion(f, weights, m, share, data):
    """Any way to cut the rest into atoms of at most the cap gives no more than the certified bound."""
    prior = normalized(weights)
    rest = data.draw(st.floats(0.01, 0.99))
    cap = max(share * rest, rest / 50)
    pieces, left = [], rest
    while left > 1e-15:
        pieces.append(min(cap * data.draw(st.floats(0.2, 1.0)), left) if len(pieces) < 60 else min(cap, left))
        left -= pieces[-1]
    full = np.concatenate([(1 - rest) * prior, pieces])
    m = min(m, len(full))
    bound = extraction_frontier(f, (1 - rest) * prior, m, rest=rest, atom_cap=cap)
    assert bound.value >= extraction_frontier(f, full / math.fsum(full), m).value - 1e-9
    assert bound.inclusion.shape == prior.shape


@pytest.mark.parametrize("f", [PureDP(2.0), ApproxDP(1.0, 0.1), GaussianDP(1.0)])
def test_bound_with_unlisted_mass_is_tight_and_lists_nothing(f):
    spread = extraction_frontier(f, [0.5, 0.2, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05], 3).value
    assert extraction_frontier(f, [0.5, 0.2], 3, rest=0.3, atom_cap=0.05).value == pytest.approx(spread, rel=1e-13)
    uneven = extraction_frontier(f, [0.5, 0.2, 0.08, 0.08, 0.08, 0.06], 3).value
    assert extraction_frontier(f, [0.5, 0.2], 3, rest=0.3, atom_cap=0.08).value == pytest.approx(uneven, rel=1e-13)
    # 10^12 atoms next to one heavy secret: worth listing nothing of them, except what comes free with F(0)
    many = extraction_frontier(f, [0.5], 1, rest=0.5, atom_cap=5e-13)
    assert 0.5 <= many.value <= 0.5 + 0.5 * f.power(1e-6)
    tiny = extraction_frontier(f, [], 4, rest=1.0, atom_cap=1e-100)
    assert tiny.value == pytest.approx(f.power(4e-100), rel=1e-12)


def test_more_copies_and_looser_privacy_never_extract_less():
    prior = normalized([5, 3, 2, 1, 1, 1])
    by_copies = [extraction_frontier(PureDP(0.5), prior, 2, copies=k).value for k in range(1, 8)]
    by_epsilon = [extraction_frontier(PureDP(e), prior, 2).value for e in np.linspace(0, 8, 30)]
    by_mu = [extraction_frontier(GaussianDP(mu), prior, 2).value for mu in np.linspace(0, 12, 30)]
    for values in (by_copies, by_epsilon, by_mu):
        assert np.all(np.diff(values) >= -1e-14)
    assert by_epsilon[0] == by_mu[0] == pytest.approx(8 / 13)


def test_frontier_extremes():
    assert extraction_frontier(PureDP(1.0), [0.5, 0.3, 0.2], 3).value == 1.0
    assert extraction_frontier(PureDP(1.0), [0.5, 0.3, 0.2], 3).inclusion.tolist() == [1.0, 1.0, 1.0]
    assert extraction_frontier(PureDP(1.0), [1.0], 1).value == 1.0
    assert extraction_frontier(ApproxDP(0.0, 1.0), [0.6, 0.4], 1).value == 1.0
    spare = extraction_frontier(GaussianDP(1.0), [0.5, 0.5, 0.0, 0.0], 3)
    assert spare.value == 1.0
    assert spare.inclusion.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert extraction_frontier(PureDP(50.0), normalized([3, 2, 1]), 1, copies=40).value == pytest.approx(1.0)
    assert extraction_frontier(PureDP(1.0), [0.5], 9, rest=0.5, atom_cap=0.25).value == 1.0


# --- Counterfactual memorization ------------------------------------------------------------------------------------


def chain(steps, epsilon, outcomes=3):
    value = np.zeros((steps + 1, outcomes))
    value[0, 0], value[steps, 0] = -1.0, 1.0
    return best(value, [(i, i + 1) for i in range(steps)], [(math.exp(epsilon), 0.0)])


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_memorization_cap_is_the_linear_program_over_the_steps_in_between(epsilon, copies):
    f = PureDP(epsilon)
    assert memorization_cap(f, copies=copies) == pytest.approx(chain(copies, epsilon), abs=1e-8)
    assert memorization_cap(f, "replace-one", "add-remove", copies) == pytest.approx(
        chain(2 * copies, epsilon), abs=1e-8
    )
    assert memorization_cap(f, "leave-one-out", "add-remove", copies) == pytest.approx(chain(copies, epsilon), abs=1e-8)


def test_replace_one_from_add_remove_costs_two_steps():
    assert memorization_cap(PureDP(1.0)) == pytest.approx(math.tanh(0.5), rel=1e-15)
    assert memorization_cap(PureDP(1.0), adjacency="add-remove") == pytest.approx(1 - math.exp(-1), rel=1e-15)
    assert memorization_cap(GaussianDP(1.0), adjacency="add-remove") == pytest.approx(math.erf(1 / math.sqrt(2)))
    assert memorization_cap(ApproxDP(0.0, 0.1), adjacency="add-remove") == pytest.approx(0.2, rel=1e-12)


def test_leave_one_out_needs_add_remove():
    with pytest.raises(ValueError, match="adjacency must be 'add-remove'.*'replace-one'"):
        memorization_cap(PureDP(1.0), "leave-one-out", "replace-one")
    with pytest.raises(ValueError, match="adjacency must be 'add-remove'"):
        memorization_cap(PureDP(1.0), functional="leave-one-out")


@pytest.mark.parametrize("M", [0.0, 1.5, 40.0])
def test_truncated_loss_cap_against_randomized_response_on_membership(M):
    """Release a confident or a hopeless prediction by randomized response: the truncated loss moves by M tanh(ε/2)."""
    epsilon = 0.8
    heads = math.exp(epsilon) / (1 + math.exp(epsilon))
    loss = min(M, -math.log(1e-200))
    member, other = (1 - heads) * loss, heads * loss
    assert truncated_loss_cap(PureDP(epsilon), M) == pytest.approx(other - member, rel=1e-13, abs=1e-15)


def test_k_copy_advantage_by_fractions_over_all_breakpoints():
    """The maximum of the iterated cap map minus the identity, in rational arithmetic at e^ε = 3/2, 2, 7."""
    for E in (Fraction(3, 2), Fraction(2), Fraction(7)):

        def cap(x, E=E):
            return min(E * x, 1 - (1 - x) / E)

        def back(y, E=E):
            return max(y / E, 1 - E * (1 - y))

        for k in range(1, 13):
            breakpoints, x = {Fraction(0), Fraction(1)}, 1 / (E + 1)
            for _ in range(k):
                breakpoints.add(x)
                x = back(x)
            gaps = []
            for start in breakpoints:
                y = start
                for _ in range(k):
                    y = cap(y)
                gaps.append(y - start)
            assert k_copy_advantage(math.log(E), k) == pytest.approx(float(max(gaps)), rel=1e-14)


@given(epsilon=epsilons, k=st.integers(1, 40))
@quick
def test_k_copy_advantage_to_sixty_digits(epsilon, k):
    with mpmath.workdps(60):
        e = mpmath.mpf(epsilon)
        exact = 1 - mpmath.exp(-k * e / 2) if k % 2 == 0 else 1 - 2 * mpmath.exp(-(k - 1) * e / 2) / (mpmath.exp(e) + 1)
        found = k_copy_advantage(epsilon, k)
        assert found == pytest.approx(float(exact), rel=1e-14, abs=0.0)
        assert memorization_cap(PureDP(epsilon), copies=k) == pytest.approx(found, rel=1e-12, abs=0.0)
        if k >= 2 and 0.0 < k * epsilon < 100.0:  # beyond, both round to 1 even in sixty digits
            assert exact < mpmath.tanh(k * e / 2)


@given(epsilon=epsilons, k=st.integers(1, 40))
@quick
def test_orbit_follows_the_cap_map_and_climbs_by_the_advantage(epsilon, k):
    orbit, f = k_copy_orbit(epsilon, k), PureDP(epsilon)
    assert orbit.shape == (k + 1,)
    assert f.power(orbit[:-1]) == pytest.approx(orbit[1:], rel=1e-12)
    assert orbit[-1] - orbit[0] == pytest.approx(k_copy_advantage(epsilon, k), rel=1e-9, abs=4e-16)
    assert orbit + orbit[::-1] == pytest.approx(np.ones(k + 1), abs=4e-16)
    # The staircase of coins is ε-DP between neighbors; the complements come from the reversed orbit.
    for law in (orbit, orbit[::-1]):
        with np.errstate(over="ignore"):
            assert np.all(np.abs(np.diff(np.log(np.maximum(law, 1e-300)))) <= epsilon * (1 + 1e-12) + 1e-15)


def test_k_copy_values_of_the_paper():
    ks = np.arange(1, 9)
    printed = [0.4621, 0.6321, 0.8021, 0.8647, 0.9272, 0.9502, 0.9732, 0.9817]
    assert k_copy_advantage(1.0, ks) == pytest.approx(printed, abs=5e-5)
    assert np.tanh(ks / 2) == pytest.approx([0.4621, 0.7616, 0.9051, 0.964, 0.9866, 0.9951, 0.9982, 0.9993], abs=5e-5)
    orbit = k_copy_orbit(1.0, 4)  # Figure 3 (left): two growth steps, two approach steps
    assert orbit[-1] - orbit[0] == pytest.approx(0.8647, abs=5e-5)
    assert np.sum(orbit[:-1] <= 1 / (math.e + 1)) == 2
    assert k_copy_orbit(1.0, 5)[0] == pytest.approx(math.exp(-2) / (math.e + 1), rel=1e-14)  # B.5's odd start
    E = math.exp(0.7)
    for j, x in (
        (3, 0.01),
        (2, 0.12),
        (1, 0.2),
        (0, 0.9),
    ):  # slope e^{ε(2j−k)} where j of k = 3 steps take the lower branch
        orbit = [x]
        for _ in range(3):
            orbit.append(PureDP(0.7).power(orbit[-1]))
        lower = sum(b < 1 / (E + 1) for b in orbit[:-1])
        climbed = PureDP(0.7).group(3).power([x, x + 1e-6])
        assert lower == j
        assert (climbed[1] - climbed[0]) / 1e-6 == pytest.approx(E ** (2 * j - 3), rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_geometric_noise_attains_every_k_and_laplace_only_even_ones(epsilon):
    count = np.arange(-400, 401)
    mass = (1 - math.exp(-epsilon)) / (1 + math.exp(-epsilon)) * np.exp(-epsilon * np.abs(count))
    for k in range(1, 9):
        shifted = np.concatenate([np.zeros(k), mass[:-k]])
        assert np.maximum(mass - shifted, 0).sum() == pytest.approx(k_copy_advantage(epsilon, k), rel=1e-9)
        laplace = 1 - math.exp(-k * epsilon / 2)
        assert laplace <= k_copy_advantage(epsilon, k) * (1 + 1e-14)
        assert (abs(laplace - k_copy_advantage(epsilon, k)) < 1e-14) == (k % 2 == 0)


def test_gaps_below_group_privacy():
    """Appendix B.5 step 5: the even identity, the odd positivity, the factor at k = 3, the golden ε."""
    epsilon = np.linspace(0.05, 6.0, 60)
    for k in (2, 4, 8):
        u = np.exp(-k * epsilon / 2)
        gap = np.tanh(k * epsilon / 2) - k_copy_advantage(epsilon, k)
        assert gap == pytest.approx(u * (1 - u) ** 2 / (1 + u**2), abs=1e-14)
    E = np.exp(epsilon)
    for k in (3, 5, 7, 9):
        a = (k + 1) / 2
        positive = E**a + E ** (1 - a) - E - 1
        gap = np.tanh(k * epsilon / 2) - k_copy_advantage(epsilon, k)
        assert np.all(positive > 0)
        assert gap == pytest.approx(2 * positive / ((E**k + 1) * (E + 1)), abs=1e-13)
    assert E**2 + 1 / E - E - 1 == pytest.approx((E - 1) ** 2 * (E + 1) / E, rel=1e-12)


# --- The extraction boundary ----------------------------------------------------------------------------------------


@given(epsilon=st.floats(0, 50), delta=st.floats(0, 1), mu=st.floats(0, 30), kappa=st.floats(-100, 0))
@quick
def test_boundary_in_closed_form(epsilon, delta, mu, kappa):
    kappa = 10.0**kappa
    with mpmath.workdps(130):
        e, d, k = mpmath.mpf(epsilon), mpmath.mpf(delta), mpmath.mpf(kappa)
        pure = min(mpmath.exp(e) * k, 1 - mpmath.exp(-e) * (1 - k), 1)
        approx = min(d + mpmath.exp(e) * k, 1 - mpmath.exp(-e) * (1 - d - k), 1)
    assert extraction_bound(PureDP(epsilon), kappa) == pytest.approx(float(pure), rel=1e-12)
    assert extraction_bound(ApproxDP(epsilon, delta), kappa) == pytest.approx(float(approx), rel=1e-12)
    gaussian = special.ndtr(special.ndtri(kappa) + mu)
    assert extraction_bound(GaussianDP(mu), kappa) == pytest.approx(gaussian, rel=1e-9)


def test_entropy_thresholds_of_the_paper():
    assert entropy_threshold(PureDP(4.0), 1, 0.1) == pytest.approx(9.0927, abs=5e-5)
    assert entropy_threshold(PureDP(1.0), 4, 0.1) == pytest.approx(6.7646, abs=5e-5)
    # Remark C.4: the entropy form is only sufficient above the regime edge
    naive, alpha = math.log2(math.e) + math.log2(1 / 0.9), PureDP(1.0).threshold(0.9)
    assert (naive, math.log2(3), alpha) == pytest.approx((1.595, 1.585, 0.728), abs=5e-4)
    assert math.exp(-1) * 0.9 < 1 / 3 <= alpha
    assert extraction_bound(PureDP(1.0), 1 / 3) <= 0.9
    assert entropy_threshold(PureDP(1.0), 1, 0.9) < math.log2(3) < naive


@given(epsilon=st.floats(1e-8, 50), m=st.integers(1, 10**6), share=st.floats(1e-6, 0.999))
@quick
def test_entropy_threshold_in_the_first_regime(epsilon, m, share):
    tau = share * special.expit(epsilon)
    assert entropy_threshold(PureDP(epsilon), m, tau) == pytest.approx(
        epsilon * math.log2(math.e) + math.log2(m / tau), rel=1e-12, abs=1e-12
    )


def test_entropy_threshold_extremes():
    assert entropy_threshold(PureDP(1.0), 8, 1.0) == 3.0
    assert entropy_threshold(PureDP(1.0), 1, 0.0) == math.inf
    assert entropy_threshold(ApproxDP(1.0, 0.1), 1, 0.1) == math.inf
    assert entropy_threshold(PureDP(1.0), 1, [0.1, 1.0]).shape == (2,)
    with pytest.raises(ValueError, match="tau"):  # C.6: below F(0) no entropy helps
        entropy_threshold(ApproxDP(1.0, 0.1), 1, 0.05)
    # duplication: k copies cost kε log2 e in the first regime
    assert entropy_threshold(PureDP(0.5).group(8), 1, 0.1) == pytest.approx(4 * math.log2(math.e) + math.log2(10))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("tau", [0.05, 0.3, 0.5])
def test_uniform_priors_are_safe_exactly_from_the_threshold_on(epsilon, tau):
    f, N = PureDP(epsilon), np.arange(1, 700)
    assert tau <= special.expit(epsilon)
    for m in (1, 2, 4, 10):
        attained = extraction_bound(f, np.minimum(1.0, m / N))
        safe, entropy = attained <= tau, np.log2(N)
        clear = np.abs(entropy - entropy_threshold(f, m, tau)) > 1e-9
        assert np.array_equal(safe[clear], (entropy >= entropy_threshold(f, m, tau))[clear])


@given(f=CURVES, tau=st.floats(0, 1), weights=priors, m=st.integers(1, 4), copies=st.integers(1, 3))
@quick
def test_enough_entropy_is_safe_and_an_extractable_secret_has_a_large_baseline(f, tau, weights, m, copies):
    """Theorem 5.1(iii) for every prior, Corollaries 5.3 and 5.5, α*(τ) ≤ τ and f(f(κ)) ≤ κ."""
    prior = normalized(weights)
    m, f = min(m, len(prior)), f.group(copies)
    tau = max(tau, f.power(0.0))
    kappa = min(1.0, math.fsum(np.sort(prior)[-m:]))
    found = extraction_frontier(f, prior, m).value
    if -math.log2(prior.max()) >= entropy_threshold(f, m, tau):
        assert found <= tau + 1e-9
    if found > tau + 1e-9:
        assert kappa > f.threshold(tau) - 1e-12
    if tau > extraction_bound(f, kappa) + 1e-9:  # refuting at success rate τ
        assert kappa <= f.threshold(tau) + 1e-12
    assert f.threshold(tau) <= tau * (1 + 1e-9) + 1e-15
    assert f(f(kappa)) <= kappa * (1 + 1e-9) + 1e-15


@pytest.mark.parametrize("epsilon", [0.4, 1.0, 3.0])
def test_slack_of_the_first_branch_above_the_regime_edge(epsilon):
    tau = np.linspace(special.expit(epsilon), 1.0, 50)[1:]
    E, alpha = math.exp(epsilon), PureDP(epsilon).threshold(tau)
    assert E * alpha - tau == pytest.approx((E - 1) * ((E + 1) * tau - E), abs=1e-9)
    assert np.all(alpha > math.exp(-epsilon) * tau)


# --- Replace-one neighbors ------------------------------------------------------------------------------------------


def replace_program(prior, m, epsilon, outside=False):
    sets = lists(len(prior), m)
    value = [[mass * (z in c) for c in sets] for z, mass in enumerate(prior)]
    value += [[0.0] * len(sets)] * outside  # a corpus whose record is something else altogether
    return best(value, list(combinations(range(len(value)), 2)), [(math.exp(epsilon), 0.0)])


@pytest.mark.parametrize(("prior", "m"), PROGRAMS)
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
def test_replace_bound_against_the_program(prior, m, epsilon):
    kappa = min(1.0, sum(sorted(prior)[-m:]))
    bound, program = replace_extraction_bound(epsilon, kappa), replace_program(prior, m, epsilon)
    assert program <= bound + 1e-8
    assert bound <= extraction_bound(PureDP(epsilon), kappa) + 1e-14
    if len(set(prior)) == 1:
        assert program == pytest.approx(bound, abs=1e-8)
        assert replace_program(prior, m, epsilon, outside=True) == pytest.approx(bound, abs=1e-8)


@pytest.mark.parametrize(("N", "m"), [(3, 1), (5, 2), (6, 3), (6, 5)])
def test_replace_bound_is_attained_on_uniform_priors_and_the_half_budget_gadget_is_below(N, m):
    epsilon, kappa = 1.3, m / N
    bound = replace_extraction_bound(epsilon, kappa)
    assert replace_program((1.0 / N,) * N, m, epsilon) == pytest.approx(bound, abs=1e-8)
    half = PureDP(epsilon / 2).power(kappa)  # Remark C.5: Lemma 5.2's gadget at half the budget
    weight, sets = (half - kappa) / (1 - kappa), lists(N, m)
    laws = np.array(
        [[weight * (z in c) / math.comb(N - 1, m - 1) + (1 - weight) / len(sets) for c in sets] for z in range(N)]
    )
    for z, w in combinations(range(N), 2):
        alpha, beta = neyman_pearson(laws[z], laws[w])
        assert np.all(beta >= PureDP(epsilon)(alpha) - 1e-12)
    assert sum(laws[0][i] for i, c in enumerate(sets) if 0 in c) == pytest.approx(half)
    assert half <= bound + 1e-14


@given(epsilon=st.floats(0, 50), kappa=st.floats(-100, 0), tau=st.floats(1e-12, 1 - 1e-12))
@quick
def test_replace_formulas_to_sixty_digits_and_inverse_to_each_other(epsilon, kappa, tau):
    kappa = 10.0**kappa
    with mpmath.workdps(60):
        E, k, t = mpmath.exp(epsilon), mpmath.mpf(kappa), mpmath.mpf(tau)
        assert replace_extraction_bound(epsilon, kappa) == pytest.approx(float(E * k / (1 - k + E * k)), rel=1e-13)
        assert replace_threshold(epsilon, tau) == pytest.approx(float(t / (t + E * (1 - t))), rel=1e-13)
    low, high = PureDP(epsilon).threshold(tau), PureDP(epsilon / 2).threshold(tau)
    assert low * (1 - 1e-12) <= replace_threshold(epsilon, tau) <= high * (1 + 1e-12)  # Remark 5.4's bracket


def test_replace_threshold_touches_the_upper_end_of_the_bracket_once():
    edge = special.expit(0.6)
    assert replace_threshold(1.2, edge) == pytest.approx(PureDP(0.6).threshold(edge), rel=1e-14)
    tau = np.array([0.1, 0.4, 0.55])
    assert PureDP(0.6).threshold(tau) == pytest.approx(math.exp(-0.6) * tau, rel=1e-14)
    assert np.all(replace_threshold(1.2, tau) < PureDP(0.6).threshold(tau) * (1 - 1e-6))
    assert replace_threshold([0.0, 5.0], [[0.0], [1.0]]).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert replace_extraction_bound(2000.0, [0.0, 1e-300, 1.0]).tolist() == [0.0, 1.0, 1.0]
    assert replace_threshold(2000.0, [0.0, 0.5, 1.0]).tolist() == [0.0, 0.0, 1.0]


# --- Audits ---------------------------------------------------------------------------------------------------------


def coins(chances, count):
    """P(at least `count` successes) by listing every outcome."""
    return sum(
        math.prod(c if hit else 1 - c for c, hit in zip(chances, outcome, strict=True))
        for outcome in product((0, 1), repeat=len(chances))
        if sum(outcome) >= count
    )


def claimed(epsilon, kappa, runs, adjacency):
    if runs == "independent" and adjacency == "add-remove":
        return extraction_bound(PureDP(epsilon), kappa)
    return replace_extraction_bound(2 * epsilon if runs == "shared" and adjacency == "add-remove" else epsilon, kappa)


KINDS = [(runs, adjacency) for runs in ("independent", "shared") for adjacency in ("add-remove", "replace-one")]


@pytest.mark.parametrize(("runs", "adjacency"), KINDS)
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_refuted_epsilon_sits_where_the_tail_crosses(runs, adjacency, confidence):
    kappa = np.array([0.02, 0.3, 0.11, 0.05, 0.2, 0.02, 0.6])
    for wins in ([1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0]):
        found, count = refuted_epsilon(wins, kappa, confidence, runs, adjacency), sum(wins)
        if coins(claimed(0.0, kappa, runs, adjacency), count) > 1 - confidence:
            assert found == 0.0
            continue
        assert coins(claimed(found * (1 - 1e-9), kappa, runs, adjacency), count) <= 1 - confidence
        assert coins(claimed(found * (1 + 1e-9), kappa, runs, adjacency), count) >= 1 - confidence
        assert found > 0.0


@pytest.mark.parametrize(("runs", "adjacency"), KINDS)
@pytest.mark.parametrize("truth", [0.2, 1.0, 2.0])
def test_a_true_epsilon_is_seldom_refuted(runs, adjacency, truth):
    """All 2^5 outcomes of an audit of the worst case, five independent coins at their caps."""
    kappa = np.array([0.02, 0.3, 0.11, 0.05, 0.2])
    chances = claimed(truth, kappa, runs, adjacency)
    for confidence in (0.6, 0.95):
        wrong = sum(
            math.prod(c if hit else 1 - c for c, hit in zip(chances, outcome, strict=True))
            for outcome in product((0, 1), repeat=5)
            if refuted_epsilon(outcome, kappa, confidence, runs, adjacency) > truth
        )
        assert wrong <= 1 - confidence + 1e-9


def shared_program(N, canaries, epsilon, needed, adjacency):
    """The largest chance that at least `needed` of the canaries planted in one model are listed, m = 1, uniform."""
    present = list(product(range(N), repeat=canaries))
    corpora = present if adjacency == "replace-one" else list(product(range(-1, N), repeat=canaries))
    value = np.zeros((len(corpora), len(present)))
    for row, corpus in enumerate(corpora):
        if -1 not in corpus:
            hits = (np.array(present) == corpus).sum(axis=1)
            value[row] = (hits >= needed) / len(present)

    def neighbors(a, b):
        changed = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
        return len(changed) == 1 and (adjacency == "replace-one" or -1 in changed[0])

    near = [(i, j) for i, j in combinations(range(len(corpora)), 2) if neighbors(corpora[i], corpora[j])]
    return best(value, near, [(math.exp(epsilon), 0.0)])


def test_canaries_that_share_a_model_are_not_independent():
    """Beyond the paper: 0.719 at ε = 1 with two canaries, more than F(1/2)² and within the bound for shared runs."""
    both = shared_program(2, 2, 1.0, 2, "add-remove")
    assert both == pytest.approx(0.719, abs=5e-4)
    assert both > extraction_bound(PureDP(1.0), 0.5) ** 2 + 0.05
    assert both <= replace_extraction_bound(2.0, 0.5) ** 2
    # At this confidence the independent test would wrongly refute ε = 1 and the shared one does not.
    confidence = 1 - 0.7
    assert refuted_epsilon([1, 1], 0.5, confidence, "independent") > 1.0
    assert refuted_epsilon([1, 1], 0.5, confidence, "shared") < 1.0


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("N", "canaries"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("epsilon", [0.4, 1.0])
def test_shared_tails_dominate_every_mechanism(adjacency, N, canaries, epsilon):
    chance = replace_extraction_bound(2 * epsilon if adjacency == "add-remove" else epsilon, 1 / N)
    for needed in range(1, canaries + 1):
        program, tail = shared_program(N, canaries, epsilon, needed, adjacency), coins([chance] * canaries, needed)
        assert program <= tail + 1e-8
        if adjacency == "replace-one" and needed == canaries:  # a product of subset selections attains it
            assert program == pytest.approx(tail, abs=1e-8)


@pytest.mark.parametrize(
    ("wins", "n", "kappa"), [(9, 40, 0.01), (40, 40, 0.3), (35, 40, 0.4), (1, 1, 1e-6), (300, 700, 0.05)]
)
def test_equal_baselines_agree_with_clopper_pearson(wins, n, kappa):
    """The refuted ε is where the cap meets the one-sided lower limit of the success rate."""
    rate, audit = special.betaincinv(wins, n - wins + 1, 0.05), np.arange(n) < wins
    odds = special.logit(rate) - special.logit(kappa)
    growth = math.log(rate / kappa)
    expected = growth if rate <= special.expit(growth) else math.log((1 - kappa) / (1 - rate))
    assert refuted_epsilon(audit, kappa, 0.95) == pytest.approx(expected, rel=1e-8)
    assert refuted_epsilon(audit, kappa, 0.95, adjacency="replace-one") == pytest.approx(odds, rel=1e-8)
    assert refuted_epsilon(audit, np.full(n, kappa), 0.95, "shared", "replace-one") == pytest.approx(odds, rel=1e-8)
    assert refuted_epsilon(audit, kappa, 0.95, "shared", "add-remove") == pytest.approx(odds / 2, rel=1e-8)


def test_refuted_epsilon_extremes():
    assert refuted_epsilon([0, 0, 0], 0.1, 0.95) == 0.0
    assert refuted_epsilon([1, 1, 1], 1.0, 0.95) == 0.0
    assert refuted_epsilon([1, 0], [0.0, 0.9], 0.95) == math.inf
    assert refuted_epsilon([0, 1], [0.0, 1e-6], 0.95) == pytest.approx(math.log(0.05e6), rel=1e-9)
    assert refuted_epsilon([True], [1e-320], 0.95) == refuted_epsilon([True], [1e-300], 0.95)
    assert refuted_epsilon([True], [1e-300], 0.95) == pytest.approx(math.log(0.05) + 300 * math.log(10), rel=1e-9)
    few, more = ([1] * wins + [0] * (20 - wins) for wins in (6, 9))
    assert refuted_epsilon(few, 0.05, 0.95) < refuted_epsilon(more, 0.05, 0.95)
    assert refuted_epsilon(few, 0.05, 0.99) < refuted_epsilon(few, 0.05, 0.95)
    assert refuted_epsilon(few, 0.08, 0.95) < refuted_epsilon(few, 0.05, 0.95)


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: memorization_cap(PureDP(1), "cond"), "functional"),
        (lambda: memorization_cap(PureDP(1), adjacency="zero-out"), "adjacency"),
        (lambda: memorization_cap(PureDP(1), copies=0), "copies"),
        (lambda: truncated_loss_cap(PureDP(1), -1.0), "M"),
        (lambda: truncated_loss_cap(PureDP(1), math.inf), "M"),
        (lambda: k_copy_advantage(-1.0, 2), "epsilon"),
        (lambda: k_copy_advantage(1.0, 1.5), "k"),
        (lambda: k_copy_advantage(1.0, [1, 0]), "k"),
        (lambda: k_copy_orbit(1.0, 0), "k"),
        (lambda: k_copy_orbit(math.nan, 1), "epsilon"),
        (lambda: extraction_bound(PureDP(1), 1.2), "kappa"),
        (lambda: extraction_bound(PureDP(1), math.nan), "kappa"),
        (lambda: entropy_threshold(PureDP(1), 0, 0.1), "m"),
        (lambda: entropy_threshold(PureDP(1), 1, 1.1), "tau"),
        (lambda: replace_extraction_bound(-0.1, 0.5), "epsilon"),
        (lambda: replace_extraction_bound(math.inf, 0.5), "epsilon"),
        (lambda: replace_threshold(1.0, -0.5), "tau"),
        (lambda: extraction_frontier(PureDP(1), [0.5, 0.4], 1), "prior"),
        (lambda: extraction_frontier(PureDP(1), [0.5, 0.5], 3), "m"),
        (lambda: extraction_frontier(PureDP(1), [0.5, 0.5], 0), "m"),
        (lambda: extraction_frontier(PureDP(1), [0.5, math.nan], 1), "prior"),
        (lambda: extraction_frontier(PureDP(1), [0.5, 0.5], 1, copies=0), "copies"),
        (lambda: extraction_frontier(PureDP(1), [0.5], 1, rest=0.5), "atom_cap"),
        (lambda: extraction_frontier(PureDP(1), [0.5], 1, rest=0.5, atom_cap=0.0), "atom_cap"),
        (lambda: extraction_frontier(PureDP(1), [0.5], 1, rest=0.4, atom_cap=0.1), "prior and rest"),
        (lambda: extraction_frontier(PureDP(1), [[0.5]], 1, rest=0.5, atom_cap=0.1), "prior"),
        (
            lambda: extraction_frontier(PiecewiseLinear([0, 0.2, 1], [1, 0.5, 0]), [0.5, 0.5], 1),
            "f must be a symmetric",
        ),
        (lambda: refuted_epsilon([], 0.1, 0.95), "successes"),
        (lambda: refuted_epsilon([2], 0.1, 0.95), "successes"),
        (lambda: refuted_epsilon([0.5], 0.1, 0.95), "successes"),
        (lambda: refuted_epsilon([1, 0], [0.1, 0.1, 0.1], 0.95), "baselines"),
        (lambda: refuted_epsilon([1, 0], -0.1, 0.95), "baselines"),
        (lambda: refuted_epsilon([1, 0], 0.1, 1.0), "confidence"),
        (lambda: refuted_epsilon([1, 0], 0.1, 0.9, runs="one"), "runs"),
        (lambda: refuted_epsilon([1, 0], 0.1, 0.9, adjacency="swap"), "adjacency"),
    ],
)
def test_bad_input_names_the_argument(call, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        call()
