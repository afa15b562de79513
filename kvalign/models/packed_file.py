"""Packed weights that are kept: a model is packed at its first start, and read packed from then on.

To pack takes all weights in the dtype of the model, and some seconds for each 100 M of them. What
came of it lies in the user's cache folder, one file for each model, device, dtype and form of
weights. It says of which files of the model it was made, and by which code: after a change of
either it is made anew.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from kvalign.foundation.device import has_room
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import write_whole
from kvalign.models import kernel, model_folder, packed
from kvalign.models.fetched import cache_dir
from kvalign.models.weights import opened

log = logging.getLogger(__name__)

LEAST = 2**25  # bytes of packed weights that are worth a file
_CODE = [Path(packed.__file__), Path(kernel.__file__)]  # which says how weights lie


class Request(NamedTuple):
    """Call of `load_model` that may ask for packed weights.

    Attributes:
        source: the model's folder, GGUF file or hub id.
        dtype, weights: None as in `loading.precision_of`; weights may be `auto`.
    """

    config: PretrainedConfig
    source: str
    device: str
    dtype: str | None
    weights: str | None

    def read(self) -> PreTrainedModel | None:
        """The packed model that is kept; None if none of the same files is, where it has no room,
        or if it has more than its config says, as with an adapter.
        """
        if not self._is_for_packed():
            return None
        path, made_of = self._place()
        if not path.is_file() or not has_room(self.device, path.stat().st_size):
            return None
        device = torch.device(self.device)
        try:
            with opened(path, path.name) as file:
                about = file.metadata() or {}
                if about.get("made_of") != made_of:
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
        is_there = model.device.type == torch.device(self.device).type and self._is_for_packed()
        weights = packed.weights_of(model)
        if not is_there or weights not in packed.PACKED or packed.num_bytes(model) < LEAST:
            return
        path, made_of = self._place()  # a model from the hub has all its files by now
        firsts = {id(x): name for name, x in reversed(own.items())}  # by which it is stored
        shared = {name: firsts[id(x)] for name, x in own.items() if firsts[id(x)] != name}
        about = {
            "made_of": made_of,
            "shared": json.dumps(shared),
            "weights": weights,
            "dtype": str(model.dtype).removeprefix("torch."),
            "generation": model.generation_config.to_json_string(),
        }
        tensors = {x: own[x].detach().contiguous() for x in firsts.values()}
        try:
            write_whole(path, lambda partial: save_file(tensors, partial, about))
        except OSError as error:
            log.info("packed weights are not kept: %s", error)

    def _is_for_packed(self) -> bool:
        return self.weights is not None and torch.device(self.device).type in ("cpu", "cuda")

    def _place(self) -> tuple[Path, str]:
        """The file, and a digest of what it is made of: the model's files and our code."""
        path = model_folder.gguf_file(self.source) or Path(self.source)
        if not path.exists():
            commit = getattr(self.config, "_commit_hash", None)
            found = cached_file(self.source, "config.json", revision=commit, local_files_only=True)
            path = Path(found).parent
        path = path.absolute()
        files = sorted(x for x in path.iterdir() if x.is_file()) if path.is_dir() else [path]
        stats = [(x.name, x.stat().st_size, x.stat().st_mtime_ns) for x in files]
        code = [x.read_bytes() for x in _CODE]
        versions = torch.__version__, transformers.__version__, torch.cpu.get_capabilities()
        kind = packed.kind_for(torch.device(self.device)).__name__
        owner = _digest(str(path), kind, self.dtype, self.weights)
        name = f"{path.stem}-{self.weights}-{owner[:16]}.safetensors"
        return cache_dir() / "packed" / name, _digest(stats, code, versions)


def _digest(*about: object) -> str:
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model, under each of their names."""
    found = dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def _fill(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Give a model without numbers the tensors of these names; KeyError if there is none for
    one.
    """
    there: dict[int, Tensor] = {}  # by what it takes the place of, which modules may share
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, x in own.items():
                if x is None or not x.is_meta:
                    continue
                if id(x) not in there:
                    value = stored[f"{path}.{name}"]
                    there[id(x)] = nn.Parameter(value) if isinstance(x, nn.Parameter) else value
                own[name] = there[id(x)]
        for name, x in vars(module).items():
            if isinstance(x, Tensor) and x.is_meta:
                raise KeyError(name)  # it was computed, and is not in the file
