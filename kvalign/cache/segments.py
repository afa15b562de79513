"""Segments: many tokens in one pass, with the same results as feeding them one by one.

What the query of a token sees of an entry depends on their two tokens alone (`passes.py`). So each
query of a segment sees the sinks and its own window, though the pass evicts some of them later: the
entries before it as they lie, and the new ones behind them.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvalign.aligners.base import Birth
from kvalign.aligners.entries import KV, cat
from kvalign.cache.attention import Reader, as_they_lie, placed_attention
from kvalign.cache.passes import Pass, Sight
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.cache.window_layer import WindowLayer
from kvalign.models.architectures import MASKED
from kvalign.models.attention import bloom_mask, install, mark, own_mask

SEGMENT_LEN = 512  # tokens of a forward pass
BLOCK_LEN = 64  # queries whose scores are made at once: few see what another does not
SEGMENT_ON_GPU, BLOCK_ON_GPU = 4096, 512  # there each call takes time, however little it does
PART_LEN = 128  # most queries before which a memory takes in their tokens


@dataclass(eq=False)
class Segment(Pass):
    """Pass over tokens that count as fed one by one, in rows that are alike.

    Attributes:
        num_ahead: last tokens that do not count: they are guesses.
        ahead: entries of the guesses, as each layer with attention stores them.
    """

    num_ahead: int = 0
    ahead: list[KV] = field(default_factory=list)

    is_segment = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_lasting = self.num_new - self.num_ahead

    @cached_property
    def tokens(self) -> Tensor:
        """The new tokens, counted from the first of the stream, [T] int64."""
        return self.seen[0] + self._numbers

    @cached_property
    def dropped(self) -> Tensor:
        """Entries evicted before each token, [T] int64."""
        return self.sizes.num_dropped(self.tokens)

    @cached_property
    def model_positions(self) -> Tensor:
        moved = self.dropped if self.rotates else self.frame.num_moved(self.tokens)
        return (self.tokens - moved)[None]

    @cached_property
    def frame_positions(self) -> Tensor:
        """Positions of the tokens in the frame of the entries before, [T] int64."""
        moved = self.frame.num_moved(self.seen[0])
        return self.tokens - moved if self.rotates else self.model_positions[0]

    def written_at(self, first: int) -> tuple[Birth, Birth]:
        return self.model_positions[0, first:], self.frame_positions[first:]

    @cached_property
    def behind_frame(self) -> Tensor | None:
        """Positions by which the places of the tokens lie before `frame_positions`, less than 0,
        [T] int64; None: they are the same.
        """
        last = self.sizes.num_dropped(self.seen[0] + self.num_new - 1)
        if not self.rotates or last <= self.frame.num_moved(self.seen[0]):
            return None
        return self.model_positions[0] - self.frame_positions

    def _make_sights(self, num_recalled: int) -> list[Sight]:
        length = BLOCK_LEN if self.device.type == "cpu" else BLOCK_ON_GPU
        length = min(length, PART_LEN) if num_recalled else length
        starts = range(0, self.num_new, length)
        sights = [self.sight(x, min(x + length, self.num_new), num_recalled) for x in starts]
        for before, sight in pairwise(sights):  # what is made of places is made once
            if torch.equal(before.places, sight.places):
                sight.places = before.places
        return sights

    def sight(self, start: int, stop: int, num_recalled: int = 0) -> Sight:
        """Return what the queries from `start` to before `stop` see."""
        sizes, end = self.sizes, self.seen[0] + self.num_new
        num_dropped, num_sinks = sizes.num_dropped(self.seen[0]), min(sizes.num_sinks, end)
        oldest = num_sinks + num_dropped  # of the entries after the sinks that lie there
        first = sizes.num_dropped(self.seen[0] + start) - num_dropped
        last = max(first, self.seen[0] + stop - oldest)
        t, dropped, born = (
            x[start:stop, None] for x in (self.tokens, self.dropped, self.model_positions[0])
        )
        j = oldest + torch.arange(first, last, device=self.device)
        sinks = torch.arange(num_sinks, device=self.device)
        # What is recalled takes the places of the window's oldest entries.
        num_lost = dropped + num_recalled * (dropped > 0)
        of_window = (j - t + born).masked_fill((j > t) | (j - num_lost < sizes.num_sinks), -1)
        of_sinks = sinks.expand(stop - start, -1).masked_fill(sinks > t, -1)
        has_lost = sizes.num_dropped(self.seen[0] + stop - 1) > 0
        places = torch.cat([of_sinks, of_window], 1)[None]
        return Sight(slice(start, stop), slice(first, last), places, has_lost)


def feed(
    cache: StreamingCache,
    model: PreTrainedModel,
    ids: Tensor,
    logits_to_keep: int = 0,
    num_ahead: int = 0,
) -> Tensor:
    """Read ids [B, T] with the same results as feeding them one by one; only if `is_exact`. Memory
    grows with T * (C + T): cut long inputs.

    Args:
        num_ahead: number of the last of them that are guesses: they do not count, and their
            entries are then in `cache.guessed`.

    Returns:
        logits [B, T, V] after each of them, or after the last few.
    """
    install(model.config)
    masked = model.config.model_type in MASKED
    kind = partial(Segment, num_ahead=num_ahead)
    with cache.forward_pass(len(ids), ids.shape[1], kind) as step:
        assert isinstance(step, Segment)
        with own_mask(alibi_mask(step, model)) if masked else nullcontext():
            logits: Tensor = model(
                input_ids=ids,
                # Attention knows what is visible: no mask is made.
                attention_mask=None if masked else ids.new_ones(1, 1, 1, 1),
                position_ids=step.position_ids.to(ids.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            ).logits
        cache.guessed = step.ahead
    return logits


def take_segment(layer: WindowLayer, step: Pass, new: KV) -> KV:
    """Write the tokens of a segment, and return all that was there, and all of them."""
    assert isinstance(step, Segment)
    realigner, form, at = layer.realigner, layer.entries.form, step.frame_positions
    new = in_frame(layer, step, new)
    anchored = layer.without_position(step, new) if realigner.strategy == "read" else new
    recall = None if layer.memory is None else layer.memory.take(layer, step, new, anchored)
    stored = form.encode_at(anchored, at)
    num_sinks = min(layer.sizes.num_sinks, step.seen[0])
    num = step.stored[0] - num_sinks
    sinks = form.decode_at(layer.stored_sinks(num_sinks), slice(0, num_sinks))
    window = form.decode_at(layer.entries.data.at(step.last_slots(num)), step.last_positions(num))
    entries = cat([sinks, window, form.decode_at(stored, at)])
    reader = realigner.reader(layer.layer_idx)._replace(recall=recall)
    mark(entries.keys, partial(attend_segment, step, reader))
    layer.write(step, stored, new)
    if step.num_ahead:
        guesses = stored.slots(step.num_lasting, step.num_ahead)
        step.ahead.append(guesses.map(Tensor.clone))
    return entries


def in_frame(layer: WindowLayer, step: Pass, new: KV) -> KV:
    """New entries of a segment, whose keys are at their places, in the frame of those before it."""
    assert isinstance(step, Segment)
    rotation, behind = layer.realigner.rotation, step.behind_frame
    if rotation is None or behind is None:
        return new
    return KV(rotation.at(layer.layer_idx).shift(new.keys, behind.to(layer.device)), new.values)


def attend_segment(
    step: Segment, reader: Reader, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attention of a segment, whose window lies where it was before, and whose queries [B, H, T, D]
    lie at their places, over keys and values [B, H_kv, S, D], sinks first: [B, T, H, D].
    """
    tables, recall, rotated = reader.tables, reader.recall, query
    num_sinks = min(step.sizes.num_sinks, keys.shape[2])
    tables = tables and tables.first(step.num_places)
    if step.behind_frame is not None and reader.rotation is not None:
        rotated = reader.rotation.shift(query, step.behind_frame.to(query.device))
    is_plain, on_cpu = tables is None and recall is None, query.device.type == "cpu"
    if is_plain and step.sizes.num_evicted == 1 and takes_bands(query):
        from kvalign.cache.band import band_and_sinks

        num_first, window_size = max(step.sizes.num_sinks - step.seen[0], 0), step.sizes.window_size
        return band_and_sinks(
            query, rotated, keys, values, num_sinks, num_first, step.tokens, window_size, scale
        )
    # A CPU is faster without its kernel than with one of twice the size (`both_forms`).
    lies = is_plain and (rotated is query or not num_sinks or not on_cpu)
    outputs, places, placed = list[Tensor](), None, tables
    for sight in step.sights(0 if recall is None else step.sizes.num_recalled or 0):
        own = query[:, :, sight.queries]
        window = own if rotated is query else rotated[:, :, sight.queries]
        k, v = (_of_sight(x, num_sinks, sight.entries) for x in (keys, values))
        if lies:
            if window is not own and num_sinks:
                window, k, v = both_forms(own, window, k, v, num_sinks)
            output = as_they_lie(sight, window, k, v, scale)
            outputs.append(output[..., : own.shape[-1]])
            continue
        recalled = None
        if recall is not None and sight.has_lost:
            recalled = recall(sight, own.unflatten(1, (keys.shape[1], -1)) * scale)
        if places is not sight.places:
            places = sight.places
            placed = tables and tables.of_entries(places, num_sinks)
        output, _ = placed_attention(
            places,
            own,
            k,
            v,
            scale,
            tables=placed,
            num_sinks=num_sinks,
            window_query=None if window is own else window,
            recalled=recalled,
        )
        outputs.append(output)
    return torch.cat(outputs, 1).to(query.dtype)


def takes_bands(query: Tensor) -> bool:
    """Return whether flash kernels read bands (`band.py`) for such queries [B, H, T, D]: on CUDA,
    in half precision.
    """
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    from kvalign.cache.band import flash

    return flash() is not None


def _of_sight(x: Tensor, num_sinks: int, entries: slice) -> Tensor:
    """Sinks and these of the entries behind them, of x [B, H, S, D]."""
    window = x[:, :, num_sinks:][:, :, entries]
    return torch.cat([x[:, :, :num_sinks], window], 2) if num_sinks else window


def alibi_mask(step: Segment, model: PreTrainedModel) -> Tensor:
    """Return a correction for BLOOM's scores [1, H, T, S] of a segment. BLOOM adds a bias by index
    among the given entries. That is right in the window, and wrong by E(t) - E(t0) for a sink.
    """
    visible = step.sight(0, step.num_new).places[0] >= 0
    num_sinks = min(step.sizes.num_sinks, visible.shape[1])
    return bloom_mask(model, visible, step.dropped - step.dropped[0], num_sinks)


def both_forms(
    query: Tensor, rotated: Tensor, keys: Tensor, values: Tensor, num_sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, H, S, 2 D], whose one product has both forms of a query: its
    place beside the sinks, and its position in the frame beside the window.
    """
    sinks, window = keys.tensor_split([num_sinks], 2)
    keys = torch.cat([pad(sinks, (0, sinks.shape[3])), pad(window, (window.shape[3], 0))], 2)
    return torch.cat([query, rotated], -1), keys, pad(values, (0, values.shape[3]))
