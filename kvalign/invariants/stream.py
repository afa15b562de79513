"""Stream of tokens through a cache that can be observed."""

import pickle
from collections.abc import Sequence
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign.aligners.entries import KV, cat
from kvalign.cache.passes import Pass, order_of
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.methods.as_encoded import Reencoding
from kvalign.methods.base import Method
from kvalign.models.architectures import spec_of

SAME = 1e-4  # of their size, by which values that are the same may be apart


class NotApplicableError(Exception):
    """Invariant that makes no sense for this cache or this model; the message says why."""


class Watched:
    """Cache that is observed: its inputs and outputs, by layer with attention.

    Attributes:
        layers: indices of the model's layers with attention; below they are counted from 0.
        births: by layer, the entries [B, H, T, D] of each input.
        positions: position of each token, as the cache told the model.
        mask_sizes: by layer, `get_mask_sizes` before the last input: length and offset.
        lengths: by layer, the number of entries that attention got last.
        entries: by layer, their keys and values [B, H, S, D], in the order of time.
        index: by row, the tokens of the entries that the last input found, if the cache reports
            them; None if layers or heads differ.
    """

    def __init__(self, cache: Cache, layers: list[int]):
        self.cache, self.layers = cache, layers
        self.births: list[list[KV]] = [[] for _ in layers]
        self.positions: list[int] = []
        self.mask_sizes: list[tuple[int, int]] = []
        self.lengths: dict[int, int] = {}
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}
        self._got: dict[int, tuple[Pass | None, KV]] = {}
        self.index: list[list[int] | None] = []
        self._update = cache.update
        cache.update = self._watch

    def before(self, num_new: int) -> None:
        position = int(self.cache.get_seq_length())
        self.positions += range(position, position + num_new)
        mask_sizes = [self.cache.get_mask_sizes(num_new, layer) for layer in self.layers]
        self.mask_sizes = [(int(length), int(offset)) for length, offset in mask_sizes]
        if isinstance(self.cache, StreamingCache):
            rows = [self.cache.index(row) for row in range(len(self.cache.seen))]
            self.index = [_of_all_heads(index) for index in rows]

    def _watch(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        originals = KV(keys, values).map(lambda x: x.detach().clone())
        entries = self._update(keys, values, layer, *args, **kwargs)
        number = self.layers.index(layer)
        self.births[number].append(originals)
        own = self.cache if isinstance(self.cache, StreamingCache) else None
        self._got[number] = own and (own.step or own.last_step), KV(*entries)
        self.lengths[number] = entries[0].shape[2]
        return entries

    def after(self) -> None:
        """Look at what attention got: it may write the new entry itself."""
        for number, (step, entries) in self._got.items():
            self.entries[number] = entries if step is None else by_time(step, entries)

    @property
    def num_read(self) -> int:
        """Entries that the last token found before it."""
        return self.entries[0][0].shape[2] - self.births[0][-1][0].shape[2]

    def originals(self, layer: int | None = None) -> KV:
        """The entries [B, H, N, D] of all tokens in a layer of the model, as they were passed in;
        None: in the first with attention.
        """
        return cat(self.births[0 if layer is None else self.layers.index(layer)])

    def tokens(self, row: int = 0) -> list[int | None]:
        """Tokens of the entries that a row's last token found, by their values."""
        values = self.entries[0][1][row, :, : self.num_read]
        return matches(values, self.originals()[1][row, :, :-1])


class Stream:
    """Rows of tokens that a model reads with a cache, or with one of the methods."""

    def __init__(self, model: PreTrainedModel, keeper: Cache | Method, is_watched: bool = False):
        self.model, self.keeper = model, keeper
        self.method = keeper if isinstance(keeper, Method) else None
        self.ids = torch.zeros(0, 0, dtype=torch.int64)
        cache, layers = self.cache, _with_attention(model)
        self.watched = Watched(cache, layers) if cache is not None and is_watched else None

    @property
    def cache(self) -> Cache | None:
        """The cache of the model's calls; None for methods that re-encode."""
        if not isinstance(self.keeper, Method):
            return self.keeper
        return None if isinstance(self.keeper, Reencoding) else getattr(self.keeper, "cache", None)

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Read ids [B, T]; return the next token's logits [B, V] float32."""
        if self.watched is not None:
            self.watched.before(ids.shape[1])
            self.ids = torch.cat([self.ids.to(ids), ids], 1) if self.ids.numel() else ids
        if self.method is not None:
            logits = self.method.feed(ids)
        else:
            out = self.model(input_ids=ids, past_key_values=self.keeper, use_cache=True)
            logits = out.logits[:, -1].float()
        if self.watched is not None:
            self.watched.after()
        return logits

    def feed_singly(self, ids: Tensor) -> Tensor:
        """Same, one token after the other; logits after the last."""
        for i in range(ids.shape[1]):
            logits = self.feed(ids[:, i : i + 1])
        return logits

    @property
    def num_read(self) -> int:
        if self.watched is not None:
            return self.watched.num_read
        assert isinstance(self.keeper, Reencoding)
        return len(self.keeper.rows[0]) - 1

    @property
    def has_memory(self) -> bool:
        return isinstance(self.cache, StreamingCache) and self.cache.memory is not None

    def seen(self, row: int = 0) -> Tensor:
        """The tokens [S] that the last one saw, itself included."""
        if isinstance(self.keeper, Reencoding):
            return self.keeper.rows[row]
        if self.has_memory:
            raise NotApplicableError("its heads take back different entries")
        tokens = self.tokens(row)
        return self.ids[row, [*tokens, self.ids.shape[1] - 1]]

    def tokens(self, row: int = 0) -> list[int]:
        """Return the positions in the stream of the entries that the last token found, in order.
        Each has the value with which it was passed in.
        """
        assert self.watched is not None
        if self.watched.index:
            index = self.watched.index[row]
            if index is None:
                raise NotApplicableError("its layers or heads keep different tokens")
            if len(index) != self.watched.num_read:
                raise NotApplicableError("its entries are not those that it reports")
            return index
        tokens = self.watched.tokens(row)
        if None in tokens:
            raise NotApplicableError("values are changed, so its tokens cannot be identified")
        return sorted(token for token in tokens if token is not None)

    def take_rows(self, rows: Sequence[int], by: str = "batch_select_indices") -> None:
        """Rows in another order, as beam search needs it, or some of them; `by` names the method of
        transformers' caches.
        """
        if self.cache is not None:
            getattr(self.cache, by)(torch.tensor(rows, device=self.model.device))
        else:
            assert self.method is not None
            self.method.select(rows)

    def repeat(self, repeats: int) -> None:
        if self.cache is None:
            raise NotApplicableError("it has no cache with rows to repeat")
        self.cache.batch_repeat_interleave(repeats)

    def loaded(self, empty: Cache | Method) -> "Stream":
        """Stream restored from its own bytes: with `state` and `restore` if the cache has them,
        into `empty`, else by pickle.
        """
        keeper, into = cast(Any, self.keeper), cast(Any, empty)
        has_state = hasattr(keeper, "state") and hasattr(keeper, "restore")
        refusals = UserError if has_state else (pickle.PicklingError, AttributeError, TypeError)
        try:
            saved: Any = keeper.state() if has_state else pickle.dumps(keeper)
        except refusals as error:
            raise NotApplicableError(f"it cannot be saved: {error}") from error
        if not has_state:
            return Stream(self.model, pickle.loads(saved))  # our own bytes of a moment ago
        of_model = () if isinstance(keeper, Method) else (self.model,)
        into.restore(_through_bytes(saved, self.model.device), *of_model)
        return Stream(self.model, into)


def _with_attention(model: PreTrainedModel) -> list[int]:
    """Layers of a model that pass entries to a cache; for an unknown model all."""
    try:
        return spec_of(model.config).attention
    except UserError:
        return [*range(model.config.num_hidden_layers)]


def _of_all_heads(index: Tensor) -> list[int] | None:
    """Tokens [S], or [L, H, S] where layers and heads may differ; None where they do."""
    first = index.flatten(0, -2)[0] if index.ndim > 1 else index
    return first.tolist() if bool((index == first).all()) else None


def matches(values: Tensor, originals: Tensor) -> list[int | None]:
    """Indices of values [H, S, D] among the original ones [H, N, D]; None for a value that is none
    of them. Heads may have different orders; the result is that of the first.
    """
    together = _matches(values.transpose(0, 1).flatten(1), originals.transpose(0, 1).flatten(1))
    if None not in together:
        return together
    heads = [_matches(*pair) for pair in zip(values, originals, strict=True)]
    if any(None in head for head in heads):
        return together
    if any(set(head) != set(heads[0]) for head in heads):
        raise NotApplicableError("its heads keep different tokens")
    return heads[0]


def _matches(values: Tensor, originals: Tensor) -> list[int | None]:
    """Index of the latest original value [N, D] equal to each of values [S, D], all different."""
    values, originals = values.float(), originals.float()
    exactly = "donot_use_mm_for_euclid_dist"
    near = torch.cdist(values, originals, compute_mode=exactly) <= SAME * originals.norm(
        dim=-1
    )  # [S, N]
    tokens: list[int | None] = []
    for i in reversed(range(len(near))):
        here = near[i].nonzero()
        tokens.append(int(here[-1]) if len(here) else None)
        if len(here):
            near[:, here[-1]] = False
    return tokens[::-1]


def _through_bytes(state: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    written = save({name: x.contiguous() for name, x in state.items()})
    return {name: x.to(device) for name, x in load(written).items()}


def by_time(step: Pass, entries: KV) -> KV:
    """Entries that attention got for one new token, in the order of time, right-aligned."""
    if step.in_order or not step.is_single:
        return entries
    stored, end = [n + 1 for n in step.stored], step.end + 1
    return entries.at(order_of(step.sizes, stored, end, step.num_visible, entries.keys.device))
