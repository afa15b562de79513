"""Edits of a stream of a method that keeps entries. The edited cache is a new one, and the one
before stays as it was.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from kvalign.cache.edits import (
    EncodedPart,
    EntryPart,
    check_editable,
    num_kept,
    part_of,
    take_parts,
)
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import typed
from kvalign.methods.base import check_ids
from kvalign.methods.cached import Cached


def edited_cache(
    method: Cached, start: int, stop: int, new: Sequence[Tensor | EncodedPart]
) -> tuple[StreamingCache, int]:
    """Cache of a method whose tokens from `start` to before `stop` are replaced by others, and the
    number of them that had been evicted before. Arguments and errors as of `Method.edit`.
    """
    cache, sizes = _editable(method, start, stop), method.sizes
    num_new = sum(_num_of(part, method) for part in new)
    if start == stop and not num_new:
        return cache, 0
    if cache.realigner.place_positions is not None and not all(isinstance(x, Tensor) for x in new):
        raise UserError(
            f"with cache_size {sizes.cache_size} this aligner squeezes positions, and a piece has "
            "others: give its tokens, or a smaller cache_size"
        )
    alike = defaultdict(list)
    for row, counts in enumerate(zip(cache.seen, cache.num_gone, strict=True)):
        alike[counts].append(row)
    if len(alike) < 2:
        return _edited(method, cache, start, stop, new, num_new)
    edited, num_lost = [], 0
    for rows in alike.values():
        own = copy.deepcopy(cache)
        own.select(rows)
        of_rows = [x[rows] if isinstance(x, Tensor) else x.rows(rows) for x in new]
        one, num = _edited(method, own, start, stop, of_rows, num_new)
        if not one.seen:
            raise UserError(f"an edit must leave each row a token, got all of row {rows[0]}")
        edited.append(one)
        num_lost = max(num_lost, num)
    edited[0].join(edited[1:])
    order = [row for rows in alike.values() for row in rows]
    edited[0].select([order.index(row) for row in range(len(order))])
    return edited[0], num_lost


def _edited(
    method: Cached,
    cache: StreamingCache,
    start: int,
    stop: int,
    new: Sequence[Tensor | EncodedPart],
    num_new: int,
) -> tuple[StreamingCache, int]:
    """Same for a cache whose rows are alike."""
    kept, num_sinks = num_kept(cache), method.sizes.num_sinks
    num_gone = max(cache.num_tokens, default=0) - kept  # between the sinks and the others
    first, behind = (x if x < num_sinks else max(x - num_gone, num_sinks) for x in (start, stop))
    num_lost = stop - start - (behind - first)
    if num_gone and start < num_sinks:
        raise UserError(
            f"an edit must begin behind the {num_sinks} sinks once tokens have been evicted, got "
            f"{start}"
        )
    if num_gone and stop < num_sinks + num_gone:  # it lies before the oldest, as the new ids do
        num_gone, new = num_gone + num_new - num_lost, ()
    elif num_gone:
        num_gone = min(start - num_sinks, num_gone)
    parts: list[Tensor | EntryPart] = [*new]
    if cache.seen:
        parts = [part_of(cache, 0, first), *new, part_of(cache, behind, kept)]
    edited = _cache_of(method, parts, num_gone)
    if not edited.num_stored:
        edited.reset()
    return edited, num_lost


def _cache_of(method: Cached, parts: Sequence[Tensor | EntryPart], num_gone: int) -> StreamingCache:
    """New cache with all that is encoded in these parts, and the ids among them encoded after what
    stands before them.
    """
    before, edited = method.cache, method.new_cache()
    waiting: list[EntryPart] = []

    def take() -> None:
        if waiting:
            take_parts(edited, waiting, None if edited.seen else num_gone)
        waiting.clear()

    method.cache = edited
    try:
        for part in parts:
            if isinstance(part, Tensor):
                take()
                method.feed(part)
                continue
            if edited.seen and not waiting and part.num:
                waiting.append(part_of(edited, 0, num_kept(edited)))
            if part.num or not edited.seen:
                waiting.append(part)
        take()
    finally:
        method.cache = before
    return edited


def _editable(method: Cached, start: int, stop: int) -> StreamingCache:
    """The cache, if these tokens of it can be edited."""
    cache, sizes = method.cache, method.sizes
    start, stop = typed("start", start, int), typed("stop", stop, int)
    if not sizes.is_oldest:
        raise UserError(
            f"policy {sizes.policy} with {sizes.positions} positions cannot be edited: entries of "
            "a layer are of different tokens"
        )
    check_editable(cache)
    num = min(cache.num_tokens, default=0)
    if not 0 <= start <= stop <= num:
        of_rows = f"of each row, the shortest of which has {num}"
        of_all = of_rows if num < method.num_tokens else f"of the stream, which has {num}"
        raise UserError(f"start and stop must be tokens {of_all}, got {start} and {stop}")
    return cache


def _num_of(new: Tensor | EncodedPart, method: Cached) -> int:
    """Number of tokens of each row that an edit puts in."""
    if isinstance(new, Tensor):
        check_ids(new, method.model.config.vocab_size)
        num_rows, num = new.shape
    else:
        num_rows, num = new.num_rows, new.num
        most, last = method.num_positions, new.at + new.stop
        if most is not None and last > most:
            raise UserError(
                f"entries of {last} positions do not fit the aligner, which has {most}: encode the "
                "text in several pieces"
            )
    method.cache.check_input(num_rows, num)
    return num
