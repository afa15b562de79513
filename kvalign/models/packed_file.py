"""Packed weights that are kept for later starts.

A model is packed at its first start, and read packed from then on. To pack takes all weights in the
dtype of the model, and some seconds for each 100 M of them. What came of it lies in the user's
cache folder (`kvalign.foundation.files`), one file for each model, device, dtype and form of
weights, until another byte of the model's files, or other code, asks for another one.
"""

import hashlib
import json
from dataclasses import dataclass
from glob import escape
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from kvalign.foundation import files
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import has_room
from kvalign.foundation.progress import warn_once
from kvalign.models import fetched, kernel, model_folder, packed
from kvalign.models.weights import opened

LEAST = 2**25  # bytes of packed weights that are worth a file
_CODE = [Path(packed.__file__), Path(kernel.__file__)]  # which says how weights lie


@dataclass
class PackedRequest:
    """Call of `load_model` that may ask for packed weights, on a CPU or on CUDA.

    Attributes:
        source: the model's folder, GGUF file or hub id.
        dtype, weights: as of `kvalign.models.loading.precision_of`.
        is_of_4_bits: whether `auto` packs the model; known once it was read from its files.
    """

    config: PretrainedConfig
    source: str
    device: str
    dtype: str | None
    weights: str
    is_of_4_bits: bool = False
    _asked_for: Path | None = None

    def read(self) -> PreTrainedModel | None:
        """The packed model that is kept; None if none of the same files is, where it has no room,
        or if it has more than its config says, as with an adapter.
        """
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

    def form_of(self, model: PreTrainedModel) -> str | None:
        """Form in which a model, as it was read, is to be packed; None: it is not."""
        self.is_of_4_bits = packed.is_of_4_bits(model)
        if self.weights == "auto":
            return "int4" if self.is_of_4_bits else None
        return self.weights

    def pack(self, model: PreTrainedModel, form: str) -> None:
        """Pack a model that was read from its files, and keep it."""
        packed.pack(model, form)
        self.keep(model, form)

    def keep(self, model: PreTrainedModel, form: str) -> None:
        """Keep a packed model if it is on the device that was asked for, and large."""
        is_there = model.device.type == torch.device(self.device).type
        if not is_there or model_folder.num_bytes(model) < LEAST:
            return
        own = _tensors(model)
        path = self._file()  # a model from the hub has all its files by now
        if Path(self.source).exists() and self._asked_for not in (None, path):
            warn_once(f"{self.source} was changed while it was read: what was packed is not kept")
            return
        firsts = {id(x): name for name, x in reversed(own.items())}  # by which it is stored
        shared = {name: firsts[id(x)] for name, x in own.items() if firsts[id(x)] != name}
        about = {
            "shared": json.dumps(shared),
            "weights": form,
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
