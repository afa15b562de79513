"""Streaming cache: attention sinks and a window of fixed size, written once and never moved.

     places  0 1 2 3 | 4 5 6 ... C-1      C entries are kept between two steps
             sinks   | window

A step passes in the key and value of the new token. Attention gets all C + 1 entries, one slice of
a sliding buffer. Before the next step the slice begins `num_evicted` entries later, and the sinks
are written in front of it again. The next position stays in range however long the stream is.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.base import FixedSizeCache
from kvalign.cache.ring import KV, KVBuffer, Part
from kvalign.cache.realigner import MASKED
from kvalign.cache.segments import Segment
from kvalign.cache.sinks import Sinks
from kvalign.cache.step import Step
from kvalign.cache.window_layer import WindowLayer
from kvalign.foundation.lasting import lasting
from kvalign.models.architectures import ModelSpec
from kvalign.models.attention import install, own_mask


class Ahead(NamedTuple):
    """Entries that a cache has read beyond its last token. They lie after its own, and do not count
    until their tokens come.

    Attributes:
        ids: the tokens.
        logits: [T, V] float32, after each of them.
    """

    ids: list[int]
    logits: Tensor


class StreamingCache(FixedSizeCache):
    """Sinks and a window; arguments and errors as of `FixedSizeCache`.

    Attributes:
        ahead: result of `read_ahead`, until any other token comes; None: nothing.
        by_kernel: whether our kernel reads entries of 8 bits in decode steps, as they are stored.
    """

    attention: list[WindowLayer]
    ahead: Ahead | None
    by_kernel = False

    def _make_layers(self, spec: ModelSpec) -> list[WindowLayer]:
        self.sinks = Sinks(spec.num_layers, self.sizes.num_sinks)
        return [WindowLayer(self, i, self.sinks, self.sizes) for i in spec.attention]

    def _hold(self, seen: list[int]) -> None:
        super()._hold(seen)
        self.ahead = None
        # Places by which the entries of each row have been moved.
        self._moved = [self.frame.num_moved(n) for n in seen]

    def _parts(self) -> list[Part]:
        return [self.sinks, *self.layers]

    def _buffers(self) -> Iterator[KVBuffer]:
        return (buffer for layer in self.attention for buffer in layer.buffers)

    def index(self, row: int = 0) -> Tensor:
        """Return the positions in the stream of a row's entries, counted from 0: [S]."""
        seen = self.seen[row] if self.seen else 0
        tokens, dropped = torch.arange(seen), self.sizes.num_dropped(seen)
        first = self.sizes.num_sinks
        return tokens if not dropped else torch.cat([tokens[:first], tokens[first + dropped :]])

    @cached_property
    @lasting()
    def turns(self) -> Tensor | None:
        """Turns of keys to all places, as our kernel takes them; None: they do not turn."""
        if (rotation := self.realigner.rotation) is None:
            return None
        turn = rotation.turn_to(slice(0, self.sizes.first_input_len), torch.device("cpu"))
        return torch.stack([turn.cos, turn.sin])[None]

    @property
    def stays(self) -> bool:
        """Return whether a step writes entries as they come and reads them as they lie."""
        layer = self.attention[0]
        return layer.sources is layer.entries and not self.realigner.reads

    def _bring(self, step: Step) -> Step:
        self.ahead = None
        self._move_back(step)
        if step.num_new == 1:
            for buffer in self._buffers():
                buffer.make_room(step.num_before, 1)
        if self.sizes.num_sinks and any(map(self.sizes.num_dropped, step.seen)):
            self._write_sinks(step)
        self.realigner.prepare(len(self.attention))
        first = self.attention[0]
        if not step.is_decode or not first.is_filled:
            return step
        if step.uneven is not None and not self.stays:
            return step
        turns = self.turns if self.by_kernel else None
        return replace(step, decode=step.as_decode(first.entries.end, turns, self.by_kernel))

    def _move_back(self, step: Step) -> None:
        """Move the entries after the sinks nearer to the start, at the end of a frame."""
        moved = [self.frame.num_moved(n) for n in step.seen]
        shifts = [now - before for now, before in zip(moved, self._moved, strict=True)]
        self._moved = moved
        runs_on = self.realigner.runs_on and not self.stores_bare
        if any(shifts) and (self.realigner.moves or runs_on):
            for layer in self.attention:
                layer.move(step, shifts)

    def _write_sinks(self, step: Step) -> None:
        """Write the sinks in front of the window again, rotated to follow it."""
        rotation = None if self.stores_bare else self.realigner.rotation
        for device, (keys, values) in self.sinks.held.items():
            if rotation is not None:
                keys = rotation.shift_layers(keys, -step.behind_rows, dim=0)
            for layer in self.attention:
                if layer.device == device:
                    layer.write_sinks(step, KV(keys[layer.layer_idx], values[layer.layer_idx]))

    def _end(self, step: Step) -> None:
        if step.decode is not None:  # which has written, and counted nothing
            for buffer in self._buffers():
                buffer.end += 1
        super()._end(step)

    def reset(self) -> None:
        self.sinks.held.clear()
        super().reset()

    def segment(self, num_tokens: int, device: torch.device) -> Segment:
        """Positions of the next tokens of rows of equal length, for feeding them as a segment."""
        realigner, num_seen = self.realigner, self.seen[0] if self.seen else 0
        of_cache = (self.sizes, self.frame, realigner.rotation, realigner.tables)
        return Segment(*of_cache, num_seen, num_tokens, device)

    def feed_segment(self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Read ids [B, T] with the same results as feeding them one by one (`segments.py`); only if
        `is_exact`. Memory grows with T * (C + T): cut long inputs.

        Returns:
            logits [B, T, V] after each of them, or after the last few.
        """
        segment = self.segment(ids.shape[1], ids.device)
        install(model.config)
        masked = model.config.model_type in MASKED
        with (
            self.forward_pass(len(ids), ids.shape[1], segment),
            own_mask(segment.alibi_mask(model)) if masked else nullcontext(),
        ):
            return model(
                input_ids=ids,
                # Attention knows what is visible: no mask is made.
                attention_mask=None if masked else ids.new_ones(1, 1, 1, 1),
                position_ids=segment.birth[None],
                past_key_values=self,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            ).logits

    def read_ahead(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Read the first of ids [1, T] and the others, which are guessed, in the same pass; only if
        `is_exact`, with at most `most_at_once` of them.

        The cache is then as if only the first had been fed: the guesses lie beyond the end of its
        buffers. `take_ahead` makes a guess count; any other token overwrites them.

        Returns:
            logits [1, V] after the first.
        """
        num = ids.shape[1]
        with self.changing():
            for buffer in self._buffers():  # what leaves the window meanwhile may have to come back
                buffer.make_room(self.num_stored, num)
            logits = self.feed_segment(model, ids).float()
            self._count(1 - num)
        self.ahead = Ahead(ids[0, 1:].tolist(), logits[0, 1:])
        return logits[:, 0]

    def take_ahead(self, token: int) -> Tensor | None:
        """Accept a token that was read ahead: logits [1, V] after it; None if it was not."""
        if self.ahead is None or self.ahead.ids[:1] != [token]:
            return None
        ids, logits = self.ahead
        with self.changing():
            self._count(1)
            self.ahead = Ahead(ids[1:], logits[1:])
        return logits[:1]

    @property
    def most_at_once(self) -> int:
        """Tokens of a segment that stay stored, whatever it evicts; 0 before the sinks are full."""
        sizes = self.sizes
        has_sinks = min(self.seen, default=0) >= sizes.num_sinks
        return (sizes.cache_size + 1 - sizes.num_evicted) * has_sinks

    def _count(self, num: int) -> None:
        """Count so many more tokens, or fewer, whose entries are in the buffers."""
        for buffer in self._buffers():
            buffer.end += num
        self.seen = [n + num for n in self.seen]
