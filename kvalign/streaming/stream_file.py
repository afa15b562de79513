"""Stream of text in a safetensors file: a conversation can continue after a restart.

The file contains the cache itself, not only the text. Its entries carry traces of evicted ones, so
re-encoding the text would give another stream. What a memory stores is in a second file
(`memory_file.py`).
"""

import hashlib
import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.aligners import Aligner
from kvalign.cache.memory_sizes import ALL, usual_places
from kvalign.cache.saving import expect_tensor
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import checked, make_private, parse_json, write_whole
from kvalign.methods.base import Method
from kvalign.models import identity
from kvalign.models.architectures import spec_of
from kvalign.models.packed import weights_of
from kvalign.models.weights import check_finite
from kvalign.streaming import memory_file
from kvalign.streaming.memory_file import DIGESTS, SUMS, MemoryFile, WholeNumber, is_of_memory
from kvalign.streaming.sampling import Sampling

_CHECKSUM = "sha256"
STATE = "method."  # begins the names of the tensors of a method's state

S = TypeVar("S", bound="OfModel")


class OfModel(BaseModel):
    """Information in a file of what one model has encoded.

    Attributes:
        what: it is.
        identity: of the model (`kvalign.models.identity`).
        weights: form of the model's weights, as `load_model` names it.
    """

    what: ClassVar[str]
    base_model: str
    identity: str
    weights: str

    @staticmethod
    def of_model(model: PreTrainedModel) -> dict[str, Any]:
        """The values of these fields for a model."""
        sha = identity.identity(model)
        return dict(base_model=spec_of(model.config).name, identity=sha, weights=weights_of(model))

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise UserError unless it belongs to this model, with weights of this form."""
        now = self.of_model(model)
        weights = now["weights"]
        if weights != self.weights and self.base_model == now["base_model"]:
            raise UserError(
                f"it was made with weights of {self.weights}, but this model's are {weights}: load "
                f"it with weights={self.weights} (--weights {self.weights})"
            )
        if weights != self.weights or self.identity != now["identity"]:
            what = f"{self.what} of {self.base_model}"
            raise UserError(f"it is a {what}: the weights of this model differ")


class SavedStream(OfModel):
    """Information about a stream in its file, beside the tensors. The other sizes of its cache
    (`CacheSizes`) are further fields.

    Attributes:
        format: of the file.
        aligner: SHA-256 of the weights of the method's aligner, if it has one.
        tokenizer: SHA-256 of its vocabulary.
        num_fed: tokens that the method has been fed.
        is_emptied: whether it has lost them all, most to evictions and the rest to an edit.
        num_new: tokens that were generated since the last input.
        answers, notes: see `TextStream`; `kvalign serve` has no answers.
        memory_file: where its memory is; None: there is none.
    """

    model_config = ConfigDict(extra="allow")
    what = "stream"

    format: int = 3
    method: str
    num_sinks: WholeNumber
    aligner: str | None
    sampling: dict[str, Any]
    device: str
    num_fed: WholeNumber
    num_new: WholeNumber
    is_emptied: bool = False
    tokenizer: str
    answers: list[tuple[WholeNumber, WholeNumber]] = []
    notes: dict[str, str] = {}
    memory_file: MemoryFile | None = None

    @model_validator(mode="after")
    def _only_sizes(self) -> Self:
        others = (self.model_extra or {}).keys()
        if "cache_size" not in others or others - {field.name for field in fields(CacheSizes)}:
            raise ValueError("its fields are not those of a stream")
        return self

    def sizes(self, family: str) -> dict[str, Any]:
        """Its sizes when it was saved, for `make_method`, whatever was measured since."""
        sizes: dict[str, Any] = {"num_sinks": self.num_sinks, **(self.model_extra or {})}
        if sizes.get("memory"):
            sizes["recall_places"] = sizes.get("recall_places") or usual_places(family)
            sizes["recall_layers"] = sizes.get("recall_layers") or ALL
        return sizes


@dataclass(frozen=True)
class Digests:
    """Digests of what a stream's file needs besides its model: SHA-256 of the weights of the
    method's aligner, if it has one, and of a fast tokenizer's vocabulary without added tokens.
    """

    aligner: str | None
    tokenizer: str

    @classmethod
    def of(cls, method: Method, tokenizer: PreTrainedTokenizerBase) -> "Digests":
        vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        text = json.dumps(sorted(vocabulary.items()))
        aligner = getattr(method, "aligner", None)
        return cls(aligner and aligner_digest(aligner), hashlib.sha256(text.encode()).hexdigest())


def aligner_digest(aligner: Aligner) -> str:
    """SHA-256 of the weights of an aligner."""
    digest = hashlib.sha256()
    for name, x in sorted(aligner.state_dict().items()):
        digest.update(name.encode() + x.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save(
    path: Path,
    method: Method,
    digests: Digests,
    sampling: Sampling,
    *,
    ids: Tensor,
    num_fed: int,
    state: dict[str, Tensor],
    generator: torch.Generator,
    **about: Any,
) -> str:
    """Write a stream of ids [T] int64, as of `write`; `state` is that after `num_fed` tokens, and
    `about` has the other fields of `SavedStream`.
    """
    values = asdict(method.sizes) | SavedStream.of_model(method.model) | asdict(digests) | about
    saved = SavedStream(
        method=method.name,
        sampling=asdict(sampling),
        device=method.model.device.type,
        num_fed=num_fed,
        is_emptied=num_fed > 0 and not state,
        **values,
    )
    tensors = {STATE + name: x for name, x in state.items()}
    return write(path, saved, tensors | {"ids": ids, "generator": generator.get_state()})


def write(path: Path, saved: SavedStream, tensors: dict[str, Tensor]) -> str:
    """Write a stream. An existing file is replaced when the new one is complete. Of a memory only
    what is new is written.

    Returns:
        its checksum, over tokens, cache and information; see `checksum_of`.
    """
    tensors, before = dict(tensors), _memory_of(path)
    parts = [tensors[name] for name in sorted(filter(is_of_memory, tensors))]
    digests = tensors.pop(STATE + "digests", None)
    file, digest_of_file = None, ""

    def write_both(partial: Path) -> None:
        nonlocal file, digest_of_file
        if parts and parts[0].shape[2]:
            end = int(tensors[STATE + "seen"]) - saved.num_sinks
            entries = memory_file.Entries(parts, end, None if digests is None else digests[0])
            file, tensors[SUMS] = memory_file.write(path, entries, before)
            if entries.digests is not None:
                tensors[DIGESTS] = entries.digests
        for name, x in tensors.items():
            tensors[name] = (x[:, :, :0] if is_of_memory(name) else x).cpu().contiguous()
        about = saved.model_copy(update={"memory_file": file})
        digest_of_file = write_saved(about, tensors, partial)

    try:
        write_whole(path, write_both)
    finally:  # the memory of no stream goes; a damaged file may refer to any
        with suppress(UserError):
            memory_file.remove(path, but=about(path).memory_file if path.exists() else None)
    return digest_of_file


def write_saved(saved: OfModel, tensors: dict[str, Tensor], path: Path) -> str:
    """Write a safetensors file that only its owner reads, and return its checksum."""
    about = saved.model_dump_json()
    digest = checksum(about, tensors)
    metadata = {"format": f"kvalign {saved.what}", saved.what: about, _CHECKSUM: digest}
    save_file(tensors, path, metadata)
    make_private(path)
    return digest


def remove(path: Path) -> None:
    """Remove a stream's files."""
    path.unlink(missing_ok=True)
    memory_file.remove(path)


def checksum_of(path: Path) -> str:
    """Checksum that a file names, without reading its tensors; "" without a file."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get(_CHECKSUM, "")
    except FileNotFoundError:
        return ""
    except (SafetensorError, OSError):
        return "damaged"


def about(path: Path) -> SavedStream:
    """Return the information in a file about its stream, without its tensors. Raises as `read`."""
    return read_saved(SavedStream, path, names=())[0]


def read(path: Path) -> tuple[SavedStream, dict[str, Tensor]]:
    """Return what a file says of its stream, checked, and its tensors, with those of its memory."""
    saved, tensors = read_saved(SavedStream, path)
    if saved.memory_file is not None:
        names, sums = sorted(filter(is_of_memory, tensors)), tensors.pop(SUMS, torch.empty(0))
        tensors.pop(DIGESTS, None)
        parts = memory_file.read(path, saved.memory_file, sums, [tensors[x] for x in names])
        tensors.update(zip(names, parts, strict=True))
    return saved, tensors


def read_saved(
    kind: type[S], path: Path, names: Collection[str] | None = None
) -> tuple[S, dict[str, Tensor]]:
    """The information in a file, and its tensors, their checksum compared; or those of these names,
    if they are there.

    Raises:
        NotFoundError: no such file.
        UserError: it is not what kvalign saved of this kind, or is damaged.
    """
    wrong = f"{path} is not a {kind.what} that kvalign saved"
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise UserError(wrong)
        with safe_open(path, "pt") as file:
            metadata, present = file.metadata() or {}, {*file.keys()}
            chosen = present if names is None else present.intersection(names)
            tensors = {name: file.get_tensor(name) for name in chosen}
    except FileNotFoundError:
        raise NotFoundError(f"no saved {kind.what} {path}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{wrong}: {error}") from None
    if metadata.get("format") != f"kvalign {kind.what}":
        raise UserError(wrong)
    about = metadata.get(kind.what, "")
    document = parse_json(about, wrong)
    if names is None and metadata.get(_CHECKSUM) != checksum(about, tensors):
        raise UserError(f"{path} is damaged: its checksum differs")
    return checked(kind, document, wrong), tensors


def _memory_of(path: Path) -> memory_file.Before | None:
    try:
        saved, tensors = read_saved(SavedStream, path, names=[SUMS, DIGESTS])
    except UserError:
        return None
    if not saved.memory_file or SUMS not in tensors:
        return None
    return memory_file.Before(saved.memory_file, tensors[SUMS], tensors.get(DIGESTS))


def state_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the method among the tensors of a stream."""
    return {name.removeprefix(STATE): x for name, x in tensors.items() if name.startswith(STATE)}


def check_fits(saved: SavedStream, tensors: dict[str, Tensor], model: PreTrainedModel) -> None:
    """Raise UserError unless the stream belongs to this model and is complete."""
    saved.check_model(model)
    ids = expect_tensor(tensors, "ids", (tensors["ids"].numel(),), torch.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < model.config.vocab_size:
        raise UserError(f"its ids must be below {model.config.vocab_size}")
    check_finite(tensors.items(), "its entries")
    num_fed, num_new = saved.num_fed, saved.num_new
    has_state = any(name.startswith(STATE) for name in tensors)
    if not 0 <= num_new <= len(ids) or (num_fed > 0 and not saved.is_emptied) != has_state:
        raise UserError("its numbers of tokens are inconsistent")
    if not (0 <= num_fed < len(ids) if len(ids) else num_fed == 0):
        raise UserError(f"num_fed must be below the number of its tokens, got {num_fed}")


def checksum(about: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of what a file says of its tensors, and of these with their names and shapes."""
    digest = hashlib.sha256(about.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)} ".encode())
        digest.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
