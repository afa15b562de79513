"""GGUF files, the format of llama.cpp: a model's weights, usually quantised, its sizes and its
tokenizer. transformers reads the model with the packages of `kvalign[gguf]`. Quantised weights are
unpacked, so it works like any other.

The tokenizer is ours: it gives a text with special tokens the tokens that llama.cpp gives it. A
file has no tokenizer, only its kind, its tokens, and settings, whose meaning llama.cpp knows
([llama-vocab.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp)). Here
each of them is read, or known to change no token of its kind, or refused by name.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from packaging.version import Version
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvalign.foundation.errors import UserError
from kvalign.models.model_folder import check_layers, pretrained

log = logging.getLogger(__name__)

_OURS = "tokenizer.ggml."
_READERS = ("gguf", "accelerate")  # what transformers' reader imports
_SINCE = "5.18"  # of transformers; before, it made other tokenizers of some files
# Tensors and fields by which a file scales its RoPE.
_SCALES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_END_IDS = tuple(f"{_OURS}{name}_token_id" for name in ("eos", "eot", "eom"))
_SCALING = (".rope.scaling.type", ".rope.scale_linear")
_KINDS = ("llama", "gpt2")
_READ = (
    *("model", "pre", "tokens", "token_type", "scores", "merges"),
    *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id"),
    *("padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
)
# Of other kinds, of tokens that are only named, of texts in pairs, of how a text is shown.
_WITHOUT_EFFECT = (
    *("precompiled_charsmap", "remove_extra_whitespaces", "token_type_count", "add_sep_token"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
    "seperator_token_id",  # codespell:ignore seperator
    *(f"{name}_token_id" for name in ("separator", "cls", "mask", "prefix", "suffix")),
    *(f"{name}_token_id" for name in ("middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad")),
    *(f"{name}_token_id" for name in ("fim_rep", "fim_sep")),
)
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens
# Names by which llama.cpp takes a token for one that ends a text, whatever its type.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
}
_SPACE = "▁"


class Pre(NamedTuple):
    """Split of a text by byte-level BPE: each expression splits what those before it left over.

    Attributes:
        whole: a word that is a token is not made of merges.
        begins: a text begins with a token, unless the file says otherwise.
    """

    splits: Sequence[str]
    whole: bool = False
    begins: bool = False


_SHORT = r"'(?:[sSdDmMtT]|[rR][eE]|[vV][eE]|[lL][lL])"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGITS, _TRIPLES = r"\p{N}", r"\p{N}{1,3}"


def _words(digits: str, marks: str = "", signs: str = r"[\r\n]*") -> str:
    """Words of letters with one sign before them, digits, and signs with line breaks after them."""
    letter, before = rf"[\p{{L}}{marks}]", r"[^\r\n\p{L}\p{N}]?"
    return rf"{_SHORT}|{before}{letter}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+{signs}|{_LINES}"


def _cased(digits: str, short: str) -> str:
    """Words that end where a capital follows a small letter, of the Latin alphabet alone."""
    upper, lower, before = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])", r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_OF_DEEPSEEK = (
    _TRIPLES,
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES,
)
_OF_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"  # noqa: RUF001
_SPLITS = {
    "default": Pre([r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    "gpt-2 phi-2 mpt olmo jais exaone4 gigachat a.x-4.0 mellum trillion granite-docling": Pre(
        [_GPT2]
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Pre([_DIGITS, _GPT2]),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Pre(
        [_words(_TRIPLES)], whole=True, begins=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Pre([_words(_TRIPLES)]),
    "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": Pre(
        [_words(_DIGITS)]
    ),
    "qwen35": Pre([_words(_DIGITS, r"\p{M}")]),
    "falcon": Pre([r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"]),
    "deepseek-v3 hunyuan-dense joyai-llm": Pre(_OF_DEEPSEEK),
    "tekken": Pre([_cased(_DIGITS, "")], whole=True, begins=True),
    "gpt-4o llama4 kanana2 minimax-m2": Pre([_cased(_TRIPLES, f"(?:{_SHORT})?")]),
    "bloom poro-chat gpt3-finnish": Pre([_OF_BLOOM]),
    "viking": Pre([_OF_BLOOM, _DIGITS]),
}
SPLITS = {name: pre for names, pre in _SPLITS.items() for name in names.split()}


class _Vocabulary(NamedTuple):
    """Settings of a file by their names, and its tokens with their types."""

    values: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(_OURS + name, default)

    def token(self, name: str, default: int | None = None) -> str | None:
        """The token that a setting names, or that of the default id."""
        number = self.get(f"{name}_token_id", default)
        if number is None or (number == default and number >= len(self.tokens)):
            return None
        if not 0 <= number < len(self.tokens):
            raise UserError(
                f"its {_OURS}{name}_token_id is {number}, but it has {len(self.tokens)} tokens"
            )
        return self.tokens[number]

    @property
    def ids(self) -> dict[str, int]:
        """The tokens that a text may have. A converter fills up what the model has more."""
        typed_tokens = enumerate(zip(self.tokens, self.types, strict=True))
        return {
            token: number
            for number, (token, kind) in typed_tokens
            if not (kind == _UNUSED and token == f"[PAD{number}]")
        }


def check_readers() -> None:
    """Raise UserError if a package for reading these files is missing or too old."""
    needed = [name for name in _READERS if find_spec(name) is None]
    if Version(transformers.__version__) < Version(_SINCE):
        needed.append(f"transformers {_SINCE} or later")
    if needed:
        names = " and ".join(needed)
        raise UserError(f"a GGUF file is read with {names}: pip install 'kvalign[gguf]'")


def config_of(path: Path) -> PretrainedConfig:
    """The config of the model in a file; UserError if it is damaged, or of a RoPE not read."""
    from gguf import GGUFReader

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
    ends = [file.fields[x].contents() for x in _END_IDS if x in file.fields]
    if len({*ends}) > 1:
        config.eos_token_id = [*dict.fromkeys(ends)]
    rope = getattr(config, "rope_parameters", None) or {}
    if scaled and rope.get("rope_type", "default") == "default":
        raise UserError(f"transformers does not read its RoPE scaling ({scaled[0]})")
    return config


def read(path: Path, **how: Any) -> PreTrainedModel:
    """The model in a file, its weights unpacked; `how` as of transformers' `from_pretrained`."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = reader.tqdm
    reader.tqdm = lambda items, **_: items  # which `quiet` does not know
    try:
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = pretrained(path.parent, **how, **_in_folder(path))
    finally:
        reader.tqdm = bar
    # A plain model, which can be saved.
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _in_folder(path: Path) -> dict[str, Any]:
    return {"gguf_file": path.name, "local_files_only": True}


def tokenizer_of_gguf(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a file, with its chat template; UserError for a setting that is not read."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    texts = [_OURS + name for name in ("tokens", "merges")]  # no other lists of texts are read
    values, _ = read_gguf_metadata(str(path), texts)
    file = _vocabulary(values)
    kind, pre = file.get("model"), None
    if kind == "gpt2":
        name = file.get("pre", "default")
        if name not in SPLITS:
            raise UserError(f"its {_OURS}pre is {name!r:.80}, which is not read")
        pre = SPLITS[name]
    tokenizer = _of_scores(file) if pre is None else _of_merges(file, pre)
    names = {"bos": file.token("bos", 1 if pre is None else None)}
    names["eos"] = file.token("eos", 2 if pre is None else None)
    names["unk"] = file.token("unknown", 0 if pre is None else None)
    names["pad"] = file.token("padding")
    tokenizer.add_special_tokens([*_added(file, True)])
    tokenizer.add_tokens([*_added(file, False)])
    around = {
        "bos": file.get("add_bos_token", pre is None or pre.begins),
        "eos": file.get("add_eos_token", False),
    }
    for name, is_added in around.items():
        if is_added and names[name] is None:
            raise UserError(f"a text needs a {name} token, but it has no {_OURS}{name}_token_id")
    first, last = (names[name] if is_added else None for name, is_added in around.items())
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*filter(None, [first, "$A", last])],
            pair=[*filter(None, [first, "$A", "$B", last])],
            special_tokens=[(x, file.ids[x]) for x in {first, last} if x],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in names.items() if token is not None},
        chat_template=values.get("tokenizer.chat_template"),
    )


def _vocabulary(values: Mapping[str, Any]) -> _Vocabulary:
    """The settings of a file, all of which are known."""
    kind = values.get(f"{_OURS}model")
    if kind not in _KINDS:
        raise UserError(f"its {_OURS}model is {kind!r}: {' and '.join(_KINDS)} are read")
    known = {_OURS + name for name in (*_READ, *_WITHOUT_EFFECT)}
    for name in values:
        if name.startswith(_OURS) and name not in known:
            raise UserError(f"its setting {name} is not read")
    needed = ("tokens", "scores" if kind == "llama" else "merges")
    for name in needed:
        if f"{_OURS}{name}" not in values:
            raise UserError(f"it has no {_OURS}{name}")
    tokens = [x or f"[EMPTY_{i}]" for i, x in enumerate(values[f"{_OURS}tokens"])]
    types = values.get(f"{_OURS}token_type") or [1] * len(tokens)
    for name, of_tokens in (
        ("token_type", types),
        ("scores", values.get(f"{_OURS}scores", tokens)),
    ):
        if len(of_tokens) < len(tokens):
            raise UserError(f"its {_OURS}{name} has {len(of_tokens)} of {len(tokens)} tokens")
    if len({*tokens}) < len(tokens):
        token = Counter(tokens).most_common(1)[0][0]
        raise UserError(f"its {_OURS}tokens has {token!r:.80} twice")
    types = [_CONTROL if x in _ENDS else kind for x, kind in zip(tokens, types, strict=False)]
    return _Vocabulary(values, tokens, types)


def _of_type(file: _Vocabulary, *types: int) -> Iterator[int]:
    return (number for number, kind in enumerate(file.types) if kind in types)


def _added(file: _Vocabulary, is_special: bool) -> Iterator[AddedToken]:
    """Tokens that a text has as wholes: special ones, or those that are shown."""
    name = str(file.values.get("general.name")).lower()
    takes_blanks = "phi-3" in name or "phi3" in name  # as llama.cpp knows, no setting says so
    for number in _of_type(file, *((_CONTROL, _UNKNOWN) if is_special else (_USER_DEFINED,))):
        token = file.tokens[number]
        rstrip = takes_blanks and token not in ("<unk>", "<s>", "<|endoftext|>")
        yield AddedToken(token, normalized=False, special=is_special, rstrip=rstrip)


def _of_merges(file: _Vocabulary, pre: Pre) -> Tokenizer:
    merges = dict.fromkeys(_pair(merge) for merge in file.get("merges"))
    bpe = models.BPE(file.ids, [*merges], ignore_merges=pre.whole)
    tokenizer = Tokenizer(bpe)
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in pre.splits]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    place = merge.find(" ", 1)
    return merge[:place], merge[place + 1 :]


def _of_scores(file: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE: the neighbours that make the token with the highest score are merged
    first, of several the leftmost ones. Characters without a token are bytes.
    """
    ids, scores = file.ids, file.get("scores")
    merges = [
        (-scores[number], number, -place, token[:place], token[place:])
        for token, number in ids.items()
        for place in range(1, len(token))
        if token[:place] in ids and token[place:] in ids
    ]
    made = {ids[left + right] for *_, left, right in merges} - {*_of_type(file, _USER_DEFINED)}
    if len({scores[number] for number in made}) < len(made):
        log.warning(
            "tokens of one score are merged in the order of the vocabulary, by llama.cpp from left"
        )
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    tokenizer = Tokenizer(
        models.BPE(ids, pairs, unk_token=file.token("unknown", 0), byte_fallback=True)
    )
    has_prefix = file.get("add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if has_prefix else replace
    )
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] * has_prefix
    tokenizer.decoder = decoders.Sequence([*parts, *strip])
    return tokenizer
