"""Finished texts, judged like passages of methods; torch is not needed."""

import time
from pathlib import Path
from typing import Any

from kvalign.eval.evaluations.readability import ReadabilitySettings
from kvalign.eval.judging.chunks import judged
from kvalign.eval.judging.rules import RULES
from kvalign.eval.judging.words import load_words
from kvalign.eval.protocol.document import document
from kvalign.eval.protocol.evaluation import SIZES, Document
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_text


def of_texts(settings: ReadabilitySettings) -> Document:
    """Document in the form of `eval readability`, with a row for each text.

    Raises:
        UserError: a file that is not UTF-8 or has no text.
    """
    started = time.perf_counter()
    words, rule = load_words(), RULES[settings.rule]
    rows = []
    for name in settings.text or ():
        if not (text := read_text(Path(name))).strip():
            raise UserError(f"{name} has no text to judge")
        of_none = dict.fromkeys((*SIZES, "no_repeat_ngram_size"))
        rows.append(of_none | {"method": name, "prompt": 0} | judged(text, words.words, rule))
    more: dict[str, Any] = {"prompts": [""], "rule": rule.described, "word_list": words.about}
    return document("eval readability", settings, rows, started=started, **more)
