"""Identity of a model: a digest of all its weights. Whatever is computed with a model and kept says
by it which model that was: losses, streams, sessions, recordings, trained aligners, results.

It covers each parameter and each persistent buffer by name, dtype, shape and bytes; a tensor that
several modules share counts under each of its names. Of the bytes it has a CRC-32 (`zlib`: 4 GB/s,
three times as fast as SHA-256), which differs for sure if one number is changed, or if two numbers
of a tensor are exchanged. SHA-256 joins them.

The dtype is that in memory: a file in float32 and in bfloat16 is two models, because they compute
different numbers. From files it is the identity of the model in float32.

Packed weights (`kvalign.models.packed`) are identified by their levels and scales as they lie. They
lie in other ways for our kernel and for PyTorch's, so these are two models, too.

An aligner does not ask for it. An aligner corrects positions, and these are encoded alike in a base
model and in its instructed siblings, so it fits all of them by intent. It asks for the fingerprint
of the embedding, which they share.
"""

import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from kvalign.foundation.errors import UserError
from kvalign.models import loading

FINGERPRINT_LEN = 16
_LEN = 32  # hexadecimal digits
_RECORDS: WeakKeyDictionary[nn.Module, tuple[list[Any], str]] = WeakKeyDictionary()
"""Identity of each model that was asked for one, and where its tensors were then."""


def identity(model: PreTrainedModel) -> str:
    """Identity of a model in memory, as hexadecimal digits.

    It is computed at the first call (0.14 s for 540 MB), and again when a tensor has another
    address or version. PyTorch counts no change through `.data`, such as `weight.data.mul_(2)`:
    such a change is not noticed.
    """
    weights = [*_weights(model)]
    storages = [(name, *_storage_of(x)) for name, x in weights]
    record = _RECORDS.get(model)
    if record is None or record[0] != storages:
        abouts = {key: _about(x) for key, x in {id(x): x for _, x in weights}.items()}
        record = storages, _digest((name, abouts[id(x)]) for name, x in weights)
        _RECORDS[model] = record
    return record[1]


def identity_of(name: str) -> str:
    """Identity of the model that `load_model` loads by a name, in float32; its UserErrors."""
    return identity(loading.load_model(name, "cpu", "float32").model)


def embedding_fingerprint(model: PreTrainedModel) -> tuple[float, ...]:
    """A few embedding weights, spread over the vocabulary, nearly equal in any precision. UserError
    if there are none.
    """
    ids = torch.linspace(
        0, model.config.vocab_size - 1, FINGERPRINT_LEN, dtype=torch.float32
    ).long()
    embedding, ids = model.get_input_embeddings(), ids.to(model.device)
    is_packed = embedding.weight.ndim < 2
    rows = (embedding(ids) if is_packed else embedding.weight[ids]).float()
    columns = torch.linspace(0, rows.shape[1] - 1, FINGERPRINT_LEN, dtype=torch.float32).long()
    samples = rows[range(FINGERPRINT_LEN), columns]
    if not samples.isfinite().all():
        raise UserError("the embedding weights of this model are not finite")
    return tuple(round(x, 6) for x in samples.tolist())


def has_fingerprint(model: PreTrainedModel, expected: Sequence[float]) -> bool:
    """Return whether the model has these embedding weights, in any precision."""
    actual = torch.tensor(embedding_fingerprint(model), dtype=torch.float32)
    reference = torch.tensor(expected, dtype=actual.dtype)
    return len(reference) == len(actual) and torch.allclose(
        reference, actual, rtol=2e-2, atol=2e-2 * float(reference.abs().max())
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that a model saves, under all names."""
    for path, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, "", keep_vars=True)
        for name, x in own.items():
            if x is not None:
                yield f"{path}.{name}", x


def _is_plain(x: Any) -> bool:
    """Return whether PyTorch stores it as its numbers; modules that quantise do otherwise."""
    return type(x) in (Tensor, nn.Parameter) and not x.is_quantized


def _storage_of(x: Any) -> tuple[object, ...]:
    """Place of a tensor and its version; an address alone may be used again."""
    if not _is_plain(x):
        return (object(),)  # not known: it is read each time
    version = 0 if x.is_inference() else x._version
    return x.data_ptr(), version, StorageWeakRef(x.untyped_storage())


def _about(x: Any) -> str:
    """Dtype, shape and checksum of a tensor; of anything else the checksum of its file."""
    x = x.detach().cpu() if isinstance(x, Tensor) else x
    if not _is_plain(x):
        file = io.BytesIO()
        torch.save(x, file)
        return f"{type(x).__name__} {zlib.crc32(file.getbuffer()):08x}"
    raw = x.contiguous().reshape(-1).view(torch.uint8)
    return f"{x.dtype} {list(x.shape)} {zlib.crc32(raw.numpy().data):08x}"


def _digest(abouts: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"{name} {about}\n" for name, about in sorted(abouts))
    return hashlib.sha256(lines.encode()).hexdigest()[:_LEN]
