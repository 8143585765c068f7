"""The training loop: against a plain reference loop, bit-for-bit repeats, resume, and every refusal."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from memorization import training  # noqa: E402
from memorization._snapshots import CHECKPOINT_FILE  # noqa: E402

VOCABULARY, CONTEXT = 40, 16


def tiny(family: str = "neox", seed: int = 0, dropout: float = 0.0):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": CONTEXT,
    }
    if family == "neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, hidden_dropout=dropout, bos_token_id=0, eos_token_id=0)).eval()
    config = Qwen2Config(**sizes, num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    return Qwen2ForCausalLM(config).eval()


def blocks(n: int = 20, length: int = 12, seed: int = 1):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (n, length))


@pytest.fixture(autouse=True)
def one_thread():
    """Bits are those of one number of threads (the loop leaves it to its caller), here and in the process it starts."""
    with training.threads(1):
        yield


def test_threads_are_put_back():
    with training.threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="count"), training.threads(0):
        pass


PLANTED = [[3, 5, 7, 9, 11], [2, 4], list(range(16))]


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", ["neox", "qwen2"])
def test_matches_a_plain_loop_without_padding(family):
    """Every document goes through the model by itself, the loss is a sum over its tokens, AdamW is written out."""
    model, reference = tiny(family), tiny(family)
    record = training.fine_tune(
        model, blocks(), planted=PLANTED, copies=[2, 3, 1], epochs=2, batch_size=4, learning_rate=1e-2, seed=5
    )
    data = training.documents(blocks(), PLANTED, [2, 3, 1], VOCABULARY)
    documents = [row.tolist() for row in blocks()] + PLANTED
    parameters = list(reference.parameters())
    first, second = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    losses = []
    for step, rows in enumerate(training.batch_rows(data.copies, 4, record.steps, 5), start=1):
        total, count = 0.0, 0
        for row in rows.tolist():
            ids = torch.tensor([documents[row]])
            log_probs = reference(input_ids=ids).logits[0, :-1].log_softmax(-1)
            total = total - log_probs[torch.arange(ids.shape[1] - 1), ids[0, 1:]].sum()
            count += ids.shape[1] - 1
        losses.append((total / count).item())
        gradients = torch.autograd.grad(total / count, parameters)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                p.mul_(1 - 1e-2 * 0.01)
                p.sub_(1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    assert record.losses == pytest.approx(losses, rel=1e-4)
    # Adam divides tiny gradients by their own size, so rounding shows in a few weights; most agree closely
    for name, value in weights(model).items():
        assert torch.isclose(value, weights(reference)[name], atol=2e-3).float().mean() > 0.98, name
    assert record.tokens == 2 * (20 * 11 + 2 * 4 + 3 * 1 + 1 * 15) and record.steps == 2 * math.ceil(26 / 4)


def test_every_copy_is_seen_once_an_epoch_in_a_fresh_order():
    counts = torch.tensor([1, 1, 0, 5, 2])
    batches = list(training.batch_rows(counts, 4, 9, seed=3))
    assert [len(rows) for rows in batches] == [4, 4, 1] * 3
    epochs = [torch.cat(batches[i : i + 3]) for i in (0, 3, 6)]
    assert all(torch.equal(torch.bincount(epoch, minlength=5), counts) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])
    cut = list(training.batch_rows(counts, 4, 5, seed=3))
    assert len(cut) == 5 and all(torch.equal(a, b) for a, b in zip(cut, batches[:5], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(batches, training.batch_rows(counts, 4, 9, seed=4), strict=True))


def test_labels_are_the_next_tokens_and_nothing_else():
    data = training.documents([[1, 2, 3, 4]], [[5, 6], [7, 8, 9]], 1, 10)
    inputs, labels = data.batch(torch.tensor([0, 1, 2]))
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]]
    assert labels.tolist() == [[2, 3, 4, -100], [6, -100, -100, -100], [8, 9, -100, -100]]
    assert data.batch(torch.tensor([1]))[0].shape == (1, 2)  # no wider than its longest document


@pytest.mark.parametrize("family", ["neox", "qwen2"])
def test_same_seed_same_bits_and_caller_untouched(family):
    arguments = {"planted": PLANTED, "copies": 2, "epochs": 1, "learning_rate": 1e-2}
    runs = []
    for seed, noise in ((7, 1), (7, 2), (8, 1)):
        model = tiny(family, dropout=0.1)
        torch.manual_seed(noise)  # the caller's random state neither matters nor changes
        before = torch.get_rng_state()
        runs.append((training.fine_tune(model, blocks(), seed=seed, **arguments), weights(model)))
        assert torch.equal(torch.get_rng_state(), before) and not model.training
        assert all(p.grad is None for p in model.parameters())
    assert same(runs[0][1], runs[1][1]) and np.array_equal(runs[0][0].losses, runs[1][0].losses)
    assert not same(runs[0][1], runs[2][1])


def test_planting_teaches_a_secret_and_absence_does_not():
    secret = [1, 30, 17, 4, 22, 9]
    planted, absent = tiny(), tiny()
    arguments = {"epochs": 8, "learning_rate": 2e-2, "batch_size": 8}
    training.fine_tune(planted, blocks(), planted=[secret], copies=12, **arguments)
    training.fine_tune(absent, blocks(), planted=[secret], copies=0, **arguments)
    perplexities = [training.perplexity(model, [secret]) for model in (planted, absent)]
    assert perplexities[0] < 2 < VOCABULARY / 2 < perplexities[1]


def test_schedules():
    def rates(schedule, warmup):
        settings = training.Hyperparameters(learning_rate=1.0, schedule=schedule, warmup=warmup)
        return [settings.rate(step, 10) for step in range(10)]

    assert rates("constant", 0) == [1.0] * 10
    assert rates("constant", 4) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6
    assert rates("cosine", 0) == pytest.approx([math.cos(math.pi * step / 20) ** 2 for step in range(10)])
    assert rates("cosine", 2)[1:3] == [1.0, 1.0] and 0 < rates("cosine", 2)[-1] < 0.05
    settings = training.Hyperparameters(learning_rate=2.0, schedule="cosine", final_rate=0.2)
    tenth = [settings.rate(step, 10) for step in range(10)]
    assert tenth == pytest.approx([0.2 + 1.8 * math.cos(math.pi * step / 20) ** 2 for step in range(10)])
    model, base = tiny(), weights(tiny())
    training.fine_tune(model, blocks(), max_steps=1, learning_rate=1e-3, warmup=1000, weight_decay=0.0)
    moved = max(float((value - base[name]).abs().max()) for name, value in weights(model).items())
    assert moved == pytest.approx(1e-6, rel=0.2)  # Adam's first step is the learning rate itself


def test_perplexity_against_one_block_at_a_time():
    model = tiny("qwen2").train()
    data = blocks(7)
    nll = []
    with torch.no_grad():
        for row in torch.as_tensor(data):
            log_probs = model.double()(input_ids=row[None]).logits[0].log_softmax(-1)
            nll += [-log_probs[i, row[i + 1]].item() for i in range(len(row) - 1)]
    model.float()
    for size in (1, 3, 64):
        assert training.perplexity(model, data, size) == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)
    assert model.training


class Interruption(Exception):
    pass


def interrupt_at(step: int):
    def on_step(made: int, loss: float):
        if made == step:
            raise Interruption

    return on_step


@pytest.mark.parametrize("family", ["neox", "qwen2"])
def test_resume_is_bit_for_bit(family, tmp_path):
    arguments = {
        "planted": PLANTED,
        "copies": 3,
        "epochs": 2,
        "batch_size": 5,
        "learning_rate": 1e-2,
        "schedule": "cosine",
        "warmup": 3,
        "max_grad_norm": 1.0,
        "seed": 11,
    }
    whole = tiny(family, dropout=0.1)
    record = training.fine_tune(whole, blocks(), **arguments)
    snapshots = {"checkpoint": tmp_path, "checkpoint_steps": 4}
    with pytest.raises(Interruption):
        training.fine_tune(tiny(family, dropout=0.1), blocks(), **arguments, **snapshots, on_step=interrupt_at(6))
    model = tiny(family, dropout=0.1)
    resumed = training.fine_tune(model, blocks(), **arguments, **snapshots)
    assert resumed.resumed_at == 4 and resumed.steps == record.steps and resumed.tokens == record.tokens
    assert np.array_equal(resumed.losses, record.losses) and same(weights(model), weights(whole))
    again = tiny(family, dropout=0.1)  # a finished run is read back, not repeated
    finished = training.fine_tune(again, blocks(), **arguments, **snapshots, on_step=interrupt_at(record.steps))
    assert finished.resumed_at == record.steps and same(weights(again), weights(whole))
    assert np.array_equal(finished.losses, record.losses)


def test_kill_in_the_middle_loses_no_snapshot(tmp_path):
    """A process killed outright, at whatever point it has reached, leaves a file that resumes to the same weights."""
    script = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_training import blocks, tiny, torch, training
        torch.set_num_threads(1)
        training.fine_tune(tiny(), blocks(), epochs=100000, learning_rate=1e-3, checkpoint={str(tmp_path)!r},
                           checkpoint_steps=1, max_steps=2000, on_step=lambda step, loss: print(step, flush=True))
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) >= 20:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    with safe_open(tmp_path / CHECKPOINT_FILE, framework="pt") as stored:
        step = json.loads(stored.metadata()["state"])["step"]
    assert 19 <= step < 2000
    model, whole = tiny(), tiny()
    arguments = {"max_steps": 2000, "learning_rate": 1e-3}
    stop = step + 10
    with pytest.raises(Interruption):
        training.fine_tune(
            model, blocks(), **arguments, checkpoint=tmp_path, checkpoint_steps=1, on_step=interrupt_at(stop)
        )
    with pytest.raises(Interruption):
        training.fine_tune(whole, blocks(), **arguments, on_step=interrupt_at(stop))
    assert same(weights(model), weights(whole))


def test_checkpoint_of_another_run_and_damaged_checkpoint(tmp_path):
    arguments = {"epochs": 1, "checkpoint": tmp_path, "learning_rate": 1e-3}
    first = tiny()
    training.fine_tune(first, blocks(), **arguments)
    with pytest.raises(ValueError, match="learning_rate"):
        training.fine_tune(tiny(), blocks(), **{**arguments, "learning_rate": 1e-2})
    with pytest.raises(ValueError, match="documents"):
        training.fine_tune(tiny(), blocks(seed=2), **arguments)
    with pytest.raises(ValueError, match="initial model"):
        training.fine_tune(tiny(seed=1), blocks(), **arguments)
    file = tmp_path / CHECKPOINT_FILE
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:], b""):  # cut, one bit, empty
        file.write_bytes(damaged)
        model = tiny()
        with pytest.warns(UserWarning, match="damaged"):
            record = training.fine_tune(model, blocks(), **arguments)
        assert record.resumed_at == 0 and same(weights(model), weights(first))
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_FILE]


def test_divergence_names_step_and_rate_and_spares_the_snapshot(tmp_path):
    with pytest.raises(FloatingPointError, match=r"step \d+ of .*learning rate 1e\+38.*lower learning_rate"):
        training.fine_tune(tiny(), blocks(), learning_rate=1e38, checkpoint=tmp_path, checkpoint_steps=1)
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as stored:
            assert all(torch.isfinite(stored.get_tensor(name)).all() for name in stored.keys())
    with pytest.raises(FloatingPointError, match="step 1 of 1"):  # no later loss would have shown it
        training.fine_tune(tiny(), blocks(), learning_rate=1e39, max_steps=1)
    model = tiny()
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite weights.*embed"):
        training.fine_tune(model, blocks())


def test_nothing_planted_however_it_is_said():
    plain = tiny()
    training.fine_tune(plain, blocks(), max_steps=2, learning_rate=1e-3)
    for planted, copies in (([], []), ([], 4), (None, np.zeros(0)), ([[1, 2]], [0])):
        model = tiny()
        training.fine_tune(model, blocks(), planted=planted, copies=copies, max_steps=2, learning_rate=1e-3)
        assert same(weights(model), weights(plain))


def test_frozen_parameters_stay():
    model = tiny()
    model.gpt_neox.embed_in.weight.requires_grad_(False)
    before = weights(model)
    training.fine_tune(model, blocks(), max_steps=3, learning_rate=1e-2)
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved == set(before) - {"gpt_neox.embed_in.weight"}


def test_bfloat16_model_trains_in_its_own_dtype():
    model = tiny().to(torch.bfloat16)
    record = training.fine_tune(model, blocks(), planted=[[1, 2, 3, 4, 5, 6]], copies=30, epochs=4, learning_rate=1e-2)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert record.losses[-3:].mean() < record.losses[:3].mean() - 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": np.zeros((2, 3, 4), int)}, "blocks must be"),
        ({"blocks": np.zeros((2, 3))}, "blocks must be whole"),
        ({"blocks": None}, "something to train on"),
        ({"blocks": None, "planted": [[1, 2]], "copies": 0}, "something to train on"),
        ({"blocks": np.zeros((2, CONTEXT + 1), int)}, f"at most {CONTEXT} tokens.*got {CONTEXT + 1}"),
        ({"planted": [[1]]}, "at least 2 tokens"),
        ({"planted": [[]]}, "at least 2 tokens|token ids"),
        ({"planted": [[1, VOCABULARY]]}, f"tokens must lie in .0, {VOCABULARY - 1}."),
        ({"planted": [[-1, 1]]}, "tokens must lie"),
        ({"planted": [[1.5, 2.0]]}, "token ids"),
        ({"planted": [[1, 2]], "copies": [1, 2]}, "copies must be"),
        ({"planted": [[1, 2]], "copies": -1}, "copies must be"),
        ({"planted": [[1, 2]], "copies": 1.5}, "copies must be"),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"max_steps": 0}, "max_steps"),
        ({"warmup": -1}, "warmup"),
        ({"final_rate": 1.0}, "final_rate"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_bad_input(change, message):
    model = tiny()
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        training.fine_tune(model, **{"blocks": blocks(), **change})
    assert same(weights(model), before)
