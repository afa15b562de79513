"""Model folders, hub ids and GGUF files, as transformers reads them. Errors are one line, before
memory is taken, and transformers prints nothing itself.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.utils import logging

from kvalign import checkpoints
from kvalign.foundation import hub
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import read_json
from kvalign.foundation.names import nearest
from kvalign.models import fetched
from kvalign.models.weights import check_header

MOST_LAYERS = 2**10
_LAYERS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
_ROUNDED = 0.05  # of the logits' deviation, by which bfloat16 may round a merged model's
_LONGEST = 300  # characters of a reason
GGUF = ".gguf"


def config_of(name: str, source: str) -> PretrainedConfig:
    """The config of a model in a folder, a GGUF file or of a hub id; UserError if damaged."""
    if file := gguf_file(source):
        from kvalign.models import gguf

        gguf.check_readers()
        with _explain_errors(name, str(file)):
            return gguf.config_of(file)
    if os.path.isdir(source):
        if not (path := Path(source, "config.json")).is_file():
            raise UserError(f"cannot load a model from folder {source!r}: it has no config.json")
        values = read_json(path)
        for field in _LAYERS & values.keys():
            check_layers(values[field], f"{path}: {field}")
    with _explain_errors(name, source):
        return transformers.AutoConfig.from_pretrained(source, **_local(source))


def read(
    name: str,
    source: str,
    config: PretrainedConfig,
    dtype: str,
    device_map: dict[str, str] | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer; UserError if its files are damaged or do not fit.

    Args:
        device_map: of accelerate: where weights go as they are read; None: to the CPU.
    """
    how: dict[str, Any] = {"config": config, "dtype": getattr(torch, dtype)}
    if file := gguf_file(source):
        from kvalign.models import gguf

        tokenizer = tokenizer_of(name, source)  # refused before the weights are read
        with _explain_errors(name, str(file)):
            return gguf.read(file, **how), tokenizer
    with _explain_errors(name, source):
        if os.path.isdir(source):
            _check_weights(Path(source), config)
            if Path(source, "adapter_config.json").is_file() and not find_spec("peft"):
                raise UserError("it has an adapter, which is read with peft: pip install peft")
        how |= {"use_safetensors": True, "device_map": device_map}
        model = pretrained(source, **how, **_local(source))
        if getattr(model, "_hf_peft_config_loaded", False):
            _merge(model)
    return model, tokenizer_of(name, source)


def pretrained(source: str | Path, **how: Any) -> PreTrainedModel:
    """A model of transformers; UserError if its files lack weights."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, **how
    )
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"it lacks {len(missing)} weights of the model, such as {missing[0]}")
    return model


def _merge(model: PreTrainedModel) -> None:
    """Merge the adapter of a model's files into its weights.

    Raises:
        UserError: it cannot be merged, such as one of an embedding that the head shares.
    """
    ids = torch.arange(8, device=model.device)[None] % model.config.vocab_size
    before = _logits(model.eval(), ids)
    layers = [
        (name, one)
        for name, one in model.named_modules()
        if hasattr(one, "get_base_layer") or hasattr(one, "unload_and_optionally_merge_module")
    ]
    for name, layer in layers:
        if hasattr(layer, "unload_and_optionally_merge_module"):
            inner = layer.unload_and_optionally_merge_module(True, False, None)
        else:
            layer.merge()
            inner = layer.get_base_layer()
        model.set_submodule(name, inner)
    model._hf_peft_config_loaded = False
    del model.peft_config
    off = (_logits(model, ids) - before).std() / before.std()
    if not off < _ROUNDED:
        raise UserError("its adapter cannot be merged into its weights: merge it with peft")


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()


def tokenizer_of(name: str, source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its chat template; UserError if there is none."""
    if file := gguf_file(source):
        from kvalign.models.gguf import tokenizer_of_gguf

        with _explain_errors(name, str(file)):
            return tokenizer_of_gguf(file)
    with _explain_errors(name, source):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **_local(source))
        if not tokenizer("a")["input_ids"]:
            raise UserError("its tokenizer has no vocabulary: tokenizer.json is missing, or empty")
    return tokenizer


def try_step(name: str, source: str, model: PreTrainedModel) -> None:
    """Raise UserError for a model whose first step fails, by its config or quantised weights."""
    with _explain_errors(name, source), torch.no_grad():
        ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        model(input_ids=ids, use_cache=False).logits.numel()


def check_layers(num: object, name: str) -> None:
    """Raise UserError for more layers than any model has, which take time and memory to build."""
    if isinstance(num, int) and num > MOST_LAYERS:
        raise UserError(f"{name} must be at most {MOST_LAYERS}, got {num:g}")


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which transformers loads and saves without messages or bars."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _local(source: str) -> dict[str, Any]:
    is_local = os.path.isdir(source) or not hub.is_reachable()
    return {"local_files_only": is_local, "trust_remote_code": False}


def _check_weights(folder: Path, config: PretrainedConfig) -> None:
    """Raise UserError for files with fewer weights, packed or not, than a config asks for."""
    is_packed = hasattr(config, "quantization_config")
    paths = list(folder.glob("*.safetensors"))
    num_stored = sum(check_header(path, any_type=is_packed) for path in paths)
    if is_packed:
        num_stored = 8 * sum(path.stat().st_size for path in paths)
    num_needed = num_weights(config)
    if 0 < num_stored < num_needed:
        raise UserError(
            f"config.json asks for {num_needed} weights, but its files have {num_stored}"
        )


def num_weights(config: PretrainedConfig) -> int:
    with no_init_weights(), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(x.numel() for x in model.parameters())


def num_bytes(model: PreTrainedModel) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


@contextmanager
def _explain_errors(name: str, source: str) -> Iterator[None]:
    try:
        with quiet():
            yield
    except (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a reader of anything from anywhere raises anything
        raise UserError(_reason(name, source, error)) from error


def _reason(name: str, source: str, error: BaseException) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if source.lower().endswith(GGUF):
        return f"cannot read the GGUF file {source!r}: {reason:.{_LONGEST}}"
    if os.path.isdir(source):
        if "'NoneType' object" in reason:
            reason = "transformers has no class for its architecture"
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        return f"cannot load a model from folder {source!r}: {reason:.{_LONGEST}}"
    if not isinstance(error, OSError | ValueError):
        return f"cannot load {name!r}: {reason:.{_LONGEST}}"
    if name in fetched.MODELS:
        return f"{name} is not fetched yet: {fetched.how_to_fetch(name)}"
    if hub.is_path(name):
        return f"no model {name!r}: there is no such folder or file"
    near = nearest(name, [*checkpoints.MODELS, *fetched.MODELS])
    hint = f"; did you mean {near}?" if near else ""
    if near in fetched.MODELS and not fetched.model_path(near):
        hint += f" ({fetched.how_to_fetch(near)})"
    here = [*checkpoints.MODELS, *filter(fetched.model_path, fetched.MODELS)]
    return (
        f"no model {name!r} here or on the hub{hub.why_not()}{hint} (works offline: "
        f"{', '.join(here)}, or the path of a folder or a GGUF file)"
    )


def gguf_file(source: str) -> Path | None:
    """The GGUF file at a path, or of a folder without other weights; None; UserError: several."""
    path = Path(source)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        files = sorted(path.glob(f"*{GGUF}"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise UserError(f"{source} has several GGUF files, name one of them: {names}")
        return files[0] if files else None
    if path.suffix.lower() != GGUF:
        return None
    if not path.is_file():
        raise NotFoundError(f"there is no file {source!r}")
    return path
