"""A stream of text in one safetensors file: a conversation that goes on after a restart.

It holds the cache as it is, not the text alone: the entries of what was evicted are in it, and
re-encoding the text would give another stream.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.aligners import Aligner
from kvalign.aligners.base import has_probe, probe
from kvalign.cache import named
from kvalign.files import write_whole
from kvalign.methods import Method, make_method, method_class
from kvalign.text_stream import Sampling, TextStream

_FORMAT = "kvalign stream 1"
_FIELDS = {
    "method": str,
    "cache_size": int,
    "num_sinks": int,
    "num_evicted": int,
    "aligner": str | None,
    "base_model": str,
    "probe": list,
    "sampling": dict,
    "device": str,
    "num_fed": int,
    "num_new": int,
}


def save_stream(stream: TextStream, path: Path) -> None:
    """Write the stream; a file of that name is replaced when the new one is whole."""
    stream.check_whole()
    method, model = stream.method, stream.method.model
    about = {
        "method": method.name,
        "cache_size": method.cache_size,
        "num_sinks": method.num_sinks,
        "num_evicted": method.num_evicted,
        "aligner": _fingerprint(method),
        "base_model": method.spec.name,
        "probe": probe(model),
        "sampling": asdict(stream.sampling),
        "device": model.device.type,
        "num_fed": stream.num_fed,
        "num_new": len(stream.token_ids),
    }
    tensors = {f"method.{name}": x.cpu().contiguous() for name, x in method.state().items()}
    tensors["ids"] = torch.tensor(stream.ids, dtype=torch.int64)
    tensors["generator"] = stream.generator.get_state()
    metadata = {"format": _FORMAT, "stream": json.dumps(about)}
    write_whole(path, lambda partial: save_file(tensors, partial, metadata))


def load_stream(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    aligner: Aligner | str | Path | None = None,
) -> TextStream:
    """The stream that `TextStream.save` wrote, ready to be fed and iterated.

    It gives the tokens that the saved one would have given, on the same kind of device.

    Args:
        path: the file.
        model, tokenizer: those that the stream was made with.
        aligner: that the stream was made with, if it was another than the shipped default.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not a stream, or one of another model, precision or aligner.
    """
    about, tensors = _read(Path(path))
    try:
        if not has_probe(model, about["probe"]):
            raise ValueError(
                f"it is a stream of {about['base_model']}: probe (its embedding weights) differs "
                "from this model's"
            )
        _check_tokens(about, tensors, model.config.vocab_size)
        sizes = {name: about[name] for name in ("cache_size", "num_sinks", "num_evicted")}
        for name in method_class(about["method"]).fixed:
            del sizes[name]
        method = make_method(about["method"], model, aligner=aligner, **sizes)
        if _fingerprint(method) != about["aligner"]:
            raise ValueError("it was made with another aligner: name that one")
        stream = TextStream(tokenizer, method, Sampling(**about["sampling"]))
        method.restore(
            {
                name.removeprefix("method."): x.to(model.device)
                for name, x in tensors.items()
                if name.startswith("method.")
            }
        )
        if about["device"] == model.device.type:
            stream.generator.set_state(tensors["generator"])
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"cannot go on with the stream in {path}: {error}") from error
    stream.resume(tensors["ids"].tolist(), about["num_fed"], about["num_new"])
    return stream


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the file says of the stream, fields checked, and its tensors."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path} is not a stream that kvalign saved")
            about = json.loads(metadata.get("stream", ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"no saved stream {path}") from None
    except (SafetensorError, json.JSONDecodeError, RecursionError, IsADirectoryError) as error:
        raise ValueError(f"{path} is not a stream that kvalign saved: {error}") from None
    if not isinstance(about, dict) or about.keys() != _FIELDS.keys():
        raise ValueError(f"{path} is not a stream that kvalign saved: its fields are others")
    for name, kind in _FIELDS.items():
        if not isinstance(about[name], kind):
            raise ValueError(f"{path}: {name} must be {kind}, got {about[name]!r}")
    return about, tensors


def _check_tokens(about: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int) -> None:
    ids = named(tensors, "ids", (tensors["ids"].numel(),), torch.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"its ids must be below {vocab_size}")
    num_fed, num_new = about["num_fed"], about["num_new"]
    has_state = any(name.startswith("method.") for name in tensors)
    if not 0 <= num_new <= len(ids) or (num_fed > 0) != has_state:
        raise ValueError("its numbers of tokens do not fit together")
    if not (0 <= num_fed < len(ids) if len(ids) else num_fed == 0):
        raise ValueError(f"num_fed must be below the number of its tokens, got {num_fed}")


def _fingerprint(method: Method) -> str | None:
    """SHA-256 of the weights of the method's aligner, if it has one."""
    aligner = getattr(method, "aligner", None)
    if aligner is None:
        return None
    digest = hashlib.sha256()
    for name, x in sorted(aligner.state_dict().items()):
        digest.update(name.encode() + x.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
