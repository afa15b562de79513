"""Networks are judged by streams of the text that follows their recording."""

import json
from itertools import chain, islice

import pytest
import torch

from kvalign import load_model
from kvalign.aligners import Aligner
from kvalign.data_gen.corpora import token_pieces
from kvalign.foundation.errors import UserError
from kvalign.training import judge as judging
from kvalign.training import train_network
from kvalign.training.judge import ROW_LABELS, judge_aligner, judge_networks, text_after, use_parts

CORPUS = "recall"


@pytest.fixture
def folder(tmp_path):
    Aligner.from_pretrained("kvalign-gpt2-mini-network").save_pretrained(tmp_path)
    return tmp_path


def told(monkeypatch, parts):
    """`judge` finds these parts of those that it tries best; what it has tried."""
    tried = []

    def judge(aligner, untrained, model, text, kvs):
        tried.append(kvs)
        trained, best = {name: x.clone() for name, x in aligner.state_dict().items()}, parts(kvs)
        use_parts(aligner, trained, untrained, best)
        figures = {"val_nll": 3.0, "num_sinks": 4, "discard_half": 3.0}
        sizes = {"num_labels": 9, "cache_sizes": [8], "streams": [], "against_discard_half": []}
        return {"parts": [*best], **figures, **sizes}

    monkeypatch.setattr(judging, "judge", judge)
    monkeypatch.setattr(judging, "text_after", lambda *args: None)
    monkeypatch.setattr(judging, "num_judged_tokens", lambda *args: 0)
    return tried


def test_what_cannot_be_judged_stays_and_is_said(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    for changes, why in (
        ({"base_model": "nowhere/gone"}, "no model 'nowhere/gone' here"),
        ({"embedding_fingerprint": [0.5] * 16}, "gpt2-mini has other weights"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        aligner = Aligner.from_pretrained(folder)
        judge_networks(aligner, "cpu")
        assert f"not judged by streams: {why}" in capsys.readouterr().err
        assert aligner.value.fc3.weight.any()


def test_an_aligner_is_whole_after_a_failed_judgement(monkeypatch):
    def judge(aligner, untrained, *_):
        aligner.load_state_dict(untrained)
        raise UserError("no question")

    told(monkeypatch, None)
    monkeypatch.setattr(judging, "judge", judge)
    aligner = Aligner.from_pretrained("kvalign-gpt2-mini-network")
    judge_networks(aligner, "cpu")
    assert aligner.key.fc3.weight.any() and "judged" not in aligner.config.training["key"]


def test_the_text_is_what_follows_the_recording(monkeypatch):
    monkeypatch.setattr("kvalign.data_gen.corpus.RECALL_LEN", {"train": 10_000})
    tokenizer = load_model("recall-gpt2").tokenizer
    data = {"corpus": [CORPUS], "num_tokens": 300}
    text = text_after(data, [CORPUS], 4, 64, tokenizer)
    (ids,) = text.val
    all_ids = [*islice(chain.from_iterable(token_pieces(CORPUS, tokenizer)), 300 + len(ids))]
    assert ids.tolist() == all_ids[300:] and len(ids) == 4 * (64 + ROW_LABELS)
    assert text.is_recall and not text.train
    with pytest.raises(UserError, match="corpus 'recall' has 0 tokens after the 20000 recorded"):
        text_after(data | {"num_tokens": 20_000}, [CORPUS], 4, 64, tokenizer)
    other = text_after(data | {"corpus": ["text:mine.txt"]}, [CORPUS], 4, 64, tokenizer)
    assert other.val[0].tolist() == all_ids[: len(ids)]  # of another text all is unseen


def test_a_copy_is_judged_and_the_aligner_stays(tmp_path, monkeypatch):
    tried = told(monkeypatch, lambda kvs: kvs[:1])
    found = judge_aligner(aligner="kvalign-gpt2-mini-network", out=tmp_path / "copy")
    assert tried == [("key", "value")]
    copy = Aligner.from_pretrained(tmp_path / "copy")
    assert found["parts"] == ["key"] and copy.label == "network: keys"
    assert Aligner.from_pretrained("kvalign-gpt2-mini-network").label == "network"
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "- `kvalign judge --aligner kvalign-gpt2-mini-network --out" in card
    with pytest.raises(FileExistsError, match="already holds an aligner"):
        judge_aligner(aligner="kvalign-gpt2-mini-network", out=tmp_path / "copy")


def test_a_network_is_judged_again_with_its_partner(recorded, tmp_path, monkeypatch):
    """What was left out alone takes part again, with the weights of its training."""
    out = tmp_path / "out"
    tried = told(monkeypatch, lambda kvs: kvs if len(kvs) == 2 else ())
    monkeypatch.setattr(judging, "_model_of", lambda *args: load_model("gpt2-mini"))
    small = dict(data=recorded.folder, accelerator="cpu", max_steps=3, batch_size=32)
    train_network(**small, target="key", out=tmp_path / "alone", judge=False)
    weights = Aligner.from_pretrained(tmp_path / "alone").key.state_dict()
    assert not train_network(**small, target="key", out=out)["key"]["used"]
    assert not Aligner.from_pretrained(out).key.fc3.weight.any()
    assert train_network(**small, target="value", out=out, key_hidden1=99)["value"]["used"]
    both = Aligner.from_pretrained(out)
    assert tried == [("key",), ("key", "value")] and both.label == "network-rollout"
    assert all(torch.equal(both.key.state_dict()[name], x) for name, x in weights.items())
    with pytest.raises(FileExistsError, match="already holds a trained key aligner"):
        train_network(**small, target="key", out=out, judge=False)
