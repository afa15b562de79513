"""GGUF files, which llama.cpp reads too: a model's weights, mostly quantised, its sizes and its
tokenizer in one file.

transformers reads them, with the packages of `kvalign[gguf]`; quantised weights are unpacked, so
that a model of one is as any other.
"""

import importlib.util
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.memory import check_sizes

SUFFIX = ".gguf"
_READERS = ("gguf", "accelerate")  # what transformers' reader imports
_SINCE = "5.18"  # of transformers; before, it made other tokenizers of some files
# Tensors and fields by which a file scales its RoPE.
_SCALES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SCALING = (".rope.scaling.type", ".rope.scale_linear")


def find(source: str) -> Path | None:
    """The GGUF file that a model's path means: itself, or the only one in a folder that has no
    other weights; None where it means none.

    Raises:
        UserError: a folder with several, or no such file.
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
    """Raise UserError if a package is missing that reads such files, or too old."""
    needed = [name for name in _READERS if importlib.util.find_spec(name) is None]
    if Version(transformers.__version__) < Version(_SINCE):
        needed.append(f"transformers {_SINCE} or later")
    if needed:
        names = " and ".join(needed)
        raise UserError(f"a GGUF file is read with {names}: pip install 'kvalign[gguf]'")


def config_of(path: Path) -> PretrainedConfig:
    """The model's config, as transformers would have it.

    Raises:
        UserError: a file that is damaged, of an architecture that transformers cannot read, or with
            a RoPE scaling, which it would leave out.
    """
    check_readers()
    from gguf import GGUFReader

    with _reading(path):
        _check_header(path)
        try:
            file = GGUFReader(path)  # it goes to the end of the last weights
        except Exception as error:
            raise UserError(f"it was cut or damaged ({error})") from error
        fields = file.fields.items()
        check_sizes({name: x.contents() for name, x in fields if len(x.types) == 1}, path.name)
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
    """The model of a file, with its weights unpacked, and the tokenizer, with its chat template.

    Args:
        config: from `config_of`.
        dtype: of the weights, as torch names it.

    Raises:
        UserError: a file without all weights, as one part of several, or without a tokenizer.
    """
    with _reading(path):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            quantization_config=transformers.GgufConfig(dequantize=True),
            **_in_folder(path),
        )
        if missing := sorted(found["missing_keys"]):
            raise UserError(f"it lacks {len(missing)} weights of the model, as {missing[0]}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **_in_folder(path))
    # A plain model, which can be saved.
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


# Bytes of a value by its type; 8 is a text, 9 are several of a type.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _SEVERAL = 8, 9


def _check_header(path: Path) -> None:
    """Raise UserError for fields that go beyond the end of the file: the reader would look for them
    one by one. A file of another byte order is left to it.
    """
    num_bytes = path.stat().st_size

    def read(form: str) -> Any:
        data = file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise UserError("it was cut or damaged")
        return struct.unpack(form, data)[0]

    def skip(num: int) -> None:
        if num > num_bytes - file.tell():
            raise UserError("it was cut or damaged: its header claims more than the file has")
        file.seek(num, os.SEEK_CUR)

    def skip_value(kind: int) -> None:
        if kind in _WIDTHS:
            skip(_WIDTHS[kind])
        elif kind == _TEXT:
            skip(read("<Q"))
        elif kind == _SEVERAL:
            inner, num = read("<I"), read("<Q")
            if inner in _WIDTHS:
                skip(num * _WIDTHS[inner])
                return
            for _ in range(num):  # each takes some bytes: it ends with the file
                skip_value(inner)
        else:
            raise UserError(f"it was cut or damaged: a field is of type {kind}")

    with path.open("rb") as file:
        magic, version = read("4s"), read("<I")
        if magic != b"GGUF" or version >= 2**16:
            return
        read("<Q")
        for _ in range(read("<Q")):
            skip(read("<Q"))
            skip_value(read("<I"))


def _in_folder(path: Path) -> dict[str, Any]:
    return {"gguf_file": path.name, "local_files_only": True}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with a file; keep the reader's own words and bar away."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar, verbosity = getattr(reader, "tqdm", None), logging.get_verbosity()
    reader.tqdm = lambda items, **_: items
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MemoryError:
        raise
    except Exception as error:  # a reader of bytes from anywhere raises anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(f"cannot read the GGUF file {str(path)!r}: {reason}") from error
    finally:
        reader.tqdm = bar
        logging.set_verbosity(verbosity)
