"""Chunks are windows of the corpora's tokens; the split of each follows from its index alone."""

import pytest

from kvalign.data_gen.corpora import cut_chunks, equal_shares
from kvalign.data_gen.recording import first_val_chunk, split_of


@pytest.mark.parametrize("stride", [24, 7])
@pytest.mark.parametrize("sizes", [(1000,), (1,) * 300 + (50,) * 14, (23, 25, 0, 952)])
def test_chunks_are_windows_of_the_stream(stride, sizes):
    stream, pieces = list(range(990)), []
    for size in sizes:
        pieces.append(stream[sum(map(len, pieces)) :][:size])
    expected = [stream[start : start + 24] for start in range(0, 990 - 23, stride)]
    assert list(cut_chunks(pieces, 24, stride)) == expected


@pytest.mark.parametrize("stride", [24, 16, 7, 1])
def test_no_token_is_in_both_splits(stride):
    rule = {"chunk_len": 24, "stride": stride, "val_share": 0.2, "seed": 3}
    tokens = {"train": set(), "val": set(), None: set()}
    for index in range(4000):
        tokens[split_of(index, **rule)] |= set(range(index * stride, index * stride + 24))
    assert tokens["train"].isdisjoint(tokens["val"])
    assert 0.1 < len(tokens["val"]) / (4000 * stride) < 0.3
    assert next(i for i in range(4000) if split_of(i, **rule) == "val") == first_val_chunk(
        24, stride
    )
    assert split_of(0, **rule) == "train"


def test_seed_draws_another_split():
    def drawn(seed: int) -> list:
        return [split_of(index, 24, 24, 0.5, seed) for index in range(100)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_several_corpora_give_equal_shares():
    first, second = [[1, 2], [3, 4, 5], [6, 7]], [[11], [12, 13], [14, 15, 16]]
    expected = [1, 2, 3, 4, 11, 12, 13, 14, 15]
    for num_tokens, ids in ((8, expected[:-1]), (9, expected)):
        pieces = equal_shares([first, second], num_tokens)
        assert [id_ for piece in pieces for id_ in piece] == ids
