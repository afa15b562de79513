"""Tokenizers that put something before a text, or after it, with the ids of every byte."""

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from helpers.byte_fallback import BYTES, SPECIAL, TOKENS, byte_fallback_tokenizer
from kvalign import checkpoints


def _bytes() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))


def _space_in_front() -> PreTrainedTokenizerBase:
    tokenizer = _bytes()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _metaspace(scheme: str, split: bool) -> PreTrainedTokenizerBase:
    """Words begin with ▁, the first of a text (`first`) or of each part between special tokens
    (`always`), too; `split`: no token has two words.
    """
    tokenizer = byte_fallback_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return tokenizer


def _unigram() -> PreTrainedTokenizerBase:
    pieces = [*SPECIAL, *BYTES, "▁", "▁the", "the", "e", "▁t", "er", "n"]
    scores = [(piece, -1.0 - 0.1 * i) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.ByteFallback(), decoders.Metaspace()]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts[:1], decoders.Fuse()])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def framed(tokenizer: PreTrainedTokenizerBase, form: str) -> PreTrainedTokenizerBase:
    """The tokenizer with special tokens around a text: `B $A E`, with any of the two."""
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    if begin == end:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        begin = "<s>"
    single = form.replace("B", begin).replace("E", end)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[(one, tokenizer.convert_tokens_to_ids(one)) for one in (begin, end)],
    )
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "bytes": _bytes,
    "bytes after a begin": lambda: framed(_bytes(), "B $A"),
    "bytes before an end": lambda: framed(_bytes(), "$A E"),
    "bytes, a space in front": lambda: framed(_space_in_front(), "B $A E"),
    "a space in front of each part": lambda: framed(byte_fallback_tokenizer(), "B $A"),
    "words, all with a space": lambda: framed(_metaspace("always", True), "B $A"),
    "words, the first with a space": lambda: framed(_metaspace("first", False), "B $A E"),
    "unigram, before an end": lambda: framed(_unigram(), "$A E"),
}
assert len(TOKENS) > len(BYTES)
