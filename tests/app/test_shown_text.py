"""WikiText's marks are undone where text is shown, and every other text stays as it is."""

import pytest

from kvalign.app.pages.shown_text import pieces
from kvalign.eval.judging.chunks import Chunk, chunks
from kvalign.eval.judging.rules import RULES
from kvalign.eval.judging.words import load_words

WIKITEXT = (
    " = Robert <unk> = \n \n = = Early life = = \n Robert 's two @-@ part 1 @,@ 000 @.@ 5 "
    "( in Rome ) . He did n't go ; it was = not = so . \n"
)
EXPECTED = """\
Robert […]

Early life
Robert's two-part 1,000.5 (in Rome). He didn't go; it was = not = so.
"""


def test_marks_are_undone_and_headings_are_headings():
    shown = list(pieces(WIKITEXT, []))
    assert "".join(piece.text for piece in shown) == EXPECTED
    assert [piece.text for piece in shown if piece.is_heading] == ["Robert […]", "Early life"]


@pytest.mark.parametrize(
    "text",
    [
        "Bonjour ! def f( x ):\n    y = 3 == 4  # no marks\n",
        "= half a heading\nx = 3 = y\n@ - @ <unknown>",
        "",
    ],
)
def test_other_text_stays_as_it_is(text):
    assert "".join(piece.text for piece in pieces(text, [])) == text


def test_chunks_cut_it_and_change_nothing():
    found = chunks(WIKITEXT, load_words().words, RULES["paper"])
    shown = list(pieces(WIKITEXT, found))
    assert "".join(piece.text for piece in shown) == EXPECTED
    assert sum(piece.kind in ("readable", "unreadable") for piece in shown) >= len(found) > 3


def test_a_mark_on_a_cut_is_shown_once():
    text = "a two @-@ part , word"
    at = text.index("@-@") + 1
    for end in range(at - 2, at + 5):
        shown = pieces(text, [Chunk(0, end, 10, 9), Chunk(end, len(text), 10, 0)])
        assert "".join(piece.text for piece in shown) == "a two-part, word"
