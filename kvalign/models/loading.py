"""Loading of a language model with its tokenizer: shipped, fetched, a folder, a file, the hub."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign import checkpoints
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import DTYPES, WEIGHTS, typed
from kvalign.models import fetched, gguf_file, model_folder, packed
from kvalign.models.architectures import ModelSpec, spec_of
from kvalign.models.rotation_trial import frequencies
from kvalign.models.weights import check_finite

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
    dtype: str = "float32",
    weights: str | None = None,
) -> LoadedModel:
    """Load a causal LM of transformers with its tokenizer and spec.

    Args:
        name: a shipped name (`gpt2-mini`, `llama-mini`), a fetched one (`kvalign models`), a hub
            id, a local folder or a GGUF file.
        device, dtype: as torch names them.
        weights: how weights are stored: as a dtype, which is then the model's; packed as `int8` or
            `int4` (`kvalign.models.packed`), with everything else in float32 on a CPU and in
            bfloat16 on CUDA; or `auto`: on a CPU `int4` if the file has all products in 4 bits, as
            many GGUF files do, else as `dtype` says, which is the default.

    Raises:
        UserError: an unknown name, an architecture or RoPE scaling that cannot be shifted, or
            weights that the device or the model does not support.
    """
    typed("model", name, Path)
    name = os.fspath(name)
    device = str(device) if isinstance(device, torch.device) else typed("device", device, str)
    dtype, weights = precision_of(device, dtype, weights)
    progress.phase(f"loading {name}")
    source = source_of(name)
    check_device(device)
    file = gguf_file.find(source)
    config = gguf_file.config_of(file) if file else model_folder.config_of(name, source)
    spec_of(config, name)  # refuse before the weights are read
    if file:
        model, tokenizer = gguf_file.read(file, config, dtype)
    else:
        model, tokenizer = model_folder.read(name, source, config, dtype)
    model.config.name_or_path = name
    spec = spec_of(model.config, name)
    turns = ((f"rope_parameters: {path}", x) for path, x in frequencies(model).items())
    check_finite(turns, f"the config of {name}")
    model.eval()
    if weights == "auto":
        on_cpu = torch.device(device).type == "cpu"
        weights = "int4" if on_cpu and packed.is_of_4_bits(model) else dtype
        log.info("weights of %s: %s", name, weights)
    model.to(device)
    if weights in packed.PACKED:
        packed.pack(model, weights)
    model_folder.try_step(name, source, model)
    return LoadedModel(model, tokenizer, spec)


def source_of(name: str) -> str:
    """The folder of a shipped or fetched model; any other name unchanged."""
    return str(checkpoints.model_path(name) or fetched.model_path(name) or name)


def precision_of(device: str, dtype: str, weights: str | None) -> tuple[str, str]:
    """The dtype in which a model is loaded, and the form of its weights; as of `load_model`.

    Raises:
        UserError: an unknown name, two that contradict each other, or packed weights on another
            device than a CPU or CUDA.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.80}")
    if weights is None:
        return dtype, dtype
    if weights not in WEIGHTS:
        raise UserError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r:.80}")
    if weights == "auto" and dtype != DTYPES[0]:
        return dtype, dtype
    if dtype not in (DTYPES[0], weights):
        raise UserError(
            f"weights {weights} and dtype {dtype} contradict each other: leave out dtype"
        )
    if weights not in packed.PACKED:
        return (weights if weights in DTYPES else dtype), weights
    if device.startswith("cuda"):
        return "bfloat16", weights
    if not device.startswith("cpu"):
        raise UserError(f"weights of {weights} need a cpu or cuda, got device {device}")
    return dtype, weights


# In torch's reasons that say nothing to a user, or name all that it was ever built for.
_NO_WORDS = ("Expected one of", "Could not run", "INTERNAL ASSERT", "No module named")


def check_device(device: str) -> None:
    """Raise UserError for a device that this machine does not have, or that stores nothing."""
    try:
        wanted = torch.device(device)
        if wanted.type == "cpu" and wanted.index:
            raise UserError(f"device {device!r} is not available here: there is one cpu")
        torch.zeros(1, dtype=torch.float32, device=wanted).item()
    except UserError:
        raise
    except Exception as error:  # each backend that is not there has a way of its own to say so
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        if device == "meta" or any(words in reason for words in _NO_WORDS):
            reason = (
                "did you mean cuda?" if device == "gpu" else "known: cpu, cuda, cuda:1, mps, ..."
            )
        raise UserError(f"device {device!r} is not available here: {reason}") from error
