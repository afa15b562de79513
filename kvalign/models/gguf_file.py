"""GGUF files, the format of llama.cpp: a model's weights, usually quantised, its sizes and its
tokenizer in one file.

transformers reads them with the packages of `kvalign[gguf]`. Quantised weights are unpacked, so the
model works like any other.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.models.model_folder import check_layers, quiet

SUFFIX = ".gguf"
_READERS = ("gguf", "accelerate")  # what transformers' reader imports
_SINCE = "5.18"  # of transformers; before, it made other tokenizers of some files
# Tensors and fields by which a file scales its RoPE.
_SCALES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SCALING = (".rope.scaling.type", ".rope.scale_linear")


def find(source: str) -> Path | None:
    """The GGUF file of a model's path: the path itself, or the only one in a folder without other
    weights; None if there is none.
    """
    path = Path(source)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise UserError(f"{source} has several GGUF files, name one of them: {names}")
        return files[0] if files else None
    if path.suffix.lower() != SUFFIX:
        return None
    if not path.is_file():
        raise NotFoundError(f"there is no file {source!r}")
    return path


def check_readers() -> None:
    """Raise UserError if a package for reading these files is missing or too old."""
    needed = [name for name in _READERS if importlib.util.find_spec(name) is None]
    if Version(transformers.__version__) < Version(_SINCE):
        needed.append(f"transformers {_SINCE} or later")
    if needed:
        names = " and ".join(needed)
        raise UserError(f"a GGUF file is read with {names}: pip install 'kvalign[gguf]'")


def config_of(path: Path) -> PretrainedConfig:
    """The model's config, in the form of transformers."""
    check_readers()
    from gguf import GGUFReader

    with _explain_errors(path):
        try:
            file = GGUFReader(path)  # it goes to the end of the last weights
        except Exception as error:
            raise UserError(f"it was cut or damaged ({error})") from error
        for name, field in file.fields.items():
            if name.endswith(".block_count"):
                check_layers(field.contents(), name)
        scales = [name for name in file.fields if name.endswith(_SCALING)]
        scaled = [name for name in scales if file.fields[name].contents() not in ("none", 1.0)]
        scaled += [tensor.name for tensor in file.tensors if tensor.name in _SCALES]
        config = transformers.AutoConfig.from_pretrained(path.parent, **_in_folder(path))
        rope = getattr(config, "rope_parameters", None) or {}
        if scaled and rope.get("rope_type", "default") == "default":
            raise UserError(f"transformers does not read its RoPE scaling ({scaled[0]})")
    return config


def read(
    path: Path, config: PretrainedConfig, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a file, with its weights unpacked, and the tokenizer, with its chat template."""
    with _explain_errors(path):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            quantization_config=transformers.GgufConfig(dequantize=True),
            **_in_folder(path),
        )
        if missing := sorted(report["missing_keys"]):
            raise UserError(f"it lacks {len(missing)} weights of the model, such as {missing[0]}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **_in_folder(path))
    # A plain model, which can be saved.
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _in_folder(path: Path) -> dict[str, Any]:
    return {"gguf_file": path.name, "local_files_only": True}


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with a file; keep the reader's own words and bar away."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = getattr(reader, "tqdm", None)
    reader.tqdm = lambda items, **_: items
    try:
        with quiet():
            yield
    except MemoryError:
        raise
    except Exception as error:  # a reader of bytes from anywhere raises anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(f"cannot read the GGUF file {str(path)!r}: {reason}") from error
    finally:
        reader.tqdm = bar
