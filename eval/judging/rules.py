"""The rules by which chunks of a passage are judged; nothing heavy is imported to list them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What counts beside words.

    Attributes:
        name: what `--rule` takes.
        about: the rule in words, for the page.
        marks: tokens that count as known.
        judges_rest: whether the tokens after the last whole chunk are judged, as a shorter one.
    """

    name: str
    about: str
    marks: frozenset[str]
    judges_rest: bool

    @property
    def described(self) -> dict[str, Any]:
        """The rule as a document records it."""
        return {"name": self.name, "about": self.about}


_CHUNK = (
    "A chunk is 10 tokens, as NLTK 3.9 cuts them; it is readable if at least half of them are in "
    "the word list, lower-cased or by their Snowball stems, or are among"
)
_RULES = [
    Rule(
        "paper",
        f"{_CHUNK} “. ! ?” (the paper's text). Fewer than 10 at the end are a chunk, too.",
        frozenset(".!?"),
        True,
    ),
    Rule(
        "authors",
        f"{_CHUNK} “. , ! ?” (what the paper's authors ran). Fewer than 10 at the end are left "
        "out.",
        frozenset(".,!?"),
        False,
    ),
]
RULES = {rule.name: rule for rule in _RULES}
