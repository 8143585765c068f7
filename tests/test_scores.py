"""Membership scores: against loops in float64 that share nothing with the package, and every refusal."""

from __future__ import annotations

import copy
import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    CONTEXT,
    FAMILIES,
    SENTENCES,
    VOCABULARY,
    IdsOnly,
    absolute_model,
    device,
    tiny_model,
    tiny_tokenizer,
)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from memorization import scores  # noqa: E402

FEW = settings(max_examples=60, deadline=None, derandomize=True)
ROWS = st.lists(st.lists(st.floats(-60, 0, width=32), min_size=1, max_size=12).map(np.array), min_size=1, max_size=5)


def ragged_ids(n=7, seed=3, low=2, high=14):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length) for length in rng.integers(low, high, n)]


def slow_statistics(model, ids):
    """One sequence, float64 weights, one token at a time: log p, and mean and variance of log p by their definition."""
    exact = copy.deepcopy(model).double().eval()
    log_p, mean, variance = [], [], []
    for t in range(1, len(ids)):
        with torch.no_grad():
            logits = exact(torch.tensor([[int(i) for i in ids[:t]]], device=device())).logits[0, -1]
        probabilities = torch.softmax(logits, 0).cpu().numpy()
        logs = np.log(probabilities)
        log_p.append(logs[ids[t]])
        mean.append((probabilities * logs).sum())
        variance.append((probabilities * (logs - mean[-1]) ** 2).sum())
    return np.array(log_p), np.array(mean), np.array(variance)


def pad(sequences, side, extra=0, filler=0):
    width = max(map(len, sequences)) + extra
    ids = np.full((len(sequences), width), filler)
    mask = np.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        where = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[i, where], mask[i, where] = sequence, 1
    return torch.tensor(ids), torch.tensor(mask)


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "absolute"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_statistics_match_a_slow_loop_on_either_side_of_padding(family, side):
    model, sequences = absolute_model() if family == "absolute" else tiny_model(family), ragged_ids()
    ids, mask = pad(sequences, side, extra=3, filler=-100)  # padding may hold anything
    outputs = scores.token_statistics(model, ids.to(device()), mask.to(device()))
    alone = scores.token_log_probs(model, ids, mask)
    assert torch.equal(torch.isnan(alone), torch.isnan(outputs[0]))
    np.testing.assert_allclose(alone.cpu(), outputs[0].cpu(), atol=1e-6)
    for output in outputs:
        assert output.dtype == torch.float32 and output.shape == (len(ids), ids.shape[1] - 1)
        assert output.device.type == device()
    for i, sequence in enumerate(sequences):
        end = ids.shape[1] - 1 if side == "left" else len(sequence) - 1
        scored = slice(end - (len(sequence) - 1), end)
        for output, expected in zip(outputs, slow_statistics(model, sequence), strict=True):
            np.testing.assert_allclose(output[i, scored].cpu(), expected, rtol=1e-5, atol=1e-5)
            assert int(torch.isnan(output[i]).sum()) == output.shape[1] - (len(sequence) - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_models_are_scored_in_float32(family):
    model = tiny_model(family).bfloat16()
    ids = torch.tensor(ragged_ids(1, low=12)[0][None], device=device())
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    assert logits.dtype == torch.bfloat16
    exact = torch.log_softmax(logits[0].double(), -1)
    log_p, mean, variance = scores.token_statistics(model, ids)
    assert log_p.dtype == torch.float32
    np.testing.assert_allclose(log_p[0].cpu(), exact.gather(-1, ids[0, 1:, None])[:, 0].cpu(), atol=1e-5)
    np.testing.assert_allclose(mean[0].cpu(), (exact.exp() * exact).sum(-1).cpu(), atol=1e-5)
    spread = (exact.exp() * (exact - (exact.exp() * exact).sum(-1, keepdim=True)) ** 2).sum(-1)
    np.testing.assert_allclose(variance[0].cpu(), spread.cpu(), rtol=1e-5)


@FEW
@given(
    st.lists(st.floats(-300, 300) | st.just(-math.inf), min_size=2, max_size=30).filter(
        lambda row: any(math.isfinite(x) for x in row)
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.data(),
)
def test_logit_statistics_match_float64(row, dtype, data):
    logits = torch.tensor(row, dtype=dtype)
    target = data.draw(st.integers(0, len(row) - 1))
    wide = logits.to(torch.float32).double().numpy()
    logs = wide - np.logaddexp.reduce(wide)
    probabilities = np.exp(logs)
    finite = np.where(probabilities > 0, logs, 0.0)
    mean = (probabilities * finite).sum()
    before = logits.clone()
    outputs = scores.logit_statistics(logits, torch.tensor(target))
    assert torch.equal(before, logits)
    for output, expected in zip(
        outputs, (logs[target], mean, (probabilities * (finite - mean) ** 2).sum()), strict=True
    ):
        assert output.dtype == torch.float32 and output.shape == ()
        np.testing.assert_allclose(float(output), expected, rtol=1e-5, atol=2e-5)


def test_uniform_rows_are_exact_and_finite():
    logits = torch.full((3, 7), 1234.5)
    logits[1, 3:] = -math.inf  # uniform on a part of the vocabulary
    log_p, mean, variance = scores.logit_statistics(logits, torch.tensor([0, 1, 2]))
    np.testing.assert_allclose(log_p, [-math.log(7), -math.log(3), -math.log(7)], rtol=1e-6)
    assert torch.equal(log_p, mean) and not variance.any()
    assert scores.min_k_plus_plus_score(log_p, mean, variance, k=1) == 0.0
    # Moments from elsewhere may carry float32 noise, which is no evidence.
    noisy = np.float32(-math.log(7)) * np.array([1 + 1e-7, 1 - 2e-7])
    assert scores.min_k_plus_plus_score(noisy, np.full(2, -math.log(7)), np.array([1e-14, 3e-14]), k=1) == 0.0
    impossible, mean, variance = scores.logit_statistics(logits[1:2], torch.tensor([5]))
    assert float(impossible) == -math.inf and torch.isfinite(mean).all() and not variance.any()
    assert scores.min_k_plus_plus_score(impossible, mean, variance) == -math.inf


# --- the scores as functions -----------------------------------------------------------------------------------------


def slow_lowest(values, k_hundredths):
    take = max(1, k_hundredths * len(values) // 100)
    return sum(sorted(values)[:take]) / take


@FEW
@given(ROWS, st.integers(1, 100))
def test_scores_match_slow_loops(rows, hundredths):
    k = float(f"0.{hundredths:02d}") if hundredths < 100 else 1
    means = [math.fsum(row) / len(row) for row in rows]
    texts = ["ab" * i for i in range(len(rows))]
    np.testing.assert_allclose(scores.loss_score(rows), means, rtol=1e-12)
    np.testing.assert_allclose(scores.perplexity_score(rows), [-math.exp(-mean) for mean in means], rtol=1e-9)
    expected = [mean / len(zlib.compress(text.encode())) for mean, text in zip(means, texts, strict=True)]
    np.testing.assert_allclose(scores.zlib_score(rows, texts), expected, rtol=1e-12)
    np.testing.assert_allclose(scores.min_k_score(rows, k), [slow_lowest(row, hundredths) for row in rows], rtol=1e-12)
    reference = [row / 2 for row in rows]
    np.testing.assert_allclose(scores.reference_score(rows, reference), [mean / 2 for mean in means], rtol=1e-12)
    moments = [np.full(len(row), -3.0) for row in rows], [np.arange(1.0, len(row) + 1) for row in rows]
    standard = [(row + 3) / np.sqrt(np.arange(1, len(row) + 1)) for row in rows]
    plus_plus = scores.min_k_plus_plus_score(rows, *moments, k)
    np.testing.assert_allclose(plus_plus, [slow_lowest(row, hundredths) for row in standard], rtol=1e-9, atol=1e-12)


@FEW
@given(ROWS)
def test_ragged_padded_masked_and_single_rows_agree(rows):
    width = max(map(len, rows)) + 2
    padded = np.full((len(rows), width), np.nan)
    for i, row in enumerate(rows):
        padded[i, width - len(row) :] = row
    mask = ~np.isnan(padded)
    filled = np.where(mask, padded, 0.0)
    for function in (scores.loss_score, scores.perplexity_score, scores.min_k_score):
        expected = function(rows)
        assert isinstance(expected, np.ndarray) and expected.dtype == np.float64
        np.testing.assert_allclose(function(padded), expected, rtol=1e-12)
        np.testing.assert_allclose(function(filled, mask=mask), expected, rtol=1e-12)
        tensors = torch.tensor(filled), torch.tensor(mask)
        np.testing.assert_allclose(function(tensors[0], mask=tensors[1]), expected, rtol=1e-6)
        np.testing.assert_allclose([function(row) for row in rows], expected, rtol=1e-12)
        assert isinstance(function(rows[0]), float) and isinstance(function(list(rows[0])), float)


def test_k_is_the_decimal_that_was_written():
    assert math.floor(0.29 * 100) == 28  # the trap
    ladder = -np.arange(1.0, 201.0)
    for n in (1, 3, 7, 10, 50, 100, 150, 200):
        for hundredths in range(1, 101):
            take = max(1, hundredths * n // 100)
            expected = -(2 * n - take + 1) / 2  # mean of the `take` lowest of −1 … −n
            for k in (hundredths / 100, np.float64(hundredths / 100), np.float32(hundredths / 100)):
                assert scores.min_k_score(ladder[:n], k) == expected, (n, k)


def test_impossible_tokens_never_give_nan():
    rows = [np.array([-1.0, -math.inf, -2.0]), np.array([-math.inf, -math.inf]), np.array([-0.5])]
    fine = [np.array([-1.0, -1.0, -1.0]), np.array([-1.0, -1.0]), np.array([-1.0])]
    one = [np.ones_like(row) for row in rows]
    low = [-math.inf, -math.inf]
    np.testing.assert_array_equal(scores.loss_score(rows), [*low, -0.5])
    np.testing.assert_array_equal(scores.perplexity_score(rows), [*low, -math.exp(0.5)])
    np.testing.assert_array_equal(scores.zlib_score(rows, ["a", "b", "c"])[:2], low)
    np.testing.assert_array_equal(scores.min_k_score(rows), [*low, -0.5])
    np.testing.assert_array_equal(scores.min_k_plus_plus_score(rows, fine, one), [*low, 0.5])
    np.testing.assert_array_equal(scores.reference_score(rows, fine), [*low, 0.5])
    np.testing.assert_array_equal(scores.reference_score(fine, rows), [math.inf, math.inf, -0.5])
    np.testing.assert_array_equal(scores.reference_score(rows, rows), [0.0, 0.0, 0.0])
    assert scores.perplexity_score([-800.0]) == -math.inf  # overflows, without a warning


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scores.loss_score([]), "log_probs"),
        (lambda: scores.loss_score([[]]), "row 0"),
        (lambda: scores.loss_score([[-1.0], []]), "row 1"),
        (lambda: scores.loss_score([0.5]), "at most 0"),
        (lambda: scores.loss_score(np.zeros((2, 2, 2))), "dimensions"),
        (lambda: scores.loss_score([-1.0, -2.0], mask=[True]), "mask"),
        (lambda: scores.min_k_score([-1.0], k=0.0), "k must lie in"),
        (lambda: scores.min_k_score([-1.0], k=1.5), "k must lie in"),
        (lambda: scores.min_k_score([-1.0], k=math.nan), "k must lie in"),
        (lambda: scores.zlib_score([[-1.0], [-1.0]], ["a"]), "texts"),
        (lambda: scores.reference_score([-1.0, -2.0], [-1.0]), "reference_log_probs"),
        (lambda: scores.min_k_plus_plus_score([-1.0], [-1.0], [-1.0]), "variance"),
        (lambda: scores.min_k_plus_plus_score([-1.0], [-math.inf], [1.0]), "mean"),
        (lambda: scores.min_k_plus_plus_score([-1.0, -2.0], [-1.0], [1.0]), "mean must have the shape"),
    ],
)
def test_bad_arguments_of_scores(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- all scores of texts ---------------------------------------------------------------------------------------------


def slow_membership(model, reference, whole, start, text):
    log_p, mean, variance = (values[start - 1 :] for values in slow_statistics(model, whole))
    other = slow_statistics(reference, whole)[0][start - 1 :]
    loss = log_p.mean()
    return {
        "loss": loss,
        "perplexity": -math.exp(-loss),
        "zlib": loss / len(zlib.compress(text.encode())),
        "reference": loss - other.mean(),
        "min_k": slow_lowest(log_p, 20),
        "min_k_plus_plus": slow_lowest((log_p - mean) / np.sqrt(variance), 20),
    }


def close(result, expected):
    assert set(result) == set(expected)
    for name, values in expected.items():
        assert result[name].dtype == np.float64
        np.testing.assert_allclose(result[name], values, rtol=2e-5, atol=1e-5, err_msg=name)


TEXTS = [*SENTENCES, "fox", "zebras at noon", "the old sphinx said the secret", "a"]
TEXTS = [text for text in TEXTS if 2 <= len(tiny_tokenizer()(text)["input_ids"]) <= CONTEXT - 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bos", [False, True])
def test_membership_scores_match_slow_loops_for_any_batch(family, bos):
    model, reference, tokenizer = tiny_model(family), tiny_model(family, seed=1), tiny_tokenizer(bos)
    assert len(TEXTS) >= 6
    rows = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append(slow_membership(model, reference, [0, *ids] if bos else ids, 1, text))
    expected = {name: [row[name] for row in rows] for name in rows[0]}
    for batch_size in (1, 3, 64):
        close(scores.membership_scores(model, tokenizer, TEXTS, reference, batch_size=batch_size), expected)
    backwards = scores.membership_scores(model, tokenizer, TEXTS[::-1], reference)
    close({name: values[::-1] for name, values in backwards.items()}, expected)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]  # with its beginning-of-sequence token, if any
    close(scores.membership_scores(model, tokenizer, ids, reference), expected)
    assert "reference" not in scores.membership_scores(model, tokenizer, TEXTS)


@pytest.mark.parametrize("bos", [False, True])
def test_a_secret_is_scored_given_its_prefix(bos):
    model, reference, tokenizer = tiny_model("neox"), tiny_model("neox", seed=1), tiny_tokenizer(bos)
    prefixes, secrets = ["the quick brown", "a", "pack my box with"], [" fox", " secret may", " five dozen"]
    rows = []
    for prefix, secret in zip(prefixes, secrets, strict=True):
        c, z = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prefix, secret))
        rows.append(slow_membership(model, reference, [0] * bos + c + z, bos + len(c), secret))
    expected = {name: [row[name] for row in rows] for name in rows[0]}
    close(scores.membership_scores(model, tokenizer, secrets, reference, prefixes=prefixes), expected)
    as_ids = [tokenizer(prefix, add_special_tokens=False)["input_ids"] for prefix in prefixes]
    close(scores.membership_scores(model, tokenizer, secrets, reference, prefixes=as_ids, batch_size=2), expected)


def count_forwards(model):
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0]))
    return calls


@pytest.mark.parametrize(("bos", "given_ids"), [(False, False), (True, False), (True, True)])
def test_one_forward_pass_a_batch_and_one_beginning_of_sequence(bos, given_ids):
    model, reference, tokenizer = tiny_model("qwen2"), tiny_model("qwen2", seed=1), tiny_tokenizer(bos)
    texts = [tokenizer(text)["input_ids"] for text in TEXTS] if given_ids else TEXTS
    calls, reference_calls = count_forwards(model), count_forwards(reference)
    scores.membership_scores(model, tokenizer, texts, reference, batch_size=3)
    assert len(calls) == len(reference_calls) == math.ceil(len(TEXTS) / 3)
    for ids in calls:
        assert (ids[:, 0] == 0).all() == bos and not (ids[:, 1:2] == 0).any()


def test_evaluation_mode_inside_and_every_mode_restored_after():
    tokenizer = tiny_tokenizer()
    model, still = tiny_model("neox", dropout=0.5), tiny_model("neox")
    expected = scores.membership_scores(still, tokenizer, TEXTS)
    model.train()
    model.gpt_neox.layers[0].eval()  # a module of its own mind
    modes = [module.training for module in model.modules()]
    np.testing.assert_array_equal(scores.membership_scores(model, tokenizer, TEXTS)["loss"], expected["loss"])
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        model.lm_head.weight[3, 3] = math.nan
    for call in (
        lambda: scores.membership_scores(model, tokenizer, TEXTS),
        lambda: scores.token_log_probs(model, torch.tensor([[1, 2, 3]])),
        lambda: scores.token_statistics(model, torch.tensor([[1, 2, 3]])),
        lambda: scores.membership_scores(still, tokenizer, TEXTS, model),
    ):
        with pytest.raises(FloatingPointError, match="NaN"):
            call()
    assert [module.training for module in model.modules()] == modes
    assert not still.training and all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_neither_kept_nor_switched_off_for_good():
    model = tiny_model("neox")
    assert not scores.token_log_probs(model, torch.tensor([[1, 2, 3]])).requires_grad
    assert torch.is_grad_enabled() and model(torch.tensor([[1, 2]], device=device())).logits.requires_grad


def test_a_wrapper_that_takes_only_ids_scores_the_same():
    model, tokenizer = tiny_model("neox"), tiny_tokenizer()
    prefixes = ["the"] * len(TEXTS)
    for options in ({}, {"prefixes": prefixes}):
        wrapped = scores.membership_scores(IdsOnly(model), tokenizer, TEXTS, **options)
        close(wrapped, scores.membership_scores(model, tokenizer, TEXTS, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_loads_and_scores(family, tmp_path):
    model, tokenizer = tiny_model(family), tiny_tokenizer(True)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).to(device())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    close(scores.membership_scores(again, theirs, TEXTS), scores.membership_scores(model, tokenizer, TEXTS))


LONG = "fox " * CONTEXT


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, t: scores.membership_scores(m, t, []), "texts must hold at least one"),
        (lambda m, t: scores.membership_scores(m, t, "fox"), "list of strings"),
        (lambda m, t: scores.membership_scores(m, t, ["fox", ""]), r"texts\[1\] is empty"),
        (lambda m, t: scores.membership_scores(m, t, ["fox", LONG]), rf"texts\[1\].*context of {CONTEXT}"),
        (lambda m, t: scores.membership_scores(m, t, ["fox", [1, 2]]), "mixture"),
        (lambda m, t: scores.membership_scores(m, t, [[1, VOCABULARY]]), "do tokenizer and model belong together"),
        (lambda m, t: scores.membership_scores(m, t, [[1, -1]]), "token id -1"),
        (lambda m, t: scores.membership_scores(m, t, [[1.0, 2.0]]), "whole token ids"),
        (lambda m, t: scores.membership_scores(m, t, [[1]]), "nothing before it"),
        (lambda m, t: scores.membership_scores(m, t, ["fox"], prefixes=[""]), r"prefixes\[0\] is empty"),
        (lambda m, t: scores.membership_scores(m, t, ["fox"], prefixes=["a", "b"]), "prefixes must have one entry"),
        (lambda m, t: scores.membership_scores(m, t, ["fox"], prefixes=[LONG[:150]]), "context"),
        (lambda m, t: scores.membership_scores(m, t, ["fox"], batch_size=0), "batch_size"),
        (lambda m, t: scores.membership_scores(m, t, ["fox"], k=2), "k must lie in"),
        (lambda m, t: scores.token_log_probs(m, torch.tensor([1, 2])), "input_ids"),
        (lambda m, t: scores.token_log_probs(m, torch.tensor([[1, 2]]), torch.tensor([[1]])), "attention_mask"),
        (
            lambda m, t: scores.token_log_probs(m, torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 0]])),
            "empty",
        ),
        (lambda m, t: scores.token_log_probs(m, torch.tensor([[1]])), "two tokens"),
    ],
)
def test_bad_input(call, message):
    model, tokenizer = tiny_model("neox").train(), tiny_tokenizer()
    with pytest.raises(ValueError, match=message):
        call(model, tokenizer)
    assert model.training


def test_the_reference_must_know_the_tokens_and_hold_the_text():
    small = tiny_model("neox", vocabulary=40)
    with pytest.raises(ValueError, match=r"reference model.*\[0, 39\]"):
        scores.membership_scores(tiny_model("neox"), tiny_tokenizer(), SENTENCES, small)
