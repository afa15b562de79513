"""The reference models' recipe: resuming changes nothing, the result is a model like any other."""

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvalign.data_gen.facts import ANSWER, WORDS
from kvalign.foundation.errors import Interrupted
from kvalign.foundation.files import sha256
from kvalign.models.loading import load_model
from kvalign.training import pretraining as recipe
from kvalign.training.pretraining import bits_per_byte, pretrain
from kvalign.training.recall_rows import RecallRows
from kvalign.training.settings import PretrainSettings
from kvalign.training.token_mix import NO_LABEL, parse_mix

TEXT = "".join(f"line {i} of {i * i} says that {i % 7} is not {i % 11}\n" for i in range(900))


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr("kvalign.training.token_mix._TOKENIZER_CHARS", 100_000)
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return f"text:{path}"


def tiny(text, out, **changes):
    small = dict(
        corpus=(f"{text}@2", f"marked:{text}@1"),
        vocab_size=300,
        context_len=32,
        num_layers=1,
        hidden_size=64,
        batch_size=2,
        num_tokens=12 * 64,
        eval_corpus=text,
    )
    return PretrainSettings(**({"out": out} | small | changes))


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_interrupted_run_ends_like_an_undisturbed_one(arch, text, tmp_path, monkeypatch):
    facts = pretrain(tiny(text, tmp_path / "whole", arch=arch))

    class StopError(Exception):
        pass

    def stop_at_seven(run, loss, update=recipe.Run.update):
        if run.step == 7:
            raise StopError
        update(run, loss)

    often = tiny(text, tmp_path / "parts", arch=arch, save_minutes=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(recipe.Run, "update", stop_at_seven)
        with pytest.raises(StopError):
            pretrain(often)
    again = pretrain(often)
    assert again["tokens_seen"] == facts["tokens_seen"] == 12 * 64
    assert again["bits_per_byte"] == facts["bits_per_byte"]
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


def test_what_stopped_before_its_first_step_goes_on_with_the_same_settings_alone(
    text, tmp_path, monkeypatch
):
    """Its tokenizer is there, and tells nobody of which settings it is."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "open_mix", stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain(tiny(text, tmp_path / "a"))
    assert (tmp_path / "a" / "tokenizer.json").exists()
    with pytest.raises(FileExistsError, match="vocab_size is 300 there, 400 now"):
        pretrain(tiny(text, tmp_path / "a", vocab_size=400))
    pretrain(tiny(text, tmp_path / "a"))
    pretrain(tiny(text, tmp_path / "b"))
    whole, parts = weights(tmp_path / "b"), weights(tmp_path / "a")
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


def test_ctrl_c_keeps_the_step_it_is_in(text, tmp_path, monkeypatch):
    def stop_in_the_seventh(run, loss, update=recipe.Run.update):
        if run.step == 6:
            signal.raise_signal(signal.SIGINT)
        update(run, loss)

    settings, handler = tiny(text, tmp_path / "parts"), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(recipe.Run, "update", stop_in_the_seventh)
        with pytest.raises(Interrupted, match="checkpoint.pt has step 7 of 12"):
            pretrain(settings)
    assert signal.getsignal(signal.SIGINT) is handler
    pretrain(tiny(text, tmp_path / "whole"))
    pretrain(settings)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


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
    untrained = recipe.build_model(tiny(text, tmp_path / "a"), loaded.tokenizer).eval()
    assert facts["bits_per_byte"] < 0.9 * bits_per_byte(untrained, loaded.tokenizer, text, 32)
    assert "fallen" not in card and facts["ended_before"] == []
    for num_steps, before in ((61, [60 * 64]), (62, [60 * 64, 61 * 64])):
        facts = pretrain(tiny(text, tmp_path / "a", num_tokens=num_steps * 64))
        assert facts["ended_before"] == before
    assert "reached 0 after 3,840 and 3,904 tokens" in (tmp_path / "a/README.md").read_text()
    other = tiny(text, tmp_path / "b", tokenizer=tmp_path / "a", arch="llama", num_tokens=64)
    pretrain(other)
    assert load_model(str(tmp_path / "b")).tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


def test_bits_per_byte_of_uniform_logits_counts_bytes(text, tmp_path):
    pretrain(tiny(text, tmp_path / "a", num_tokens=64))
    loaded = load_model(str(tmp_path / "a"))
    loaded.model.transformer.wte.weight.data.zero_()
    ids = loaded.tokenizer(TEXT)["input_ids"]
    num_blocks = 60
    blocks = torch.tensor(ids[: num_blocks * 32]).view(num_blocks, 32)[:, 1:]
    num_bytes = sum(len(loaded.tokenizer.decode(row)) for row in blocks)
    expected = blocks.numel() * torch.tensor(300.0).log2().item() / num_bytes
    found = bits_per_byte(loaded.model, loaded.tokenizer, text, 32)
    assert found == pytest.approx(expected, rel=1e-6)


def test_wrong_settings_are_refused(text, tmp_path):
    pretrain(tiny(text, tmp_path / "a", num_tokens=64))
    for changes, message in (
        (dict(out=tmp_path / "a", lr=0.5), "lr is 0.002 there, 0.5 now"),
        (dict(hidden_size=70), "multiple of 64"),
        (dict(corpus=(f"{text}@-1",)), "must be above 0"),
        (dict(corpus=(f"{text}@x",)), "SPEC or SPEC@WEIGHT"),
        (dict(context_len=100_000), "more than --context-len"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrain(tiny(text, **({"out": tmp_path / "b", **changes})))
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json"):
        pretrain(tiny(text, tmp_path / "c", tokenizer=tmp_path))


def test_shares_add_up():
    assert parse_mix(("python-docs", "text:a@b/c.txt@3")) == {
        "python-docs": 0.25,
        "text:a@b/c.txt": 0.75,
    }


def test_a_sink_token_leaves_every_label_where_it_is(text, tmp_path, monkeypatch):
    seen = {}

    def noted(model, ids, *of_labels):
        seen.setdefault(len(model.get_input_embeddings().weight), []).append((ids, of_labels[0]))
        return loss(model, ids, *of_labels)

    loss = recipe._loss
    monkeypatch.setattr(recipe, "_loss", noted)
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


def test_a_shipped_model_shares_its_tokenizer_by_name(text, tmp_path):
    pretrain(tiny(text, tmp_path / "a", tokenizer=Path("gpt2-mini"), num_tokens=64))
    assert len(load_model(str(tmp_path / "a")).tokenizer) == 8192


def test_recall_is_trained_by_its_answers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("kvalign.training.recall_rows.NUM_EVAL_ROWS", 40)
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
