"""The reference models' recipe: resuming changes nothing, the result is a model like any other."""

import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvalign.data_gen.facts import ANSWER, WORDS, recall_tokenizer
from kvalign.foundation.errors import Interrupted, UserError
from kvalign.foundation.files import sha256
from kvalign.models.architectures import spec_of
from kvalign.models.loading import load_model
from kvalign.training import pretraining as recipe
from kvalign.training.pretraining import Float32Muon, bits_per_byte, pretrain
from kvalign.training.pretraining_inputs import (
    NO_LABEL,
    ContextRows,
    RecallRows,
    TokenMix,
    build_model,
    copy_loss,
    layers_of,
    loss_of,
    right_places,
)
from kvalign.training.pretraining_settings import PretrainSettings

TEXT = "".join(f"line {i} of {i * i} says that {i % 7} is not {i % 11}\n" for i in range(900))


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr("kvalign.training.pretraining_inputs._TOKENIZER_CHARS", 100_000)
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return f"text:{path}"


def tiny(text, out, **changes):
    small = dict(vocab_size=300, context_len=32, num_layers=1, hidden_size=64, batch_size=2)
    small |= dict(corpus=(f"{text}@2", f"marked:{text}@1"), eval_corpus=text, num_tokens=12 * 64)
    return PretrainSettings(**({"out": out} | small | changes))


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize(
    ("arch", "family"), [("gpt2", "learned"), ("llama", "rotary"), ("mpt", "alibi")]
)
def test_an_architecture_of_each_kind_of_positions_learns(arch, family):
    model = build_model(tiny("x", "y", arch=arch), recall_tokenizer(32))
    spec = spec_of(model.config)
    assert (spec.family, spec.context_len, spec.num_layers, spec.head_dim) == (family, 32, 1, 64)
    rows = RecallRows(32).batch(0, 0, 2, 32)
    loss_of(model, *rows.on(model.device)).backward()
    assert all(p.grad is not None for p in model.parameters())


STOPS = {
    "Ctrl-C": pytest.raises(Interrupted, match="checkpoint.pt has step 7 of 12"),
    "a crash": pytest.raises(ZeroDivisionError),
}


@pytest.mark.slow
@pytest.mark.parametrize("by", STOPS)
def test_a_run_that_was_stopped_ends_like_an_undisturbed_one(by, text, tmp_path, monkeypatch):
    """Ctrl-C keeps the step that it comes in; a crash leaves what was saved before."""
    facts = pretrain(tiny(text, tmp_path / "whole", arch="llama"))
    often = {"save_minutes": 1e-9} if by == "a crash" else {}
    settings = tiny(text, tmp_path / "parts", arch="llama", **often)
    handler = signal.getsignal(signal.SIGINT)

    def stop(run, loss, update=recipe.Pretraining.update):
        if run.step == 6 and by == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        if run.step == 7:
            raise ZeroDivisionError
        update(run, loss)

    with monkeypatch.context() as patch, STOPS[by]:
        patch.setattr(recipe.Pretraining, "update", stop)
        pretrain(settings)
    assert signal.getsignal(signal.SIGINT) is handler
    again = pretrain(settings)
    assert again["tokens_seen"] == facts["tokens_seen"] == 12 * 64
    assert again["bits_per_byte"] == facts["bits_per_byte"]
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


@pytest.mark.slow
def test_result_is_a_model_with_card_and_facts(text, tmp_path):
    facts = pretrain(tiny(text, tmp_path / "a", num_tokens=60 * 64))
    loaded = load_model(str(tmp_path / "a"))
    assert loaded.spec.context_len == 32 and len(loaded.tokenizer) == 300
    assert json.loads((tmp_path / "a/pretrain.json").read_text()) == json.loads(json.dumps(facts))
    card = (tmp_path / "a/README.md").read_text()
    (digest,) = facts["text_sha256"].values()
    assert digest == sha256(Path(text.removeprefix("text:"))) and digest in card
    assert "\n\n|" not in card.partition("| architecture")[2]
    assert f"{facts['bits_per_byte']:.3f} bits per byte" in card and "--vocab-size 300" in card
    torch.manual_seed(0)
    untrained = build_model(tiny(text, tmp_path / "a"), loaded.tokenizer).eval()
    assert facts["bits_per_byte"] < 0.9 * bits_per_byte(untrained, loaded.tokenizer, text, 32)
    assert "fallen" not in card and facts["ended_before"] == []
    for num_steps, before in ((61, [60 * 64]), (62, [60 * 64, 61 * 64])):
        facts = pretrain(tiny(text, tmp_path / "a", num_tokens=num_steps * 64))
        assert facts["ended_before"] == before
    assert "reached 0 after 3,840 and 3,904 tokens" in (tmp_path / "a/README.md").read_text()
    other = tiny(text, tmp_path / "b", tokenizer=tmp_path / "a", arch="llama", num_tokens=64)
    pretrain(other)
    assert load_model(str(tmp_path / "b")).tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


@pytest.mark.slow
def test_a_sink_token_leaves_every_label_where_it_is(text, tmp_path, monkeypatch):
    seen = {}

    def noted(model, ids, *of_labels):
        seen.setdefault(len(model.get_input_embeddings().weight), []).append((ids, of_labels[0]))
        return loss(model, ids, *of_labels)

    loss = recipe.loss_of
    monkeypatch.setattr(recipe, "loss_of", noted)
    pretrain(tiny(text, tmp_path / "plain"))
    shared = dict(tokenizer=tmp_path / "plain", sink_token=True)
    facts = pretrain(tiny(text, tmp_path / "sink", **shared))
    for (plain, labels), (sink, same) in zip(seen[300], seen[301], strict=True):
        assert (sink[:, 0] == 300).all() and torch.equal(plain[:, 1:], sink[:, 1:])
        assert torch.equal(labels, same)
    loaded = load_model(str(tmp_path / "sink"))
    assert loaded.model.config.bos_token_id == 300 == loaded.tokenizer("line")["input_ids"][0]
    plain, sink = (
        recipe.eval_blocks(load_model(str(tmp_path / name)).tokenizer, text, 32)
        for name in ("plain", "sink")
    )
    assert (sink[:, 0] == 300).all() and torch.equal(plain[:, 1:], sink[:, 1:])
    card = (tmp_path / "sink/README.md").read_text()
    assert "| sink token |" in card and "--sink-token" in card and "bits_per_byte" in facts
    assert "sink token" not in (tmp_path / "plain/README.md").read_text()


def test_recall_is_trained_by_its_answers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("kvalign.training.pretraining_inputs.NUM_EVAL_ROWS", 40)
    rows = RecallRows(64).batch(0, 3, 5, 16)
    again, other = (RecallRows(64).batch(0, step, 5, 16) for step in (3, 4))
    assert torch.equal(rows.ids, again.ids) and not torch.equal(rows.ids, other.ids)
    firsts = {RecallRows(64).batch(0, step, 1, 16).first for step in range(99)}
    assert firsts <= set(range(49)) and len(firsts) > 30
    counted = rows.labels != NO_LABEL
    assert counted.any() and (rows.labels[counted] >= ANSWER).all()
    assert torch.equal(rows.labels[:, :-1][counted[:, :-1]], rows.ids[:, 1:][counted[:, :-1]])
    facts = pretrain(tiny("x", tmp_path / "a", corpus="recall", eval_corpus=None))
    loaded, card = load_model(str(tmp_path / "a")), (tmp_path / "a/README.md").read_text()
    assert len(loaded.tokenizer) == len(WORDS) == loaded.model.config.vocab_size
    assert len(facts["accuracy_by_age"]) == 8 and "--corpus recall" in card
    assert (
        f"in eighths from the nearest: {facts['accuracy_by_age'][0]:.3f}" in card
        and "BPE" not in card
    )


@pytest.mark.slow
def test_it_begins_with_the_weights_of_another_model(text, tmp_path):
    pretrain(tiny(text, tmp_path / "a"))
    still = dict(init=tmp_path / "a", num_tokens=64, lr=1e-12, matrix_lr=1e-12)
    pretrain(tiny(text, tmp_path / "b", **still))
    loaded, before = weights(tmp_path / "b"), weights(tmp_path / "a")
    assert len(load_model(str(tmp_path / "b")).tokenizer) == 300
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.items())
    card = (tmp_path / "b/README.md").read_text()
    assert f"trained from {tmp_path / 'a'} so that" in card and "--init" in card
    said = "another architecture or size: transformer.h.1.* is missing there"
    with pytest.raises(ValueError, match=said):
        pretrain(tiny(text, tmp_path / "c", **{**still, "num_layers": 2}))


@pytest.mark.slow
def test_passages_occur_again_and_rare_tokens_trade_places(monkeypatch):
    monkeypatch.setattr("kvalign.training.pretraining_inputs.RARE_FROM", 20)
    ids = np.arange(5000, dtype=np.uint16) % 997
    mix = TokenMix([ids], np.ones(1))

    def of(**shares):
        return ContextRows(
            mix, tiny("x", "y", context_len=128, num_tokens=100 * 256, **shares), 997
        )

    rows, again = (of(repeat_share=1.0).batch(0, 0, 200, 128) for _ in range(2))
    assert torch.equal(rows.ids, again.ids) and torch.equal(rows.labels[:, :-1], rows.ids[:, 1:])
    natural = mix.batch(0, 0, 200, 128)
    num_repeated = [len(row) - len(row.unique()) for row in rows.ids]
    assert min(num_repeated) >= 15 and max(num_repeated) > 55 and len(set(num_repeated)) > 20
    assert (rows.ids == natural.ids).float().mean() > 0.5

    short = of(repeat_share=1.0)
    found = [short.batch(0, step, 2, 16) for step in range(99)]
    assert {b.first for b in found} <= set(range(113)) and len({b.first for b in found}) > 40
    assert max(len(row.unique()) for row in found[0].ids) <= 16 // 3 + 1

    renamed = of(rename_share=1.0)
    for new, old in zip(renamed.batch(0, 0, 9, 128).ids, mix.batch(0, 0, 9, 128).ids, strict=True):
        assert len(new.unique()) == len(old.unique())  # one to one
        assert (new[old >= 20] != old[old >= 20]).float().mean() > 0.9
        assert torch.equal(new[old < 20], old[old < 20]) and (new[old >= 20] >= 20).all()
    for step, at_least, at_most in ((40, 30, 70), (80, 0, 0), (99, 0, 0)):
        changed = renamed.batch(0, step, 100, 128).ids != mix.batch(0, step, 100, 128).ids
        assert at_least <= changed.any(1).sum() <= at_most, step


def test_heads_that_copy_are_told_where_to_look():
    ids = torch.tensor([[5, 6, 7, 5, 6, 9, 5]])
    labels = torch.tensor([[6, 7, 5, 6, 9, 5, 6]])
    found = {(t, j) for _, t, j in right_places(ids, labels).nonzero().tolist()}
    assert found == {(3, 1), (6, 1), (6, 4)}  # after 5 came 6; after the second 6 came another
    assert [layers_of(n) for n in (2, 3, 6, 12)] == [(0, 1), (1, 2), (2, 4), (4, 8)]
    attentions = torch.full((2, 1, 2, 7, 7), 0.25)
    assert copy_loss(tuple(attentions), ids, labels).item() == pytest.approx(
        math.log(4) + (math.log(4) + math.log(2)) / 2, abs=1e-3
    )
    attentions[0].diagonal(-1, -2, -1).fill_(1)
    attentions[1, :, :, [3, 6, 6], [1, 1, 4]] = torch.tensor([1, 0.5, 0.5])
    assert copy_loss(tuple(attentions), ids, labels).item() == pytest.approx(0, abs=1e-3)


def test_without_bfloat16_muon_makes_the_same_steps_in_float32():
    shapes, rng = ((8, 24), (24, 8), (8, 8)), torch.Generator().manual_seed(0)
    both = [[torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2)]
    how = dict(lr=0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    optimizers = [
        kind(x, **how) for kind, x in zip((torch.optim.Muon, Float32Muon), both, strict=True)
    ]
    for _ in range(3):
        for weights_of in zip(*both, strict=True):
            grad = torch.randn(weights_of[0].shape, generator=rng)
            for weight in weights_of:
                weight.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for bfloat16, float32 in zip(*both, strict=True):
        moved = (float32 - 1).abs().mean()
        assert moved > 0.01 and (bfloat16 - float32).abs().max() < 0.1 * moved


def test_a_run_of_minutes_ends_by_the_clock(text, tmp_path, monkeypatch):
    """Ten seconds a step: a minute does not wait for all the tokens."""
    seconds, rates, update = [0.0], [], recipe.Pretraining.update

    def noted(run, loss):
        rates.append(run.rate())
        update(run, loss)
        seconds[0] += 10

    monkeypatch.setattr(recipe.Pretraining, "update", noted)
    monkeypatch.setattr(recipe.time, "monotonic", lambda: seconds[0])
    facts = pretrain(tiny(text, tmp_path / "a", num_tokens=10**9, max_minutes=1, save_minutes=9))
    assert facts["tokens_seen"] == 6 * 64 and rates[-1] < rates[-2] < 1 == max(rates)
    with pytest.raises(UserError, match="--repeat-share falls by steps"):
        tiny(text, tmp_path / "a", max_minutes=1, repeat_share=0.1)
