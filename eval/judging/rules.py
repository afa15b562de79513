"""Rules for the chunks of a passage; listing them imports nothing heavy."""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Rule for tokens that count besides words."""

    name: str
    about: str
    marks: frozenset[str]  # tokens that count as known
    judges_rest: bool  # are the tokens after the last whole chunk judged, as a shorter one?

    @property
    def described(self) -> dict[str, Any]:
        """Form of the rule in a document."""
        return {"name": self.name, "about": self.about}


def readers_text(text: str) -> str:
    """The text that is judged. Models of WikiText write `<unk>` for a rare word, and `@-@` within
    one; NLTK would cut these into non-words. The models of the paper write neither.
    """
    return re.sub(r" @([-.,])@ ", r"\1", re.sub(r" ?<unk>", "", text))


_CHUNK = (
    "The marks <unk> and @-@ of WikiText are taken out. A chunk is 10 tokens of NLTK 3.9. It is "
    "readable if at least half of them are in the word list, lower-cased or by their Snowball "
    "stems, or are among"
)
_PAPER = f"{_CHUNK} “. ! ?” (the paper's text). Fewer than 10 at the end are a chunk, too."
_AUTHORS = (
    f"{_CHUNK} “. , ! ?” (the code of the paper's authors). Fewer than 10 at the end are left out."
)
RULES = {
    "paper": Rule("paper", _PAPER, frozenset(".!?"), judges_rest=True),
    "authors": Rule("authors", _AUTHORS, frozenset(".,!?"), judges_rest=False),
}
