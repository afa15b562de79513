"""Edits of a text stream: the text, its answers and the tokens that are still to be fed."""

import itertools

import pytest
import torch

import kvalign
from kvalign.foundation.errors import UserError

PROMPT = "The river was named after the king . He was born in the north of the country ."


def begin(loaded, prompt=PROMPT, **options):
    options = dict(cache_size=48, max_new_tokens=6, temperature=0) | options
    return kvalign.stream(loaded.model, loaded.tokenizer, prompt, **options)


def goes_on(stream, loaded):
    """Logits after the tokens of a stream, as its method knows them."""
    return stream.method.feed(torch.tensor([stream.ids[stream.num_fed :]]))


def of_anew(ids, loaded):
    return kvalign.make_method("kvalign", loaded.model, cache_size=48).feed(torch.tensor([ids]))


def test_what_was_not_fed_yet_is_only_text(loaded):
    stream = begin(loaded)
    end = len(stream.ids)
    assert stream.edit(end - 3, end, " sea .") == 0 and stream.num_fed == 0
    assert loaded.tokenizer.decode(stream.ids).endswith("north of sea .")
    assert torch.equal(goes_on(stream, loaded), of_anew(stream.ids, loaded))


@pytest.mark.parametrize("new", ["", " of the second dynasty", [5, 6]])
def test_an_edit_before_the_answer_keeps_it(new, loaded):
    stream = begin(loaded)
    answer, before = "".join(stream), list(stream.ids)
    num_new = len(stream.token_ids)
    stream.edit(4, 8, new)
    told = new if isinstance(new, list) else stream.tokenizer(new)["input_ids"] if new else []
    assert stream.ids == before[:4] + told + before[8:] and stream.num_fed == len(stream.ids) - 1
    assert (stream.text, stream.is_cut, len(stream.token_ids)) == (answer, True, num_new)
    assert list(stream) == []
    stream.go_on()
    assert len(list(stream)) > 0
    assert stream.method.num_tokens == stream.num_fed


def test_an_edit_in_the_answer_makes_it_text_that_goes_on(loaded):
    stream = begin(loaded)
    "".join(itertools.islice(stream, 4))
    begun = len(stream.ids) - len(stream.token_ids)
    stream.edit(begun + 1, begun + 2, " x")
    assert stream.token_ids == [] and stream.answers == [(begun, len(stream.ids))]
    "".join(stream)
    assert len(stream.token_ids) == 6 and stream.method.num_tokens == stream.num_fed


def test_everything_to_the_end_is_cut(loaded):
    """A token must be left to feed: the last one is fed once more."""
    stream = begin(loaded)
    "".join(stream)
    stream.edit(9, len(stream.ids))
    assert (stream.num_fed, stream.method.num_tokens, stream.answers) == (8, 8, [])
    again = begin(loaded, stream.ids)
    expected = "".join(again)
    assert "".join(stream) == expected and stream.ids == again.ids
    with pytest.raises(UserError, match="leaves nothing"):
        stream.edit(0, len(stream.ids))


def test_the_answers_before_move_with_the_text(loaded):
    stream = begin(loaded)
    for text in (" He", " She"):
        "".join(stream)
        stream.feed(text)
    (one, other) = stream.answers
    stream.edit(2, 4)
    assert stream.answers == [tuple(x - 2 for x in span) for span in (one, other)]
    stream.edit(one[0] - 2 + 1, other[0] - 2 + 2, " said")
    assert stream.answers == [
        (one[0] - 2, one[0] - 1),
        (one[0], one[0] + (other[1] - other[0] - 2)),
    ]


def test_exactly_is_to_encode_what_follows_again(loaded):
    stream, moved = begin(loaded), begin(loaded)
    for one in (stream, moved):
        "".join(one)
    most = len(stream.ids)
    assert stream.edit(4, 8, exactly=most) == moved.edit(4, 8) == 0
    assert stream.ids == moved.ids
    anew = of_anew(stream.ids, loaded)
    assert torch.allclose(goes_on(stream, loaded), anew, atol=1e-4)
    assert not torch.allclose(goes_on(moved, loaded), anew, atol=1e-2)
    again = begin(loaded)
    "".join(again)
    assert again.edit(4, 4, exactly=2) == 0 and again.method.num_tokens == again.num_fed


def test_an_edit_that_changes_nothing_changes_nothing(loaded):
    stream = begin(loaded)
    "".join(itertools.islice(stream, 3))
    cache, told = stream.method.cache, list(stream.ids)
    same = loaded.tokenizer.decode(stream.ids[4:7])
    assert stream.edit(4, 7, stream.ids[4:7]) == stream.edit(4, 7, same) == stream.edit(5, 5) == 0
    assert stream.method.cache is cache and stream.ids == told
    with pytest.raises(UserError, match="no edit to undo"):
        stream.undo_edit()


def test_an_edit_is_taken_back_to_the_token(loaded):
    one, other = begin(loaded, seed=0, temperature=1.0), begin(loaded, seed=0, temperature=1.0)
    for stream in (one, other):
        "".join(itertools.islice(stream, 3))
    one.edit(2, 9, " was")
    one.undo_edit()
    assert "".join(one) == "".join(other) and one.ids == other.ids
    one.edit(2, 9, " was")
    one.go_on()
    next(iter(one))
    with pytest.raises(UserError, match="no edit to undo"):
        one.undo_edit()


def test_what_the_method_does_not_know_any_more_is_edited_as_text(loaded, tmp_path):
    """All that it had is cut; what lies before has been evicted, and stays so."""
    stream = begin(loaded, cache_size=12)
    "".join(stream)
    num, gone = stream.num_fed, stream.num_evicted
    assert stream.edit(gone, len(stream.ids)) == 0
    assert (stream.num_fed, stream.method.num_tokens) == (gone - 1, 0)
    ids, method = list(stream.ids), stream.method.cache
    for start, stop, new, num_lost in ((2, 4, " x", 2), (0, 3, "", 3), (1, 1, " y", 0)):
        assert stream.edit(start, stop, new) == num_lost and stream.method.cache is method
        stream.undo_edit()
        assert (stream.ids, stream.num_fed) == (ids, gone - 1)
    stream.save(tmp_path / "stream")
    again = kvalign.load_stream(tmp_path / "stream", loaded.model, loaded.tokenizer)
    assert (again.ids, again.num_fed, again.num_evicted) == (ids, gone - 1, gone - 1)
    assert "".join(again) == "".join(stream) and stream.num_fed < num
