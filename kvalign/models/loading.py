"""Loading of a language model with its tokenizer: shipped, fetched, a folder, a file, the hub.

A model is packed at its first start, and read packed from then on. To pack takes all weights in the
dtype of the model, and some seconds for each 100 M of them. What came of it lies in the user's
cache folder (`kvalign.foundation.files`), one file for each model, device, dtype and form of
weights, until another byte of the model's files, or other code, asks for another one.
"""

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from glob import escape
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from rich.filesize import decimal
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from kvalign import checkpoints
from kvalign.foundation import files, progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import AUTO, has_room, resolved
from kvalign.foundation.progress import warn_once
from kvalign.foundation.settings import DTYPES, WEIGHTS, typed
from kvalign.models import fetched, kernel, model_folder, packed
from kvalign.models.architectures import ModelSpec, spec_of
from kvalign.models.rope import frequencies
from kvalign.models.weights import check_finite, opened

log = logging.getLogger(__name__)

LEAST = 2**25  # bytes of packed weights that are worth a file
_CODE = [Path(packed.__file__), Path(kernel.__file__)]  # which says how weights lie


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
    request = PackedRequest(config, source, device, dtype, weights)
    if (kept := request.read()) is not None:
        model, tokenizer = kept, model_folder.tokenizer_of(name, source)
    else:
        model, tokenizer = _read(name, request, is_auto)
        request.keep(model)
    model.config.name_or_path = name
    spec = spec_of(model.config, name)
    tensors = ((f"rope_parameters: {path}", x) for path, x in frequencies(model).items())
    check_finite(tensors, f"the config of {name}")
    model.eval()
    log.info("weights of %s: %s", name, packed.weights_of(model))
    model_folder.try_step(name, source, model)
    return LoadedModel(model, tokenizer, spec)


def _read(
    name: str, request: "PackedRequest", is_auto: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model that is read from its files, on its device and packed, and its tokenizer."""
    config, source, weights = request.config, request.source, request.weights
    device, dtype = request.device, request.dtype
    is_gguf = model_folder.gguf_file(source) is not None
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    of_file = dtype or (stored if stored in DTYPES and not is_gguf else DTYPES[0])
    device_map: dict[str, str] | str | None = None
    if device.startswith("cuda") and not is_gguf:
        num_bytes = model_folder.num_weights(config) * getattr(torch, of_file).itemsize
        device_map = device_map_for(name, device, num_bytes, is_auto)
    model, tokenizer = model_folder.read(name, source, config, of_file, device_map)
    if request.is_for_packed():
        request.is_of_4_bits = packed.is_of_4_bits(model)
    if weights == "auto":
        weights = "int4" if request.is_of_4_bits else None
    if is_gguf and dtype is None:
        model.to(torch.bfloat16)
    if device_map is None:
        if is_auto and not has_room(device, num_bytes := packed.num_bytes(model)):
            log.warning("%s goes to the cpu: the GPU has no %s free", name, decimal(num_bytes))
            device = "cpu"
        model.to(device)
    if weights is not None:
        packed.pack(model, weights)
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


@dataclass
class PackedRequest:
    """Call of `load_model` that may ask for packed weights.

    Attributes:
        source: the model's folder, GGUF file or hub id.
        dtype, weights: None as in `precision_of`; weights may be `auto`.
        is_of_4_bits: whether `auto` packs the model; known once it was read from its files.
    """

    config: PretrainedConfig
    source: str
    device: str
    dtype: str | None
    weights: str | None
    is_of_4_bits: bool = False
    _asked_for: Path | None = None

    def read(self) -> PreTrainedModel | None:
        """The packed model that is kept; None if none of the same files is, where it has no room,
        or if it has more than its config says, as with an adapter.
        """
        if not self.is_for_packed():
            return None
        self._asked_for = path = self._file()
        if not path.is_file() or not has_room(self.device, path.stat().st_size):
            return None
        if not files.is_whole(path):
            return None
        device = torch.device(self.device)
        try:
            with opened(path, path.name) as file:
                about = file.metadata()
                if self.weights == "auto" and not json.loads(about["auto"]):
                    return None
                # Copied: what is mapped lies as in the file, and is read more slowly.
                stored = {x: file.get_tensor(x).clone().to(device) for x in file.keys()}  # noqa: SIM118
            stored |= {name: stored[one] for name, one in json.loads(about["shared"]).items()}
            dtype = getattr(torch, about["dtype"])
            with model_folder.quiet(), torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=dtype)
            packed.pack(model, about["weights"], device, stored)
            _fill(model, stored)
        except (UserError, KeyError):
            return None
        model.generation_config = GenerationConfig.from_dict(json.loads(about["generation"]))
        return model if _tensors(model).keys() == stored.keys() else None

    def keep(self, model: PreTrainedModel) -> None:
        """Keep what was loaded if it is packed, on the device that was asked for, and large."""
        own = _tensors(model)
        is_there = model.device.type == torch.device(self.device).type and self.is_for_packed()
        weights = packed.weights_of(model)
        if not is_there or weights not in packed.PACKED or packed.num_bytes(model) < LEAST:
            return
        path = self._file()  # a model from the hub has all its files by now
        if Path(self.source).exists() and self._asked_for not in (None, path):
            warn_once(f"{self.source} was changed while it was read: what was packed is not kept")
            return
        firsts = {id(x): name for name, x in reversed(own.items())}  # by which it is stored
        shared = {name: firsts[id(x)] for name, x in own.items() if firsts[id(x)] != name}
        about = {
            "shared": json.dumps(shared),
            "weights": weights,
            "auto": json.dumps(self.is_of_4_bits),
            "dtype": str(model.dtype).removeprefix("torch."),
            "generation": model.generation_config.to_json_string(),
        }
        tensors = {x: own[x].detach().contiguous() for x in firsts.values()}
        try:
            files.keep(path, lambda partial: save_file(tensors, partial, about))
            for other in path.parent.glob(f"{escape(path.stem.rpartition('-')[0])}*.safetensors"):
                if other != path:  # of other files, or by other code
                    files.forget(other)
        except OSError as error:
            warn_once(f"packed weights are not kept, and are packed at each start: {error}")

    def is_for_packed(self) -> bool:
        """Return whether its weights may be packed."""
        return self.weights is not None and torch.device(self.device).type in ("cpu", "cuda")

    def _file(self) -> Path:
        """File of the packed weights: its name has digests of the model's files and our code."""
        path = model_folder.gguf_file(self.source) or Path(self.source)
        if not path.exists():
            commit = getattr(self.config, "_commit_hash", None)
            file = cached_file(self.source, "config.json", revision=commit, local_files_only=True)
            path = Path(file).parent
        path = path.absolute()
        paths = sorted(x for x in path.iterdir() if x.is_file()) if path.is_dir() else [path]
        content = [(x.name, files.checksum(x)) for x in [*paths, *_CODE]]
        versions = torch.__version__, transformers.__version__, torch.cpu.get_capabilities()
        kind = packed.kind_for(torch.device(self.device)).__name__
        form = "int4" if self.weights == "auto" else self.weights
        owner = _digest(str(path), kind, self.dtype, form)
        name = f"{path.stem}-{form}-{owner}-{_digest(content, versions)}.safetensors"
        return fetched.cache_dir() / "packed" / name


def _digest(*about: object) -> str:
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model, under each of their names."""
    parameters = dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def _fill(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Give a model without numbers the tensors of these names; KeyError if there is none for
    one.
    """
    there: dict[int, Tensor] = {}  # by what it takes the place of, which modules may share
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is None or not x.is_meta:
                    continue
                if id(x) not in there:
                    value = stored[f"{path}.{name}"]
                    there[id(x)] = nn.Parameter(value) if isinstance(x, nn.Parameter) else value
                tensors[name] = there[id(x)]
        for name, x in vars(module).items():
            if isinstance(x, Tensor) and x.is_meta:
                raise KeyError(name)  # it was computed, and is not in the file
