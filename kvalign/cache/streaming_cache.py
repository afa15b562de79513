"""Streaming cache: attention sinks and a window of fixed size, written once and never moved
(`layer.py`). The next position stays in range however long the stream is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.cache.attention import alibi_mask
from kvalign.cache.base import FixedSizeCache
from kvalign.cache.layer import Part, SinkKeys
from kvalign.cache.passes import HOST, Pass
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.window_layer import WindowLayer
from kvalign.foundation.errors import UserError
from kvalign.models import kernel
from kvalign.models.architectures import FAMILIES, MASKED, REGISTERED, ModelSpec, window_of
from kvalign.models.attention import install, own_mask
from kvalign.models.wrapped import no_autograd_modes

if TYPE_CHECKING:
    from kvalign.cache.edits import CachePart, EntryPart
    from kvalign.memory.memories import Memories


class StreamingCache(FixedSizeCache):
    """Sinks and a window; other arguments and errors as of `FixedSizeCache`.

    Args:
        memory: where evicted entries go, made for these sizes; None: they are forgotten.

    Attributes:
        kept_sizes: by which entries are forgotten; with a memory more are kept than stored.
        ahead: what was read beyond the last token (`kvalign.streaming.lookup`), until any other
            token comes; None: nothing.
        goes_by_order: whether attention needs entries in the order of time.
        takes_marks: whether it reads keys as their marks say (`mark`).
        guessed: entries of the guesses of the last pass, as each layer with attention stores them.
        asks: whether layers need our attention, even if all slots are of their row.
        reads_stored: whether our kernel, where it attends, reads entries of 8 bits as they are
            stored.
        angles: of positions, for such keys, as of `kernel.attend`; None if they do not rotate.
    """

    attention: list[WindowLayer]
    ahead: Any
    guessed: list[KV]

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None = None,
        bases: dict[int, Tensor] | None = None,
        config: PretrainedConfig | None = None,
        memory: Memories | None = None,
    ):
        self.memory, self.kept_sizes = memory, sizes if memory is None else memory.kept_sizes
        self.head_dim = spec.head_dim
        super().__init__(spec, sizes, realigner, bases, config)
        if memory is not None and memory.frame is not None:
            self.frame = memory.frame
        is_placed = self.realigner.strategy == "read" and self.realigner.rotation is not None
        self.reads_stored = (
            self.stores_bare
            and config is not None
            and self.takes_marks
            and window_of(config) is None
            and not is_placed
            and kernel.can_rotate(self.realigner.rotation)
        )
        if self.reads_stored:
            install(config)
        self.asks = self.realigner.strategy == "read" or self.stores_bare or memory is not None

    def _make_layers(self, spec: ModelSpec) -> list[WindowLayer]:
        self.sinks = SinkKeys(spec.num_layers, self.sizes.num_sinks)
        # ALiBi's bias, and the mask of a layer that sees only a window, go by the order. So may
        # architectures that we do not know.
        sees_window = spec.window is not None and spec.window <= self.sizes.cache_size
        is_known = spec.model_type in FAMILIES
        self.goes_by_order = spec.family == "alibi" or sees_window or not is_known
        self.takes_marks = spec.model_type in REGISTERED
        of_all = self.sinks, self.sizes, self.memory
        return [WindowLayer(self, i, *of_all) for i in spec.attention]

    def _hold(self, seen: list[int], num_gone: list[int] | None = None) -> None:
        super()._hold(seen, num_gone)
        self.ahead = None
        # Places by which the entries of each row have been moved.
        self._num_moved = [*map(self.frame.num_moved, seen)]

    def _reads_in_order(self, stored: list[int], num_new: int) -> bool:
        if self.goes_by_order:
            return True
        if min(stored) + num_new == min(self.end + num_new, self.sizes.first_input_len):
            return False
        if self.config is None or not self.takes_marks:
            return True
        install(self.config)
        return False

    def _parts(self) -> list[Part]:
        return [self.sinks, *self.layers, *([] if self.memory is None else [self.memory])]

    def index(self, row: int = 0) -> Tensor:
        """Return the positions in the stream of a row's entries, counted from 0: [S]."""
        num = self.num_tokens[row] if self.seen else 0
        tokens, first = torch.arange(num), self.sizes.num_sinks
        evicted = num and num - self.sizes.num_stored(self.seen[row])
        return tokens if not evicted else torch.cat([tokens[:first], tokens[first + evicted :]])

    @property
    def num_kept(self) -> int:
        """Entries of each row that an edit can move, in rows that are alike."""
        return max(map(self.kept_sizes.num_stored, self.seen), default=0)

    def part(self, first: int, stop: int) -> CachePart:
        """Entries at the places from `first` to `stop`, sinks first, of those that it has kept, in
        rows that are alike.
        """
        from kvalign.cache.edits import CachePart

        step = self.settle()
        assert step is not None
        before = step.end - step.stored[0]
        return CachePart(first, stop, self.attention, step.behind[0], before)

    @no_autograd_modes()
    def take(self, parts: Sequence[EntryPart], num_gone: int | None = None) -> None:
        """Have the entries of these parts alone, one after the other. Those of caches are of caches
        with the same arguments, or of its own.

        Args:
            num_gone: tokens that were evicted before them; None: those of its own.
        """
        from kvalign.cache.edits import in_places, ring_entries

        total = sum(part.num for part in parts)
        num_over = self.kept_sizes.num_dropped(total)
        placed = in_places(parts, self.sizes.num_sinks, num_over)
        if num_gone is None:
            num_gone = self.num_tokens[0] - self.num_kept
        with self.changing():
            for i, layer in enumerate(self.attention):
                if not layer.is_initialized:
                    layer.lazy_initialization(*parts[0].like(i))
                if placed and self.memory is not None:
                    layer.replace(self.memory.take_parts(layer, i, placed, total - num_over))
                elif placed:
                    layer.replace(ring_entries(layer, i, placed))
            rows = parts[0].num_rows
            self._hold_in_order([total - num_over] * rows, [num_gone + num_over] * rows)

    def check_editable(self) -> None:
        """Raise UserError unless its entries can be moved to any place."""
        self.realigner.from_birth()
        if len(self.attention) < len(self.layers):
            raise UserError(
                "this model cannot be edited: the state of its layers without attention is of all "
                "tokens at once"
            )
        if self.memory is not None:
            self.memory.check_editable()

    @cached_property
    def rotates_sinks(self) -> bool:
        """Return whether the keys of sinks are rotated to follow the window."""
        return self.realigner.rotation is not None and not self.stores_bare

    def _prepare_entries(self, step: Pass) -> None:
        self.ahead = None
        if self.memory is not None:
            self.memory.begin(step, self.attention, self._num_moved)
        self._move_back(step)
        if step.is_single and step.grows and self.is_filled:
            for layer in self.attention:
                for ring in layer.rings:
                    ring.grow(step.size)
            step.grows = False
        self.realigner.prepare()
        if not self.is_decode(step):
            self._rotate_sinks(step)

    def is_decode(self, step: Pass) -> bool:
        """Return whether a pass of this cache is a usual one: one token in rows that have their
        sinks.
        """
        return step.is_decode and self.is_filled

    def describe(self) -> Pass:
        step, layer = self.step, self.attention[0]
        assert step is not None
        if not step.is_described:
            step.is_described = True
            if step.is_decode:
                self._rotate_sinks(step)
            # What needs no attention of ours asks for no kernel.
            if step.is_single and self.asks:
                step.by_kernel = kernel.attends(self.head_dim, layer.device, layer.dtype)
        return step

    def describe_all(self) -> Pass:
        """Same, with all that layers ask of it made beforehand: for steps that are compiled."""
        step, realigner = self.describe(), self.realigner
        # A value that is made at first use cannot be made in a trace.
        _ = step.slot, step.read, step.born, step.evicting, step.position_ids, step.behind_rows
        if self.stores_bare:
            _ = self.angles if step.by_kernel and self.reads_stored else step.at_slots
        if realigner.strategy == "read" or step.hides or self.stores_bare:
            _ = step.sight_of_one, step.births_of_rows
        if self.memory is not None:
            self.memory.prepare(step)
        return step

    @cached_property
    def angles(self) -> Tensor | None:
        rotation = self.realigner.rotation
        if rotation is None:
            return None
        with no_autograd_modes():
            of_places = rotation.angles_to(slice(0, self.frame.last_position + 1), HOST)
            return torch.stack([of_places.cos, of_places.sin])[None]

    def _move_back(self, step: Pass) -> None:
        """Move the entries after the sinks nearer to the start, at the end of a frame."""
        num_moved = [*map(sub, step.seen, step.positions)]
        shifts = [*map(sub, num_moved, self._num_moved)]
        self._num_moved = num_moved
        runs_on = self.realigner.runs_on and not self.stores_bare
        if any(shifts) and (self.realigner.strategy == "move" or runs_on):
            for layer in self.attention:
                layer.move(step, shifts)

    def _rotate_sinks(self, step: Pass) -> None:
        """Rotate the keys of sinks, as far as the positions of the others have run on."""
        rotation, num = self.realigner.rotation, self.sizes.num_sinks
        is_moved = self.is_static or any(map(self.sizes.num_dropped, step.seen))
        if not self.rotates_sinks or not is_moved:
            return
        assert rotation is not None
        for device, keys in self.sinks.by_device.items():
            rotated = rotation.shift_layers(keys, -step.behind_rows, dim=0)
            layers = [layer for layer in self.attention if layer.device == device]
            own = [layer.entries.data.keys[:, :, :num] for layer in layers]
            torch._foreach_copy_(own, [rotated[layer.layer_idx] for layer in layers])

    def _end(self, step: Pass) -> None:
        self.guessed = step.ahead
        super()._end(step)

    def reset(self) -> None:
        self.sinks.reset()
        if self.memory is not None:
            self.memory.reset()
        super().reset()

    def state(self) -> dict[str, Tensor]:
        tensors = super().state()
        return tensors if self.memory is None else tensors | self.memory.state()

    def _restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        if self.memory is not None:
            self.memory.begin_restore(state)
        super()._restore(state, model)

    def feed_segment(
        self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int = 0, num_ahead: int = 0
    ) -> Tensor:
        """Read ids [B, T] with the same results as feeding them one by one (`attention.py`); only
        if `is_exact`. Memory grows with T * (C + T): cut long inputs.

        Args:
            num_ahead: number of the last of them that are guesses: they do not count, and their
                entries are in `guessed`.

        Returns:
            logits [B, T, V] after each of them, or after the last few.
        """
        install(model.config)
        masked = model.config.model_type in MASKED
        with (
            self.forward_pass(*ids.shape, is_segment=True, num_ahead=num_ahead) as step,
            own_mask(alibi_mask(step, model)) if masked else nullcontext(),
        ):
            return model(
                input_ids=ids,
                # Attention knows what is visible: no mask is made.
                attention_mask=None if masked else ids.new_ones(1, 1, 1, 1),
                position_ids=step.position_ids.to(ids.device),
                past_key_values=self,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            ).logits
