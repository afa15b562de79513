"""Pieces of text that are encoded once and put into streams, at any place.

    piece                     d0 d1 d2 d3 d4
    stream    s0 s1 s2 | q0 q1 q2            insert(piece, 3)
    after     s0 s1 s2 | d0 d1 d2 d3 d4 | q0 q1 q2

A piece has its entries as the model computed them, from the text alone. Where they are put, the
stream moves them to their places, as it does at an edit. They know nothing of what stands before
them there. So a piece fits every stream of its model: any method, aligner, size or precision of the
cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ConfigDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.aligners.entries import KV
from kvalign.cache.edits import EncodedPart
from kvalign.cache.saving import expect_tensor
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import write_whole
from kvalign.foundation.settings import check_output, typed
from kvalign.methods.as_encoded import Dense
from kvalign.models.architectures import spec_of
from kvalign.models.input_ids import encoded, prefix_ids
from kvalign.models.weights import check_finite
from kvalign.models.wrapped import unwrapped
from kvalign.streaming.memory_file import WholeNumber
from kvalign.streaming.stream_file import OfModel, read_saved, write_saved


class PieceInfo(OfModel):
    """Information about a piece in its file, beside the entries.

    Attributes:
        format: of the file.
        ids: its tokens.
        before: those that stood before it when it was encoded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    what = "piece"

    format: int = 2
    ids: list[WholeNumber]
    before: list[WholeNumber]


@dataclass(frozen=True)
class Piece:
    """Encoded text; `encode` and `load_piece` make one. `piece[4:]` is a part of it.

    Attributes:
        ids: its tokens.
        info: that of the whole piece, of which this one begins at token `first`.
        entries: of each layer of the whole piece, [1, H, S, D].
    """

    ids: Sequence[int]
    info: PieceInfo
    entries: Sequence[KV]
    first: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __getitem__(self, part: slice) -> "Piece":
        start, stop, step = typed("part", part, slice).indices(len(self))
        if step != 1:
            raise UserError(f"a piece is cut without gaps, got a step of {step}")
        return replace(self, ids=self.ids[start:stop], first=self.first + start)

    def __repr__(self) -> str:
        return f"<piece for {self.info.base_model or 'a model'}: {len(self)} tokens>"

    def part(self, model: PreTrainedModel, num_rows: int = 1) -> EncodedPart:
        """Its entries, for `Method.edit` of so many rows; UserError if it is of another model."""
        self.info.check_model(model)

        def of_rows(x: Tensor) -> Tensor:
            return x.to(model.device).expand(num_rows, -1, -1, -1)

        entries = [kv.map(of_rows) for kv in self.entries]
        return EncodedPart(self.first, self.first + len(self), entries, len(self.info.before))

    def save(self, path: str | Path) -> None:
        """Write it, the whole piece, to a safetensors file; see `load_piece`."""
        file = Path(typed("path", path, Path))
        check_output(file, "file", "path")
        each = enumerate(self.entries)
        tensors = {f"{i}.{j}": x.cpu().contiguous() for i, kv in each for j, x in enumerate(kv)}
        write_whole(file, lambda partial: write_saved(self.info, tensors, partial))


def first_of(parts: Sequence[list[int] | Piece], num: int) -> list[list[int] | Piece]:
    """The first `num` tokens of these parts."""
    firsts = []
    for part in parts:
        if own := part[: max(num, 0)]:
            firsts.append(own)
        num -= len(part)
    return firsts


def encode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | Sequence[int],
    *,
    after: str | Sequence[int] = "",
) -> Piece:
    """Encode a text, or its token ids, to put it into streams (`TextStream.insert`).

    Args:
        tokenizer: None: both are ids.
        after: text, or ids, that stands before it when it is encoded, and is not part of it; none:
            what begins every text of the tokenizer.

    Raises:
        UserError: it is empty; with what stands before it, it is longer than the context length;
            a model some layers of which have no entries.
    """
    model = unwrapped(model)
    spec = spec_of(model.config)
    if spec.states:
        raise UserError(
            "a text cannot be encoded alone for this model: the state of its layers without "
            "attention is of all tokens at once"
        )
    before = (
        encoded(after, tokenizer, model) if after or tokenizer is None else prefix_ids(tokenizer)
    )
    ids = encoded(text, tokenizer, model, goes_on=True)
    if not ids:
        raise UserError("the text is empty: give at least one word")
    num, most = len(before) + len(ids), spec.context_len
    if most is not None and num > most:
        raise UserError(
            f"the text has {num} tokens with what stands before it, but the context length of "
            f"{spec.name} is {most}: encode it in several pieces"
        )
    info = PieceInfo(ids=ids, before=before, **PieceInfo.of_model(model))
    of_ids = torch.tensor([before + ids], device=model.device)
    return Piece(ids, info, encoded_alone(model, of_ids, len(before)).entries)


def encoded_alone(model: PreTrainedModel, ids: Tensor, num_before: int = 0) -> EncodedPart:
    """Entries of ids [B, T] read alone, without the first few, which only stand before them."""
    num = ids.shape[1] - num_before
    method = Dense(model, CacheSizes(ids.shape[1], 0))
    method.feed(ids)
    entries = [KV(layer.keys, layer.values) for layer in method.cache.layers]
    own = [kv.slots(num_before, num).map(Tensor.contiguous) for kv in entries]
    return EncodedPart(0, num, own, num_before)


def load_piece(path: str | Path, model: PreTrainedModel) -> Piece:
    """Load a piece that `Piece.save` wrote. It is read once, to be checked; its entries are mapped,
    so the system may drop them and read them again.

    Raises:
        NotFoundError: no such file.
        UserError: it is not a piece, or is damaged, or one of another model.
    """
    path, model = Path(typed("path", path, Path)), unwrapped(model)
    info, tensors = read_saved(PieceInfo, path)
    info.check_model(model)
    spec = spec_of(model.config)
    shape = spec.of_entries(1, len(info.ids), spec.head_dim)
    entries = [
        KV(*(expect_tensor(tensors, f"{i}.{j}", shape, model.dtype) for j in range(2)))
        for i in range(spec.num_layers)
    ]
    check_finite(tensors.items(), "its entries")
    return Piece(info.ids, info, entries)
