"""The streaming cache: attention sinks and a window of fixed size, written once and never moved.

     places  0 1 2 3 | 4 5 6 ... C-1      C entries are kept between two steps
             sinks   | window

A step hands in the key and value of the new token. Attention gets all C + 1 entries, one slice of a
sliding buffer; before the next step the `num_evicted` oldest of the window are left out of it and
the sinks written in front again. The next position stays in range however long the stream is.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.base import FixedSizeCache
from kvalign.cache.buffer import KV, KVBuffer, Part
from kvalign.cache.realigner import MASKED
from kvalign.cache.segments import Segment
from kvalign.cache.sinks import Sinks
from kvalign.cache.step import Step
from kvalign.cache.window_layer import WindowLayer
from kvalign.models.attention import install, own_mask


class StreamingCache(FixedSizeCache):
    """Sinks and a window; arguments and errors as of `FixedSizeCache`."""

    layers: list[WindowLayer]

    def _make_layers(self, num_layers: int) -> list[WindowLayer]:
        self.sinks = Sinks(num_layers, self.sizes.num_sinks)
        return [WindowLayer(self, i, self.sinks, self.sizes) for i in range(num_layers)]

    def _hold(self, seen: list[int]) -> None:
        super()._hold(seen)
        # Places by which the entries of each row have been moved.
        self._moved = [self.frame.num_moved(n) for n in seen]

    def _parts(self) -> list[Part]:
        return [self.sinks, *self.layers]

    def _buffers(self) -> Iterator[KVBuffer]:
        return (buffer for layer in self.layers for buffer in layer.buffers)

    def index(self, row: int = 0) -> Tensor:
        """Of a row's entries, the places of their tokens in the stream, counted from 0: [S]."""
        seen = self.seen[row] if self.seen else 0
        tokens, dropped = torch.arange(seen), self.sizes.num_dropped(seen)
        first = self.sizes.num_sinks
        return tokens if not dropped else torch.cat([tokens[:first], tokens[first + dropped :]])

    def _bring(self, step: Step) -> Step:
        self._move_back(step)
        if step.num_new == 1:
            for buffer in self._buffers():
                buffer.make_room(step.num_before, 1)
        if self.sizes.num_sinks and any(map(self.sizes.num_dropped, step.seen)):
            self._write_sinks(step)
        self.realigner.prepare(len(self.layers))
        if not step.is_decode or not self.layers[0].is_filled:
            return step
        return replace(step, decode=step.as_decode(self.layers[0].entries.end))

    def _move_back(self, step: Step) -> None:
        """At the end of a frame, bring the entries after the sinks nearer to the start."""
        moved = [self.frame.num_moved(n) for n in step.seen]
        shifts = [now - before for now, before in zip(moved, self._moved, strict=True)]
        self._moved = moved
        if any(shifts) and (self.realigner.moves or self.realigner.runs_on):
            for layer in self.layers:
                layer.move(step, shifts)

    def _write_sinks(self, step: Step) -> None:
        """Put the sinks in front of the window again, turned to follow it."""
        for device, (keys, values) in self.sinks.held.items():
            if self.realigner.rotation is not None:
                keys = self.realigner.rotation.shift(keys, -step.behind_rows)
            for layer in self.layers:
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
        """Where the next tokens of rows of equal length lie, each as if it was fed alone."""
        realigner, num_seen = self.realigner, self.seen[0] if self.seen else 0
        of_cache = (self.sizes, self.frame, realigner.rotation, realigner.tables)
        return Segment(*of_cache, num_seen, num_tokens, device)

    def feed_segment(self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Take in ids [B, T], each token as if it was fed alone (`segments.py`); only where
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
