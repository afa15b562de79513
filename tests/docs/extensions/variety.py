"""How many different tokens a method writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalign.eval.protocol import ComparisonSettings, Evaluation
from kvalign.eval.protocol.data import Column, Row
from kvalign.eval.protocol.document import measures
from kvalign.foundation.settings import option

if TYPE_CHECKING:
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class VarietySettings(ComparisonSettings):
    """Let methods write, and count how many of the tokens are different.

    Example:
        kvalign eval variety --cache-sizes 32 --num-tokens 20
    """

    num_tokens: int = option(100, help="tokens to write", at_least=1)


@measures(VarietySettings)
def variety(settings: VarietySettings, loaded: LoadedModel, methods: list[Method]) -> Iterable[Row]:
    """Measure it: a document with a row for each method and its sizes."""
    from kvalign.eval.protocol.grid import sizes_of
    from kvalign.streaming.sampling import Sampling
    from kvalign.streaming.text_stream import TextStream

    for method in methods:
        sampling = Sampling(max_new_tokens=settings.num_tokens, seed=0)
        stream = TextStream(loaded.tokenizer, method, sampling)
        stream.feed("The history of the island")
        "".join(stream)
        share = len(set(stream.token_ids)) / len(stream.token_ids)
        yield sizes_of(method) | {"variety": share}


COLUMNS = {"variety": Column("variety", 3, "higher", "different tokens by all tokens")}


class Variety(Evaluation):
    settings = VarietySettings
    run = staticmethod(variety)
    heading = "Variety"
    about = "Different tokens among those that a method wrote."
    columns = COLUMNS


EVALUATION = Variety()
