"""Chunks of a corpus and the split of each: a matter of its place alone, so that any run agrees."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvalign.data_gen.store import SPLITS

BLOCK_CHUNKS = 4  # overlapping chunks are split by blocks of text this many chunks long


@dataclass(frozen=True)
class Group:
    """The chunks of one shard, or of one for each number evicted.

    Attributes:
        places: [num_chunks] int64, in the corpus.
        ids: [num_chunks, T] int64.
    """

    split: str
    index: int
    places: Tensor
    ids: Tensor


def equal_shares(corpora: Sequence[Iterable[list[int]]], num_tokens: int) -> Iterator[list[int]]:
    """The first ids of each corpus, `num_tokens` in all, one corpus after the other."""
    for i, pieces in enumerate(corpora):
        left = num_tokens * (i + 1) // len(corpora) - num_tokens * i // len(corpora)
        for piece in pieces:
            yield piece[:left]
            left -= min(left, len(piece))
            if not left:
                break


def chunks(
    pieces: Iterable[list[int]], chunk_len: int, stride: int, num_tokens: int
) -> Iterator[list[int]]:
    """Cut the first `num_tokens` ids into chunks, one every `stride` ids (at most chunk_len)."""
    held: list[int] = []
    left = num_tokens
    for piece in pieces:
        held += piece[:left]
        left -= min(left, len(piece))
        start = 0
        while len(held) - start >= chunk_len:
            yield held[start : start + chunk_len]
            start += stride
        del held[:start]
        if not left:
            return


def groups(
    stream: Iterable[list[int]], settings: dict[str, Any], chunks_per_shard: int
) -> Iterator[Group]:
    """Gather chunks, in order, until they fill a shard of their split; the last may be smaller.

    Args:
        settings: `chunk_len`, `stride`, `val_share`, `seed`.
    """
    waiting: dict[str, list[tuple[int, list[int]]]] = {split: [] for split in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)

    def take(split: str) -> Group:
        places, ids = zip(*waiting[split], strict=True)
        waiting[split].clear()
        counts[split] += 1
        return Group(split, counts[split] - 1, torch.tensor(places), torch.tensor(ids))

    rule = {name: settings[name] for name in ("chunk_len", "stride", "val_share", "seed")}
    for place, ids in enumerate(stream):
        split = split_of(place, **rule)
        if split is not None:
            waiting[split].append((place, ids))
            if len(waiting[split]) == chunks_per_shard:
                yield take(split)
    yield from (take(split) for split in SPLITS if waiting[split])


def split_of(place: int, chunk_len: int, stride: int, val_share: float, seed: int) -> str | None:
    """`train` or `val` for the chunk at that place; no token is in chunks of both.

    Without overlap each chunk is drawn on its own. With overlap blocks of text are drawn, and a
    chunk across the border of two splits is in neither: None. The first chunk or block is in
    `train`, the second in `val`.
    """
    if stride >= chunk_len:
        return _drawn(place, val_share, seed)
    ends = (place * stride, place * stride + chunk_len - 1)
    splits = {_drawn(token // (BLOCK_CHUNKS * chunk_len), val_share, seed) for token in ends}
    return splits.pop() if len(splits) == 1 else None


def first_of_val(chunk_len: int, stride: int) -> int:
    """Place of the first chunk that `split_of` gives to `val`."""
    return 1 if stride >= chunk_len else -(-BLOCK_CHUNKS * chunk_len // stride)


def _drawn(number: int, val_share: float, seed: int) -> str:
    if number < len(SPLITS):
        return SPLITS[number]
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") < val_share * 2**64 else "train"
