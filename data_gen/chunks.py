"""Chunks of a corpus: tokens encoded together. The split of each depends only on its index, so that
all runs agree.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SPLITS = ("train", "val")

BLOCK_CHUNKS = 4  # overlapping chunks are split by blocks of text this many chunks long


@dataclass(frozen=True)
class ShardChunks:
    """Chunks of one shard; the shards of all numbers evicted have the same."""

    split: str
    shard_index: int  # in its split
    chunk_indices: Tensor  # [num_chunks] int64, in the corpus
    ids: Tensor  # [num_chunks, T] int64

    def sha256(self) -> str:
        """Return the SHA-256 of the tokens."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def equal_shares(corpora: Sequence[Iterable[list[int]]], num_tokens: int) -> Iterator[list[int]]:
    """First ids of each corpus, `num_tokens` in all, one corpus after the other."""
    for i, pieces in enumerate(corpora):
        num_left = num_tokens * (i + 1) // len(corpora) - num_tokens * i // len(corpora)
        for piece in pieces:
            yield piece[:num_left]
            num_left -= min(num_left, len(piece))
            if not num_left:
                break


def cut_chunks(pieces: Iterable[list[int]], chunk_len: int, stride: int) -> Iterator[list[int]]:
    """Cut ids into chunks, one every `stride` ids (at most chunk_len)."""
    uncut: list[int] = []
    for piece in pieces:
        uncut += piece
        start = 0
        while len(uncut) - start >= chunk_len:
            yield uncut[start : start + chunk_len]
            start += stride
        del uncut[:start]


def by_shard(
    chunks: Iterable[list[int]],
    chunks_per_shard: int,
    chunk_len: int,
    stride: int,
    val_share: float,
    seed: int,
) -> Iterator[ShardChunks]:
    """Chunks, in order, gathered into shards of their split (`split_of`); the last may be
    smaller.
    """
    waiting: dict[str, list[tuple[int, list[int]]]] = {split: [] for split in SPLITS}
    shard_indices = {split: itertools.count() for split in SPLITS}

    def take(split: str) -> ShardChunks:
        indices, ids = map(torch.tensor, zip(*waiting[split], strict=True))
        waiting[split].clear()
        return ShardChunks(split, next(shard_indices[split]), indices, ids)

    for index, ids in enumerate(chunks):
        split = split_of(index, chunk_len, stride, val_share, seed)
        if split is not None:
            waiting[split].append((index, ids))
            if len(waiting[split]) == chunks_per_shard:
                yield take(split)
    yield from (take(split) for split in SPLITS if waiting[split])


def split_of(index: int, chunk_len: int, stride: int, val_share: float, seed: int) -> str | None:
    """Split, `train` or `val`, of the chunk with that index; no token is in chunks of both.

    Without overlap each chunk is drawn on its own. With overlap blocks of text are drawn, and a
    chunk across the border of two splits is in neither: None. The first chunk or block is in
    `train`, the second in `val`.
    """
    if stride >= chunk_len:
        return _split_of(index, val_share, seed)
    ends = (index * stride, index * stride + chunk_len - 1)
    splits = {_split_of(token // (BLOCK_CHUNKS * chunk_len), val_share, seed) for token in ends}
    return splits.pop() if len(splits) == 1 else None


def first_val_chunk(chunk_len: int, stride: int) -> int:
    """Index of the first chunk that `split_of` gives to `val`."""
    return 1 if stride >= chunk_len else -(-BLOCK_CHUNKS * chunk_len // stride)


def _split_of(number: int, val_share: float, seed: int) -> str:
    if number < len(SPLITS):
        return SPLITS[number]
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") < val_share * 2**64 else "train"
