"""Pieces: what was encoded alone and put into a stream. Their figures at any place, in any cache,
are those of plain loops in `test_numerics_fuzz.py`.
"""

import pytest
import torch

import kvalign
from kvalign.foundation.errors import NotFoundError, UserError

TEXT = " The ship was built in Norway ."
QUESTION = " It had a crew"


@pytest.fixture(scope="module", params=["gpt2-mini", "llama-mini"])
def loaded(request):
    return kvalign.load_model(request.param)


def stream_of(loaded, prompt="", **options):
    sizes = dict(cache_size=40, max_new_tokens=6, temperature=0)
    return kvalign.stream(loaded.model, loaded.tokenizer, prompt, **sizes | options)


def encoded(loaded, text=TEXT):
    return kvalign.encode(loaded.model, loaded.tokenizer, text)


def answer(stream, question=QUESTION):
    stream.feed(question)
    return "".join(stream)


def test_what_begins_every_text_stands_before_it_and_before_the_stream(loaded, monkeypatch):
    for where in ("pieces", "text_stream"):
        monkeypatch.setattr(f"kvalign.streaming.{where}.prefix_ids", lambda tokenizer: [7])
    piece, stream = encoded(loaded), stream_of(loaded)
    stream.insert(piece)
    assert piece.info.before == [7] and stream.ids == [7, *piece.ids]
    anew = stream_of(loaded)
    anew.feed([7, *piece.ids])
    assert answer(stream) == answer(anew) and stream.ids == anew.ids
    assert stream.method.num_tokens == anew.method.num_tokens == stream.num_fed
    assert kvalign.encode(loaded.model, loaded.tokenizer, TEXT, after=[1, 2]).info.before == [1, 2]


def test_it_goes_anywhere_and_only_what_is_said_is_encoded(loaded, monkeypatch):
    """Before text that has not been fed, after it, at the end of an answer, once it evicts."""
    piece, num_read = kvalign.encode(loaded.model, loaded.tokenizer, TEXT), []
    stream = stream_of(loaded, "The history of the island")
    kind, feed = type(stream.method), type(stream.method).feed

    def counted(method, ids):
        num_read.append(ids.shape[1])
        return feed(method, ids)

    monkeypatch.setattr(kind, "feed", counted)
    prompt = [*stream.ids]
    stream.insert(piece, 2)
    assert stream.ids == prompt[:2] + piece.ids + prompt[2:] and num_read == [2]
    stream.undo_edit()
    assert stream.ids == prompt and stream.method.num_tokens == 0
    stream.insert(piece)
    assert sum(num_read[1:]) == len(prompt)
    text, num_read[:] = "".join(stream), []
    assert stream.ids[: -len(stream.token_ids)] == prompt + piece.ids and text
    before = [*stream.ids]
    stream.insert(piece, 3, exactly=2)
    assert stream.ids == before[:3] + piece.ids + before[3:] and num_read == [2, 2]
    stream.insert(piece)
    stream.insert(piece[2:4])
    text, num_read[:] = answer(stream), []
    assert stream.num_evicted and text
    stream.insert(piece, stream.num_evicted + 9)
    assert not num_read and stream.method.num_tokens == stream.num_fed
    again = stream.method.new()
    again.restore(stream.method.state())
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again.feed(ids), stream.method.feed(ids))


def test_a_file_has_all_of_it_and_says_what_is_wrong(loaded, tmp_path, models):
    model = loaded.model
    path, piece = tmp_path / "document.safetensors", encoded(loaded)
    piece.save(path)
    read = kvalign.load_piece(path, model)
    assert read.info == piece.info and read.ids == piece.ids
    for one, other in zip(read.entries, piece.entries, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    streams = [stream_of(loaded, "In the north of the country") for _ in range(2)]
    for stream, of in zip(streams, (piece, read), strict=True):
        stream.insert(of, 3)
    assert answer(streams[0]) == answer(streams[1])
    with pytest.raises(UserError, match="the weights of this model differ"):
        kvalign.load_piece(path, models["llama"])
    with pytest.raises(NotFoundError, match="no saved piece"):
        kvalign.load_piece(tmp_path / "missing", model)
    bytes_of = bytearray(path.read_bytes())
    bytes_of[-3] ^= 1
    path.write_bytes(bytes_of)
    with pytest.raises(UserError, match="is damaged"):
        kvalign.load_piece(path, model)
    for wrong in (b"", b"no piece", b"\x00" * 99):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match="is not a piece"):
            kvalign.load_piece(path, model)
    streams[0].save(path)
    with pytest.raises(UserError, match="is not a piece"):
        kvalign.load_piece(path, model)


def test_a_piece_of_more_positions_than_the_aligner_has_is_refused():
    loaded = kvalign.load_model("gpt2-mini")
    piece = kvalign.encode(loaded.model, loaded.tokenizer, [5] * 300)
    stream = stream_of(loaded, aligner="kvalign-gpt2-mini-table")
    with pytest.raises(UserError, match="the aligner, which has 256"):
        stream.insert(piece)
    stream.insert(piece[:256])
    assert stream.num_evicted and answer(stream)
