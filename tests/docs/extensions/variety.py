"""How many different tokens a method writes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvalign.eval.evaluation import (
    Column,
    Document,
    Documents,
    Evaluation,
    ModelNamed,
    ReadDocument,
    Section,
    SizedRow,
    columns_of,
)
from kvalign.eval.settings import ComparisonSettings
from kvalign.settings import keywords_of, option

if TYPE_CHECKING:
    from kvalign.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class VarietySettings(ComparisonSettings):
    """Let methods write, and count how many of the tokens are different.

    Example:
        kvalign eval variety --cache-sizes 32 --num-tokens 20
    """

    num_tokens: int = option(100, help="tokens to write", at_least=1)


class VarietyRow(SizedRow):
    variety: Annotated[float, Column("variety", 3, "higher", "different tokens by all tokens")]


@keywords_of(VarietySettings)
def variety(settings: VarietySettings, *, loaded: LoadedModel | None = None) -> Document:
    """Measure it."""
    from kvalign.eval.document import document
    from kvalign.eval.grid import load, make_grid, sizes_of
    from kvalign.text_stream import Sampling, TextStream

    started = time.perf_counter()
    settings, loaded = load(settings, loaded)
    rows = []
    for method in make_grid(settings, loaded.model):
        stream = TextStream(loaded.tokenizer, method, Sampling(max_new_tokens=settings.num_tokens))
        stream.feed("The history of the island")
        "".join(stream)
        share = len(set(stream.token_ids)) / len(stream.token_ids)
        rows.append(sizes_of(method) | {"variety": share})
    return document("eval variety", settings, rows, started=started)


class Variety(Evaluation):
    settings = VarietySettings
    columns = columns_of(VarietyRow)
    document = ReadDocument[VarietyRow, ModelNamed]
    in_summary = ("variety",)

    def run(self, settings: VarietySettings) -> Document:
        return variety(settings)

    def sections(self, documents: Documents) -> list[Section]:
        tables = [table for document in documents.values() for table in self.tables(document)]
        about = "Different tokens among those that a method wrote."
        return [Section("Variety", about, list(documents), tables=tables)]


EVALUATION = Variety()
