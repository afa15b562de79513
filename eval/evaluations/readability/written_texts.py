"""Texts that are written already, judged as passages of methods are; torch is not needed."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.eval.judging.chunks import judged
from kvalign.eval.judging.rules import RULES
from kvalign.eval.judging.words import load_words
from kvalign.eval.protocol.document import document
from kvalign.eval.protocol.evaluation import SIZES, Document
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_text
from kvalign.foundation.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """Those of `eval readability` that count for texts."""

    text: tuple[str, ...] = option(help="text files")
    rule: str = option("paper", help="what is readable", choices=tuple(RULES))

    def as_dict(self) -> dict[str, Any]:
        return {"model": None, **super().as_dict()}


def of_texts(settings: TextSettings) -> Document:
    """A document as `eval readability` has it, with a row for each text.

    Raises:
        UserError: a file that is not UTF-8 or holds no text.
    """
    started = time.perf_counter()
    words, rule = load_words(), RULES[settings.rule]
    of_none = dict.fromkeys((*SIZES, "no_repeat_ngram_size"))
    rows = [
        {**of_none, "method": name, "prompt": 0} | judged(_read(Path(name)), words.words, rule)
        for name in settings.text
    ]
    more: dict[str, Any] = {"prompts": [""], "rule": rule.described, "word_list": words.about}
    return document("eval readability", settings, rows, started=started, **more)


def _read(path: Path) -> str:
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} has no text to judge")
    return text
