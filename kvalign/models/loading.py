"""Loading of a language model with its tokenizer: shipped, fetched, a folder, a file, the hub."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.filesize import decimal
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvalign import checkpoints
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import AUTO, has_room, resolved
from kvalign.foundation.settings import DTYPES, WEIGHTS, typed
from kvalign.models import fetched, model_folder
from kvalign.models.architectures import ModelSpec, spec_of
from kvalign.models.rope import frequencies
from kvalign.models.weights import check_finite

if TYPE_CHECKING:
    from kvalign.models.packed_file import PackedRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec


@progress.shown_as("kvalign")
def load_model(
    name: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
    weights: str | None = None,
) -> LoadedModel:
    """Load a causal LM of transformers with its tokenizer and spec.

    Args:
        name: a shipped name (`gpt2-mini`, `llama-mini`), a fetched one (`kvalign models`), a hub
            id, a local folder or a GGUF file.
        device: as torch names it; `auto`: cuda if there is one with room for the model, or several
            with room together, else cpu. With accelerate weights go to a GPU as they are read; a
            model on several GPUs needs it.
        dtype: as torch names it; None: float32 on a CPU, that of the file on a GPU. What measures a
            model asks for `float32`: weights are then not packed.
        weights: how weights are stored: as a dtype, which is then the model's; packed as `int8` or
            `int4` (`kvalign.models.packed`), with everything else in float32 on a CPU and in
            bfloat16 on CUDA; or `auto`: `int4` if the file has all products in 4 bits, as many GGUF
            files do, else as `dtype` says; None: `auto` without a dtype, else as `dtype` says.

    Raises:
        UserError: an unknown name, an architecture or RoPE scaling that cannot be shifted, or
            weights that the device or the model does not support.
    """
    typed("model", name, Path)
    name = os.fspath(name)
    device = str(device) if isinstance(device, torch.device) else typed("device", device, str)
    is_auto, device = device == AUTO, resolved(device)
    dtype, weights = precision_of(device, dtype, weights)
    progress.phase(f"loading {name}")
    source = source_of(name)
    check_device(device)
    config = model_folder.config_of(name, source)
    spec_of(config, name)  # refuse before the weights are read
    request = None
    if weights is not None and torch.device(device).type in ("cpu", "cuda"):
        from kvalign.models.packed_file import PackedRequest

        request = PackedRequest(config, source, device, dtype, weights)
    if request is not None and (kept := request.read()) is not None:
        model, tokenizer = kept, model_folder.tokenizer_of(name, source)
    else:
        model, tokenizer = _read(name, source, config, device, dtype, is_auto, request)
    model.config.name_or_path = name
    spec = spec_of(model.config, name)
    tensors = ((f"rope_parameters: {path}", x) for path, x in frequencies(model).items())
    check_finite(tensors, f"the config of {name}")
    model.eval()
    model_folder.try_step(name, source, model)
    return LoadedModel(model, tokenizer, spec)


def _read(
    name: str,
    source: str,
    config: PretrainedConfig,
    device: str,
    dtype: str | None,
    is_auto: bool,
    request: PackedRequest | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model that is read from its files, on its device, and packed as requested; its tokenizer.

    Args:
        is_auto: the device may be another one, if it has no room.
    """
    is_gguf = model_folder.gguf_file(source) is not None
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    of_file = dtype or (stored if stored in DTYPES and not is_gguf else DTYPES[0])
    device_map: dict[str, str] | str | None = None
    if device.startswith("cuda") and not is_gguf:
        num_bytes = model_folder.num_weights(config) * getattr(torch, of_file).itemsize
        device_map = device_map_for(name, device, num_bytes, is_auto)
    model, tokenizer = model_folder.read(name, source, config, of_file, device_map)
    form = None if request is None else request.form_of(model)
    if is_gguf and dtype is None:
        model.to(torch.bfloat16)
    if device_map is None:
        if is_auto and not has_room(device, num_bytes := model_folder.num_bytes(model)):
            log.warning("%s goes to the cpu: the GPU has no %s free", name, decimal(num_bytes))
            device = "cpu"
        model.to(device)
    if request is not None and form is not None:
        request.pack(model, form)
    return model, tokenizer


def device_map_for(
    name: str, device: str, num_bytes: int, is_auto: bool
) -> dict[str, str] | str | None:
    """accelerate's map of weights of so many bytes: to one GPU, or, with `auto`, to several if one
    has no room; None: they are read to the CPU, without accelerate or where no GPU has room.
    """
    if find_spec("accelerate") is None:
        return None
    if not is_auto or has_room(device, num_bytes):
        return {"": device}
    num = torch.cuda.device_count()
    if num_bytes < sum(torch.cuda.mem_get_info(i)[0] for i in range(num)):
        log.warning("%s lies on %s GPUs: one has no %s free", name, num, decimal(num_bytes))
        return "auto"
    return None


def source_of(name: str) -> str:
    """The folder of a shipped or fetched model; any other name unchanged."""
    return str(checkpoints.model_path(name) or fetched.model_path(name) or name)


def precision_of(
    device: str, dtype: str | None, weights: str | None
) -> tuple[str | None, str | None]:
    """The dtype in which a model is loaded, None: its file's own; and the form of packed weights,
    `auto`, or None. Errors as of `load_model`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.80}")
    if weights is not None and weights not in WEIGHTS:
        raise UserError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r:.80}")
    default = DTYPES[0] if device.startswith("cpu") else None
    if weights is None and dtype is not None:
        return dtype, None
    if weights in (None, "auto"):  # what a user gets at each door: the command line's default
        return (default, "auto") if dtype in (None, DTYPES[0]) else (dtype, None)
    if dtype not in (None, DTYPES[0], weights):
        raise UserError(
            f"weights {weights} and dtype {dtype} contradict each other: leave out dtype"
        )
    if weights in DTYPES:
        return weights, None
    if device.startswith("cuda"):
        return "bfloat16", weights
    if not device.startswith("cpu"):
        raise UserError(f"weights of {weights} need a cpu or cuda, got device {device}")
    return DTYPES[0], weights


def check_device(device: str) -> None:
    """Raise UserError for a device that this machine does not have, or that stores nothing."""
    try:
        target = torch.device(device)
        if target.type == "cpu" and target.index:
            raise IndexError("there is one cpu")
        torch.zeros(1, dtype=torch.float32, device=target).item()
    except Exception as error:  # each backend that is not there has a way of its own to say so
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        # Of reasons that say nothing to a user, or name all that torch was ever built for.
        no_words = ("Expected one of", "Could not run", "INTERNAL ASSERT", "No module named")
        if device == "meta" or any(words in reason for words in no_words):
            known = "known: cpu, cuda, cuda:1, mps, ..."
            reason = "did you mean cuda?" if device == "gpu" else known
        raise UserError(f"device {device!r} is not available here: {reason}") from error
