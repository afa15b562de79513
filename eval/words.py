"""English word lists: the `words` corpus of NLTK, or a packaged list where that is out of reach.

Both are Webster's Second International (1934), capitals and all: no plurals, few inflected forms.
"""

import contextlib
import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.errors import NotFoundError, UserError

log = logging.getLogger(__name__)

WORD_LISTS = ("auto", "nltk", "english-words")
_PLACE = "corpora/words.zip/words/"  # below a folder of NLTK's path


@dataclass(frozen=True)
class WordList:
    name: str
    words: frozenset[str]

    @property
    def about(self) -> dict[str, Any]:
        return {"name": self.name, "num_words": len(self.words)}


def load_words(name: str = "auto", nltk_data: Path | None = None) -> WordList:
    """Load a word list.

    Args:
        name: `nltk` (fetched by NLTK into the user's own folder on first use), `english-words`
            (needs no network), or `auto`: the first that is at hand, said in a warning where it is
            not NLTK's.
        nltk_data: folder that has `corpora/words.zip`.

    Raises:
        UserError: unknown list.
        NotFoundError: NLTK's list was asked for and is neither here nor to be fetched.
    """
    if name not in WORD_LISTS:
        raise UserError(f"unknown word list {name!r} (known: {', '.join(WORD_LISTS)})")
    if name != "english-words":
        words = _nltk_words(nltk_data)
        if words:
            return WordList("nltk words", words)
        place = f"in {nltk_data}" if nltk_data else "here, and it could not be fetched"
        missing = f"the words corpus of NLTK is not {place}"
        if name == "nltk" or nltk_data:
            raise NotFoundError(f"{missing}: --nltk-data DIR needs DIR/corpora/words.zip")
        log.warning("%s: words are looked up in english-words instead", missing)
    from english_words import get_english_words_set

    return WordList("english-words web2", frozenset(get_english_words_set(["web2"])))


def at_hand() -> dict[str, str | None]:
    """Of each list the place it would be read from, None where it is not here; fetches nothing."""
    import importlib.util

    place = None
    if importlib.util.find_spec("nltk"):
        import nltk

        with contextlib.suppress(LookupError):
            place = str(nltk.data.find(_PLACE))
    packaged = importlib.util.find_spec("english_words")
    return {"nltk": place, "english-words": packaged.origin if packaged else None}


def _nltk_words(nltk_data: Path | None) -> frozenset[str]:
    """The corpus, fetched if need be; empty where that fails. A folder that was named is the only
    one looked in.
    """
    import nltk
    from nltk.corpus.reader import WordListCorpusReader

    before = list(nltk.data.path)
    try:
        if nltk_data:  # NLTK reads only below its own path, whatever it is told to look in
            nltk.data.path[:] = [str(nltk_data.expanduser().resolve())]
        try:
            root = nltk.data.find(_PLACE)
        except LookupError:
            if nltk_data or not nltk.download("words", quiet=True, print_error_to=io.StringIO()):
                return frozenset()
            root = nltk.data.find(_PLACE)
        return frozenset(WordListCorpusReader(root, ["en"]).words())
    finally:
        nltk.data.path[:] = before
