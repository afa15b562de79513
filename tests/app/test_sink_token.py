"""A model with a sink token has it as entry 0 of everything that is made of text, and the tokens
after it are those of a model without one.
"""

import pytest
import torch
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import VOCAB, tiny_model

import kvalign
from kvalign.data_gen import recording
from kvalign.data_gen.recording import record
from kvalign.data_gen.settings import RecordSettings
from kvalign.eval.evaluations.streameval import encode, pieces
from kvalign.eval.protocol.grid import read_texts
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel
from kvalign.training import judge, text_run
from kvalign.training.kinds import train_table
from kvalign.training.pretraining_inputs import add_sink
from kvalign.training.settings import TableSettings

SINK = VOCAB - 1


@pytest.fixture(scope="module")
def pair():
    """The same model with a tokenizer without a sink token and with one."""
    model, tokenizers = tiny_model("llama"), [byte_tokenizer(SINK, TEXT) for _ in range(2)]
    add_sink(tokenizers[1])
    assert tokenizers[1].bos_token_id == SINK
    return [LoadedModel(model, one, spec_of(model.config, "tiny")) for one in tokenizers]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return f"text:{path}"


def begins_with_the_sink(plain, sink):
    assert plain.shape == sink.shape and (sink[..., 0] == SINK).all()
    assert torch.equal(plain[..., 1:], sink[..., 1:]) and not (plain == SINK).any()


def test_streams_of_a_batch_begin_with_it(pair):
    ids, seen = pair[0].tokenizer("the cat said")["input_ids"], []
    model = pair[1].model
    how = dict(cache_size=16, max_new_tokens=1)
    with model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    ):
        list(kvalign.stream_batch(model, pair[1].tokenizer, ["the cat said"], **how))
    assert seen[0].tolist() == [[SINK, *ids]]


def test_evaluations_begin_with_it_and_keep_their_labels(pair, corpus):
    begins_with_the_sink(*(read_texts(loaded, corpus, (3, 20), "") for loaded in pair))
    plain, sink = (encode(pieces(4, 2, 1, seed=0), loaded.tokenizer) for loaded in pair)
    streams = [[x for one in encoded for x in one.ids] for encoded in (plain, sink)]
    assert streams[1] == [SINK, *streams[0]]
    assert [one.start + 1 for one in plain[1:]] == [one.start for one in sink[1:]]


def test_each_recorded_chunk_begins_with_it(pair, corpus, tmp_path, monkeypatch):
    seen = {}

    def noted(loaded, ids, *args):
        seen.setdefault(loaded.tokenizer.bos_token_id, []).append(ids)
        return record_pairs(loaded, ids, *args)

    record_pairs = recording.record_pairs
    monkeypatch.setattr(recording, "record_pairs", noted)
    sizes = dict(corpus=(corpus,), num_tokens=240, chunk_len=24)
    for i, loaded in enumerate(pair):
        record(RecordSettings(out=tmp_path / str(i), **sizes), loaded=loaded)
    begins_with_the_sink(torch.cat(seen[None]), torch.cat(seen[SINK]))


@pytest.mark.slow
def test_aligners_are_trained_and_judged_with_it(pair, corpus, tmp_path, monkeypatch):
    texts = [text_run.read([corpus], one.tokenizer, 2000, 16) for one in pair]
    for split in ("train", "val"):
        begins_with_the_sink(*(text.chunks(split, 16) for text in texts))
    begins_with_the_sink(*(text.rows(torch.Generator().manual_seed(0), 4, 9) for text in texts))
    begins_with_the_sink(*(next(text.val_rows(2, 9)) for text in texts))
    streamed, seen = judge.streamed, []

    def noted(model, text, rows, *args, **options):
        seen.extend(rows.values())
        return streamed(model, text, rows, *args, **options)

    monkeypatch.setattr(judge, "streamed", noted)
    sizes = dict(corpus=(corpus,), num_tokens=2000, chunk_len=16, out=tmp_path / "table")
    train_table(TableSettings(**sizes), loaded=pair[1])
    assert seen and all((ids[:, 0] == SINK).all() for ids in seen)
