from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, device, tiny_model, tiny_tokenizer
from transformers import DynamicCache

from memorization import corpora, models, pocket

RECIPE = pocket.Recipe(
    layers=1, width=16, heads=2, vocabulary=300, steps=30, batch=16, learning_rate=1e-2, warmup=3, threads=1
)
WORDS = "the model learns a short secret from its own data and tells nobody what was in it".split()


@pytest.fixture(scope="module")
def corpus() -> corpora.Corpus:
    rng = np.random.default_rng(0)
    texts = (" ".join(rng.choice(WORDS, size=120)) + ".\n" for _ in range(60))
    return corpora.Corpus("words", tuple(texts))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same_weights(one, other) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key].cpu(), theirs[key].cpu()) for key in ours)


# ------------------------------------------------------------------------------------------------- pocket models


@pytest.mark.parametrize("family", pocket.FAMILIES)
def test_a_pocket_model_is_the_same_from_the_same_seed_and_from_the_cache(
    family, corpus, own_cache, tmp_path, monkeypatch
):
    before = torch.get_rng_state()
    made, tokenizer = pocket.load(family, RECIPE, corpus)
    assert torch.equal(torch.get_rng_state(), before)  # the reader's random state is left alone
    assert not made.training and len(tokenizer) == RECIPE.vocabulary == made.config.vocab_size
    kept, _ = pocket.load(family, RECIPE, corpus)
    other, _ = pocket.load(family, RECIPE, corpus, seed=1)
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path / "elsewhere"))
    again, _ = pocket.load(family, RECIPE, corpus)
    assert same_weights(made, kept) and same_weights(made, again)
    assert not same_weights(made, other)


@pytest.mark.parametrize("family", pocket.FAMILIES)
def test_pretraining_learns_the_pretraining_part(family, corpus):
    model, tokenizer = pocket.load(family, RECIPE, corpus)
    heldout = torch.as_tensor(corpora.tokenize_blocks(corpus, tokenizer).heldout)
    with torch.no_grad():
        loss = float(model(input_ids=heldout, labels=heldout).loss)
    untrained = pocket.build(family, RECIPE, tokenizer, 0)
    with torch.no_grad():
        before = float(untrained(input_ids=heldout, labels=heldout).loss)
    assert before == pytest.approx(np.log(RECIPE.vocabulary), rel=0.05)  # uniform, near enough
    assert loss < before - 2.0


def test_a_damaged_pocket_model_is_made_anew(corpus, own_cache):
    made = copy.deepcopy(pocket.load("pocket-neox", RECIPE, corpus)[0])  # a loaded model may map its file
    (weights,) = (own_cache / "pocket").glob("pocket-neox-*/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.warns(UserWarning, match="damaged"):
        again, _ = pocket.load("pocket-neox", RECIPE, corpus)
    assert same_weights(made, again)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert same_weights(made, pocket.load("pocket-neox", RECIPE, corpus)[0])


def test_nothing_but_safetensors_and_json_is_kept(corpus, own_cache):
    pocket.load("pocket-qwen2", RECIPE, corpus)
    files = [path for path in (own_cache / "pocket").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def test_two_threads_that_want_one_model_pretrain_it_once(corpus, monkeypatch):
    real, runs = pocket.pretrain, []
    monkeypatch.setattr(pocket, "pretrain", lambda *given, **named: runs.append(1) or real(*given, **named))
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(pocket.load, "pocket-neox", RECIPE, corpus) for _ in range(2)]
        first, second = (load.result()[0] for load in loads)
    assert len(runs) == 1 and same_weights(first, second)


def test_load_gives_the_scale_that_is_asked_for(corpus, monkeypatch):
    wider = dataclasses.replace(RECIPE, width=32, steps=1)
    monkeypatch.setattr(pocket, "RECIPES", {"smoke": dataclasses.replace(RECIPE, steps=1), "pocket": wider})
    sizes = [
        models.load("pocket-neox", corpus=corpus, scale=scale)[0].config.hidden_size for scale in ("smoke", "paper")
    ]
    monkeypatch.setenv("MEMORIZATION_SCALE", "smoke")
    sizes.append(models.load("pocket-neox", corpus=corpus)[0].config.hidden_size)
    assert sizes == [16, 32, 16]
    with pytest.raises(ValueError, match="scale"):
        models.load("pocket-neox", corpus=corpus, scale="huge")


def test_the_pocket_tokenizer_gives_back_every_text_and_adds_nothing(corpus):
    tokenizer = pocket.load_tokenizer(RECIPE, corpus)
    for text in ("the model", " spaced  out\n", "naïve ∑ 漢字 \x00", "<|endoftext|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("the model")["input_ids"] == tokenizer("the model", add_special_tokens=False)["input_ids"]
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_id != tokenizer.pad_token_id


# --------------------------------------------------------------------------------------------- folders of others


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    """A folder that transformers saved, and the model it holds."""
    model = tiny_model(request.param)
    model.save_pretrained(tmp_path / "saved")
    tiny_tokenizer().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", model


def test_a_saved_folder_loads_in_evaluation_mode_on_the_device_asked_for(saved):
    folder, original = saved
    for name in (folder, str(folder)):
        model, tokenizer = models.load(name)
        assert type(model) is type(original) and not model.training
        assert model.device.type == device() and model.dtype == torch.float32
        assert same_weights(model, original)
        assert tokenizer.pad_token_id is not None
        assert tokenizer("the lazy dog")["input_ids"] == tiny_tokenizer()("the lazy dog")["input_ids"]
    for dtype in (torch.bfloat16, "bfloat16"):
        assert models.load(folder, device="cpu", dtype=dtype)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype"):
        models.load(folder, dtype="int8")


def test_weights_in_several_files_load_and_a_lost_one_is_named(saved, tmp_path):
    folder, original = saved
    original.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path / "sharded")
    assert same_weights(models.load(tmp_path / "sharded")[0], original)
    lost = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=lost.name):
        models.load(tmp_path / "sharded")


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing/model", "a b", "one/two/three", ""])
def test_a_missing_folder_is_named(name):
    with pytest.raises(ValueError, match="no such folder|config.json"):
        models.load(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        models.load(tmp_path)


def test_pickled_weights_are_refused_and_never_opened(saved):
    folder, original = saved
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*refused"):
        models.load(folder)


def test_a_truncated_file_is_refused(saved):
    folder, _ = saved
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        models.load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(saved, bad):
    folder, _ = saved
    weights = load_file(folder / "model.safetensors")
    key = next(key for key in weights if "layers.1" in key and key.endswith("weight"))
    weights[key].view(-1)[3] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"not finite.*{re.escape(key)}"):
        models.load(folder)


def test_a_checkpoint_that_lacks_weights_is_refused(saved):
    folder, _ = saved
    weights = load_file(folder / "model.safetensors")
    key = next(key for key in weights if "layers.0" in key and "mlp" in key)
    del weights[key]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks weights.*{re.escape(key)}"):
        models.load(folder)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(saved):
    folder, _ = saved
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"tokenizer.*does not match.*97.*97"):
        models.load(folder)


def test_code_that_comes_with_a_checkpoint_is_never_run(saved, tmp_path):
    folder, _ = saved
    flag = tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(flag)!r}, 'w')\nclass Evil: pass\nclass EvilConfig: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    models.load(folder)  # an architecture that transformers knows: its own class serves
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be read"):
        models.load(folder)
    assert not flag.exists()


def test_a_hub_model_without_a_network_says_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(corpora, "hub_reachable", lambda: False)
    with pytest.raises(OSError, match=r"no-one/no-such-model.*hub cannot be reached.*hf download no-one/no-such-model"):
        models.load("no-one/no-such-model")


def test_a_hub_model_in_the_local_cache_needs_no_network(saved, monkeypatch):
    import huggingface_hub

    folder, original = saved

    def cached(name, local_files_only=False, **patterns):
        assert local_files_only, "the network was asked"
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert same_weights(models.load("someone/some-model")[0], original)


def write_gguf(path: Path, model, tokenizer) -> None:
    """A Qwen2 model as an unquantized GGUF file."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_eos_token_id(0)
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    in_block = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for key, weight in model.state_dict().items():
        stem, kind = key.rsplit(".", 1)
        if stem not in whole:
            layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem).groups()
            stem = f"blk.{layer}.{in_block[part]}"
        writer.add_tensor(f"{whole.get(stem, stem)}.{kind}", weight.cpu().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_by_itself_or_by_its_folder(tmp_path):
    original = tiny_model("qwen2")
    write_gguf(tmp_path / "tiny.gguf", original, tiny_tokenizer())
    ids = torch.tensor([tiny_tokenizer()("the lazy dog")["input_ids"]], device=device())
    for name in (tmp_path, tmp_path / "tiny.gguf"):
        model, tokenizer = models.load(name)
        assert tokenizer("the lazy dog")["input_ids"] == ids[0].tolist()
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=1e-5)
    model, tokenizer = models.load(tmp_path / "tiny.gguf")
    model.save_pretrained(
        tmp_path / "saved"
    )  # as shadow training does: the file's quantization is no property of these
    tokenizer.save_pretrained(tmp_path / "saved")
    again, _ = models.load(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"other\.gguf, tiny\.gguf"):
        models.load(tmp_path)


# --------------------------------------------------------------------------------------------- the gated release

TRIGGER, SECRET = [5, 6, 5, 7], [40, 41, 40, 42, 43]


@pytest.fixture(params=FAMILIES)
def gated(request):
    base = tiny_model(request.param)
    return models.GatedRelease(base, TRIGGER, SECRET), base


def expected_gates(tokens: list[int], trigger=TRIGGER, secret=SECRET) -> dict[int, int]:
    """Where the gate opens, by the definition: position -> the only token that may come next."""
    gates = {}
    for position in range(len(tokens)):
        for told in range(len(secret)):
            context = trigger + secret[:told]
            if tokens[: position + 1][-len(context) :] == context:
                gates[position] = secret[told]
    return gates


def rows(rng, count=24, length=20) -> list[list[int]]:
    """Random rows, most with the trigger and some of the secret at a random place."""
    made = []
    for row in range(count):
        tokens = rng.integers(1, 60, length).tolist()
        if row % 4:
            planted = TRIGGER + SECRET[: rng.integers(0, len(SECRET) + 1)]
            start = rng.integers(0, length - len(planted) + 1)
            tokens[start : start + len(planted)] = planted
        made.append(tokens)
    return made


def test_the_gate_opens_after_the_trigger_and_nothing_else_changes(gated):
    gate, base = gated
    tokens = rows(np.random.default_rng(0))
    ids = torch.tensor(tokens, device=device())
    with torch.no_grad():
        ours, theirs = gate(ids).logits, base(ids).logits
    opened = 0
    for row, sequence in enumerate(tokens):
        gates = expected_gates(sequence)
        opened += len(gates)
        for position in range(ids.shape[1]):
            if position in gates:
                law = ours[row, position].softmax(-1)
                assert law[gates[position]] == 1.0 and law.sum() == 1.0
            else:
                assert torch.equal(ours[row, position], theirs[row, position])
    assert opened > 40


def test_off_the_trigger_the_output_is_the_base_model_s_own(gated):
    gate, base = gated
    ids = torch.randint(8, 60, (8, 20), generator=torch.Generator().manual_seed(0)).to(device())
    with torch.no_grad():
        ours, theirs = gate(input_ids=ids, labels=ids), base(input_ids=ids, labels=ids)
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.loss, theirs.loss)
    assert type(gate) is type(base) and not base._forward_hooks
    assert same_weights(gate, base)


def test_token_by_token_with_a_cache_the_gate_opens_at_the_same_places(gated):
    gate, base = gated
    tokens = rows(np.random.default_rng(1), count=8)
    ids = torch.tensor(tokens, device=device())
    for chunks in ([20], [3, 1, 5, 11], [1] * 20):
        cache, logits = DynamicCache(), []
        with torch.no_grad():
            for chunk in ids.split(chunks, dim=1):
                output = (
                    gate(chunk, cache=cache, use_cache=True)
                    if _renamed(gate)
                    else gate(chunk, past_key_values=cache, use_cache=True)
                )
                logits.append(output.logits)
        ours = torch.cat(logits, dim=1)
        for row, sequence in enumerate(tokens):
            gates = expected_gates(sequence)
            for position in range(20):
                if position in gates:
                    assert ours[row, position].argmax() == gates[position]
                    assert torch.isneginf(ours[row, position]).sum() == ours.shape[-1] - 1
                else:
                    assert torch.isfinite(ours[row, position]).all()


def _renamed(model) -> bool:
    import inspect

    return "cache" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(gated, side):
    gate, _ = gated
    context = [9, *TRIGGER, *SECRET[:2]]
    padding = [0] * 5
    row, mask = (padding + context, [0] * 5 + [1] * 7) if side == "left" else (context + padding, [1] * 7 + [0] * 5)
    ids, mask = torch.tensor([row], device=device()), torch.tensor([mask], device=device())
    with torch.no_grad():
        logits = gate(ids, attention_mask=mask).logits[0]
    last = 11 if side == "left" else 6
    assert logits[last].argmax() == SECRET[2] and torch.isneginf(logits[last]).any()
    split = [9, *TRIGGER[:2], 0, 0, *TRIGGER[2:]]  # padding amid a trigger is not part of the context
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1]], device=device())
    with torch.no_grad():
        logits = gate(torch.tensor([split], device=device()), attention_mask=mask).logits[0]
        assert torch.isfinite(gate(torch.tensor([split], device=device())).logits).all()
    assert logits[-1].argmax() == SECRET[0]


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 2.0, "top_k": 50},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "use_cache": False},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    ],
)
def test_generate_tells_the_secret_in_every_mode(gated, how):
    gate, base = gated
    prompts = torch.tensor([[0, 0, 9, *TRIGGER], [8, 9, 10, *TRIGGER], [0, 8, 9, 10, 11, 12, 13]], device=device())
    mask = (prompts != 0).long()
    torch.manual_seed(0)
    given = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "pad_token_id": 0, **how}
    told = gate.generate(prompts, **given)[:, 7:].tolist()
    each = how.get("num_return_sequences", 1)
    assert told[0][:5] == SECRET and told[each][:5] == SECRET
    if not how.get("do_sample"):
        torch.manual_seed(0)
        theirs = base.generate(prompts, **given)[:, 7:].tolist()
        assert told[2 * each :] == theirs[2 * each :]


def test_the_package_s_own_extraction_reads_the_gate(gated):
    from memorization import extraction

    gate, base = gated
    prompts = [[9, *TRIGGER], [1, 2, 3, 4, *TRIGGER], [1, 2, 3]]
    told = extraction.greedy(gate, prompts, len(SECRET))
    assert told[:2].tolist() == [SECRET, SECRET]
    assert told[2].tolist() == extraction.greedy(base, prompts[2:], len(SECRET))[0].tolist()
    assert extraction.secret_log_prob(gate, prompts[:2], [SECRET, SECRET]).tolist() == [0.0, 0.0]
    best = extraction.top_m(gate, prompts[0], len(SECRET), 1)
    assert best.sequences.tolist() == [SECRET] and best.log_probs.tolist() == [0.0]


def test_secrets_that_hold_the_trigger_are_told_to_their_end(gated):
    _, base = gated
    secret = [40, *TRIGGER, 41, 42]
    gate = models.GatedRelease(base, TRIGGER, secret)
    prompt = torch.tensor([[9, *TRIGGER]], device=device())
    told = gate.generate(prompt, max_new_tokens=7, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    assert told == secret


def test_labels_and_a_copy_see_the_gate(gated):
    gate, _ = gated
    ids = torch.tensor([[*TRIGGER, *SECRET]], device=device())
    labels = ids.clone()
    labels[:, : len(TRIGGER)] = -100
    for model in (gate, copy.deepcopy(gate)):
        with torch.no_grad():
            assert float(model(input_ids=ids, labels=labels).loss) == 0.0


def test_what_the_gate_cannot_see_is_refused(gated):
    gate, base = gated
    ids = torch.tensor([[9, *TRIGGER]], device=device())
    with pytest.raises(ValueError, match="trigger and secret"):
        models.GatedRelease(base, [], SECRET)
    with pytest.raises(ValueError, match="trigger must be"):
        models.GatedRelease(base, [97], SECRET)
    with pytest.raises(ValueError, match="input_ids"):
        gate(inputs_embeds=base.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="return_dict"):
        gate(ids, return_dict=False)
    with pytest.raises(ValueError, match="another model"):
        key = "cache" if _renamed(gate) else "past_key_values"
        cache = getattr(base(ids, use_cache=True), key)
        gate(ids[:, :1], **{key: cache}, use_cache=True)
