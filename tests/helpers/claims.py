"""The ledger of claims: what the figures in sentences of README and the pages are made of.

eval/results/claims.yaml has the claims of each page. One is words of a sentence with `{:.2f}` in
place of each figure (`{:.0p}` for one in percent), and what gives the figures, in order: fields of
documents' rows, and arithmetic.

    says: the perplexity is {:.2f}, {:.0p} % less than at C = 32
    from: of("gpt2-mini/no-sinks", "perplexity", method="window", C=255), 1 - of(...) / of(...)

Or it is words as they stand, and `by` what measured them: a command, a commit or a link that
stands on the page, too; or `is`, what they are if nobody measured them. Or words and a condition
that `holds` for them.
"""

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from string import Formatter
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from helpers.result_parts import RESULTS, ROOT
from helpers.result_tables import PAGES, rows_of
from kvalign.eval.protocol.data import Document
from kvalign.eval.report import archive_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import checked

LEDGER = RESULTS / "claims.yaml"
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
# Not prose: code, what is made by `make tables`, other tables, headings, tags, targets of links.
_NO_PROSE = re.compile(
    r"^ *```.*?^ *```$|^<!-- (?:table|commands|texts|index|source|list): .*?^<!-- end -->"
    r"|^\|[^\n]*$|^#+ [^\n]*$|^\[[\w-]+\]: [^\n]*$|<[^>]*>|!\[[^\]]*\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(r"\[([^\]]*)\](?:\([^)\s]*\)|\[\w+\])")
_NUMBER = r"\d+(?: \d{3})*(?:\.\d+)?"
_UNIT = r"(?:ms|µs|s|seconds?|minutes?|hours?|points?|nats|[kMG]i?B|times)\b|%"
_SEVERAL = rf"(?:{_NUMBER}(?:, and|,| and| to| or|\u2013) ?)*{_NUMBER}"
# Several with a unit, a count of a count, a decimal.
FIGURE = re.compile(
    rf"(?<![\w.-])(?:{_SEVERAL} ?(?:{_UNIT})|{_NUMBER} of (?:all )?{_NUMBER}"
    r"|\d+(?: \d{3})*\.\d+(?!\w|\.\d))"
)
_SIZE = r"\d+(?: \d{3})?(?!\d|\.\d)"
_MORE = rf"(?:(?:, and|,| and| to| or) {_SIZE}(?! ?(?:%|times|ms)))*"
_NAME = r"Python|[Pp]y[Tt]orch|torch|transformers|before|below|needs|NLTK|Llama"
_VERSION = r"\d+(?:\.\d+)+"
# Words with numbers that are no measurements.
EXEMPT = {
    "code": r"`[^`]*`",
    "a version": rf"(?:[Vv]ersion|{_NAME}) {_VERSION}(?: and {_VERSION})*",
    "the level of an interval": r"95 %",
    "sizes of caches": rf"C = {_SIZE}{_MORE}|at {_SIZE}(?=, | and )",
    "a multiple of C": r"(?:\d+ (?:to|and) )?\d+(?:\.\d+)? C\b",
    "a number of arXiv": r"\d{4}\.\d{5}",
    "a part of a text": r"(?:section|table|figure)s? \d+(?:\.\d+)?",
}


class Claim(BaseModel):
    model_config = ConfigDict(extra="forbid")

    says: str
    values: str = Field(default="", alias="from")
    by: str = ""
    is_: str = Field(default="", alias="is")
    holds: str = ""


@lru_cache(maxsize=1)
def ledger() -> dict[str, list[Claim]]:
    """The claims of each page.

    Raises:
        UserError: a claim of another form.
    """
    given = yaml.safe_load(LEDGER.read_text(encoding="utf-8"))
    return {
        page: [checked(Claim, claim, f"{LEDGER.name}, {page}") for claim in claims]
        for page, claims in given.items()
    }


@cache
def _documents(part: str) -> dict[str, Document]:
    return archive_of(RESULTS / part)


def of(documents: str | tuple[str, ...], fields: str | tuple[str, ...], **only: Any) -> np.ndarray:
    """Fields of those rows of PART/CELL whose other fields are as given, or one of a tuple: by
    document, field and row.

    `C` is the cache size and `sinks` their number; `a.0.b` is in a list of a row, `a.*.b` in each.
    """
    names = {"C": "cache_size", "sinks": "num_sinks"}
    wanted = {names.get(k, k): v if isinstance(v, tuple) else (v,) for k, v in only.items()}
    values = list[float]()
    for name in (documents,) if isinstance(documents, str) else documents:
        part, _, cell = name.partition("/")
        found = _documents(part).get(cell, {"rows": []})
        rows = [row for row in rows_of(found) if all(row[k] in v for k, v in wanted.items())]
        if not rows:
            raise UserError(f"no document {name}, or no row of it with {only}")
        for field in (fields,) if isinstance(fields, str) else fields:
            values += [value for row in rows for value in _values(found | row, field.split("."))]
    return np.array(values)


def _values(of_row: Any, path: list[str]) -> Iterator[float]:
    if not path:
        yield float(of_row)
    elif isinstance(of_row, list):
        for value in of_row if path[0] == "*" else [of_row[int(path[0])]]:
            yield from _values(value, path[1:])
    else:
        yield from _values(of_row[path[0]], path[1:])


def ends(values: np.ndarray) -> np.ndarray:
    """The least and the largest."""
    return np.array([values.min(), values.max()])


def computed(expression: str) -> list[Any]:
    """The values of expressions, one after the other; an array has several."""
    value = eval(expression, {"of": of, "ends": ends, "np": np})
    several = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(one) for one in several]).tolist()


def prose(text: str) -> str:
    """The sentences of a page on one line, links by their words."""
    text = _LINK.sub(r"\1", _NO_PROSE.sub("\n", text)).replace("**", "")
    return re.sub(r"\s+", " ", text)


def rendered(claim: Claim) -> tuple[str, list[tuple[int, int]]]:
    """The words of a claim as its documents have them, and where in them its figures stand."""
    if not claim.values:
        return claim.says, [(0, len(claim.says))] * bool(claim.by or claim.is_)
    text, places, values = "", list[tuple[int, int]](), computed(claim.values)
    if len(values) != (holes := claim.says.count("{")):
        raise UserError(f"{len(values)} figures for {holes} places: {claim.says}")
    for words, field, spec, _ in Formatter().parse(claim.says):
        text += words
        if field is not None:
            value, spec = values.pop(0), spec or ""
            if spec.endswith("p"):
                value, spec = 100 * value, spec[:-1] + "f"
            figure = format(value, spec).replace(",", " ")
            places.append((len(text), len(text) + len(figure)))
            text += figure
    return text, places


def faults(text: str, claims: list[Claim]) -> list[str]:
    """Claims of a page that are not true or not there, and figures without one."""
    said, wrong, covered = prose(text), [], list[tuple[int, int]]()
    for claim in claims:
        words, places = rendered(claim)
        if claim.by and claim.by not in re.sub(r"\s+", " ", text.replace("\\\n", "")):
            wrong.append(f"it does not name what measured: {claim.by}")
        if claim.holds and not all(computed(claim.holds)):
            wrong.append(f"no longer so: {claim.says}")
        if (times := said.count(words)) == 1:
            at = said.index(words)
            covered += [(at + start, at + stop) for start, stop in places]
        else:
            wrong.append(f"it does not say once, but {times} times: {words}")
    for pattern in EXEMPT.values():
        said = re.sub(pattern, lambda found: "_" * len(found[0]), said)
    for figure in FIGURE.finditer(said):
        for number in re.finditer(_NUMBER, figure[0]):
            at = figure.start() + number.start()
            if not any(start <= at < stop for start, stop in covered):
                around = said[max(0, figure.start() - 40) : figure.end() + 20]
                wrong.append(f"no claim for {number[0]} in: ...{around}...")
    return wrong


def page_faults(page: str) -> list[str]:
    """Those of a page, by its path from the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [f"{page}: {one}" for one in faults(text, ledger().get(page, []))]
