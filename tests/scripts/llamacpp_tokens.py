# ruff: noqa: RUF001  (the texts have any characters)
"""Tokens that llama.cpp gives hostile texts, by tokenizers of each kind and setting that a GGUF
file may have: what `tests/models/test_gguf_tokenizer.py` holds ours to.

pip install xllamacpp==2026.10.11549 && PYTHONPATH=tests python tests/scripts/llamacpp_tokens.py
"""

import json
import re
import tempfile
import urllib.request
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from helpers.tiny_gguf import write_gguf
from helpers.tiny_models import tiny_model
from transformers.convert_slow_tokenizer import bytes_to_unicode

FILE = Path(__file__).with_suffix(".json")
TEXTS = (
    *("", " ", "  ", "   \n", "\n", "\n\n\n", "\t", " \t x", "a", " a", "  a", "a "),
    *("a  b   c    d", "The king's ships aren't WE'LL they'd I'M 'tis", "don''t 'S it'ſ x's'd"),
    *("Hello, World! camelCase", "0", "12", "1234567890", "3.14159 x1y22z333 1,000,000"),
    *("１２３ ٣٤ ½ Ⅷ x²", "line\r\nline\r\n\r\n  end", " \n \n x", "tab\t\ttab"),
    *("a\u00a0b\u2003c\u3000d", "x\u0085y\u2028z", "e\u0301te\u0301 n\u0303"),
    *("É ÀB ßa Ωmega ǅ ДОМ дом", "日本語のテキスト、漢字。", "한국어 텍스트"),
    *("ไทย हिन्दी العربية", "😀😀 👩\u200d👩\u200d👧 🇩🇪", "⚙\ufe0f\u200d", "\u200b\ufeffx"),
    *("a\u0000b", "©®™ € $5 +=<>^~|`", "#!/bin/sh && x -> y; // z", '{"a": [1, 2]}\n'),
    *("snake_case __init__(self)", "----====....____", "((()))!!!???", "<|im_end|>"),
    *("a<|im_end|>b", " <|im_start|> user\n", "<|im_end|><|im_start|>", "<|im_end"),
    *("< |im_end|>", "<s>x</s>", "<s> x </s> y", "<unk>", "<tool_call>{}</tool_call>"),
    *("x<tool_call> y", "<｜User｜>x", "<0x0A>", "▁▁x ▁", "[PAD300]", "    for x in y:"),
    "The history of the island begins with the ships of the king, the 12 ships of the 1st king",
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜User｜>")
SHOWN = ("<tool_call>", "</tool_call>")
SPECIAL = ("<unk>", "<s>", "</s>")
IN_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL, UNKNOWN, CONTROL_TYPE, SHOWN_TYPE, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LONGEST = 12  # characters of a token
SPLITS = (
    *(
        "default",
        "gpt-2",
        "smollm",
        "llama-bpe",
        "dbrx",
        "qwen2",
        "qwen35",
        "falcon",
        "deepseek-v3",
    ),
    *("tekken", "gpt-4o", "bloom", "viking", "chatglm-bpe"),
)


@cache
def merges_of(space: str) -> tuple[tuple[str, str], ...]:
    """Merges of the most frequent neighbours in the texts: of bytes, or of characters with this one
    in place of a space.
    """
    spelled, names = (
        bytes_to_unicode(),
        "|".join(map(re.escape, (*CONTROL, *SHOWN, *SPECIAL, *IN_BYTES))),
    )
    whole = [
        [*text.replace(" ", space)] if space else [spelled[byte] for byte in text.encode()]
        for text in re.split("|".join(map(re.escape, names)), "\n".join(TEXTS))
    ]
    merges = list[tuple[str, str]]()
    while True:
        pairs = Counter(pair for text in whole for pair in pairwise(text))
        short = [pair for pair in pairs if len("".join(pair)) <= LONGEST and "\0" not in pair]
        if not short:
            return tuple(merges)
        best = max(short, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for text in whole:
            for i in reversed(range(len(text) - 1)):
                if (text[i], *text[i + 1 : i + 2]) == best:
                    text[i : i + 2] = ["".join(best)]


def of_bytes(pre: str, **more: Any) -> dict[str, Any]:
    """Settings of byte-level BPE."""
    merges = merges_of("")
    plain = dict.fromkeys([*bytes_to_unicode().values(), *map("".join, merges)])
    tokens = [*CONTROL, *plain, *SHOWN]
    fill = [f"[PAD{len(tokens) + i}]" for i in range(3)]
    types = [CONTROL_TYPE] * len(CONTROL) + [NORMAL] * len(plain) + [SHOWN_TYPE] * len(SHOWN)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *fill],
        "token_type": types + [UNUSED] * len(fill),
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def of_scores(**more: Any) -> dict[str, Any]:
    """Settings of SentencePiece's BPE."""
    merged = [*dict.fromkeys(map("".join, merges_of("▁")))]
    single = [*dict.fromkeys("".join(merged))]
    tokens = [*SPECIAL, *IN_BYTES, *merged, *single, *CONTROL, *SHOWN, "    "]
    types = [UNKNOWN, CONTROL_TYPE, CONTROL_TYPE, *[BYTE] * 256]
    types += [NORMAL] * (len(merged) + len(single)) + [CONTROL_TYPE] * len(CONTROL)
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(single))]
    num = len(tokens) - len(types)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types + [SHOWN_TYPE] * num,
        "scores": scores + [-1000.0] * (num + len(CONTROL)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }


CASES = {
    **{pre: of_bytes(pre) for pre in SPLITS},
    "no pre": {x: y for x, y in of_bytes("").items() if x != "pre"},
    "begin and end": of_bytes("gpt-2", add_bos_token=True, add_eos_token=True),
    "no begin": of_bytes("llama-bpe", add_bos_token=False),
    "scores": of_scores(),
    "scores, no space": of_scores(add_space_prefix=False, add_bos_token=False),
    "scores, an end": of_scores(add_eos_token=True, remove_extra_whitespaces=True),
    "Phi-3, scores": of_scores(),
    "scores, no ids": {x: y for x, y in of_scores().items() if not x.endswith("_id")},
}


def write_case(path: Path, name: str) -> None:
    """Write the file of a case, of a tiny model."""
    settings = CASES[name]
    shape = dict(vocab_size=len(settings["tokens"]), tie_word_embeddings=True)
    write_gguf(path, tiny_model("llama", **shape), tokenizer=settings, name=name)


def tokens_of(path: Path) -> dict[str, list[list[int]]]:
    """llama.cpp's tokens of the texts, alone and as beginnings."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_gpu_layers, params.fit_params = 64, 0, False
    params.verbosity, params.port, params.warmup = 0, 0, False
    server = xllamacpp.Server(params)
    headers = {"Content-Type": "application/json"}

    def ask(text: str, begins: bool) -> list[int]:
        asked = {"content": text, "add_special": begins, "parse_special": True}
        address, body = f"{server.listening_address}/tokenize", json.dumps(asked).encode()
        with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as reply:
            return json.load(reply)["tokens"]

    return {
        name: [ask(text, begins) for text in TEXTS]
        for name, begins in (("alone", False), ("begun", True))
    }


def main() -> None:
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            path = Path(folder, "tiny.gguf")
            write_case(path, name)
            answers[name] = json.dumps(tokens_of(path), separators=(",", ":"))
            print(name, flush=True)
    lines = (f"{json.dumps(name)}: {answer}" for name, answer in answers.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
