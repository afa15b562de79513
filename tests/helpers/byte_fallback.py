"""A tokenizer with byte fallback, as of Llama 2 and Mistral, and a tiny model of its vocabulary."""

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from helpers.tiny_models import tiny_model
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "t")]
_PIECES = ["▁", *map(chr, range(ord("a"), ord("z") + 1)), ".", "é", *map("".join, _MERGES)]
TOKENS = [*SPECIAL, *BYTES, *_PIECES]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Characters that have no token are spelled in bytes."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(BPE(vocabulary, _MERGES, unk_token="<unk>", byte_fallback=True))
    prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([prepend, replace])
    spaced, alone = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    joined = [spaced, decoders.ByteFallback(), decoders.Fuse(), alone]
    tokenizer.decoder = decoders.Sequence(joined)
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def byte_fallback_model(kind: str = "llama") -> LoadedModel:
    """A random model that writes such tokens."""
    model = tiny_model(kind, vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2)
    return LoadedModel(model, byte_fallback_tokenizer(), spec_of(model.config, "tiny"))
