"""WikiText's marks are undone where text is shown, and every other text stays as it is."""

import pytest

from kvalign.app.pages.side_by_side import pieces

WIKITEXT = (
    " = Robert <unk> = \n \n = = Early life = = \n Robert 's two @-@ part 1 @,@ 000 @.@ 5 "
    "( in Rome ) . He did n't go ; it was = not = so . \n"
)
EXPECTED = """\
Robert […]

Early life
Robert's two-part 1,000.5 (in Rome). He didn't go; it was = not = so.
"""


def test_marks_are_undone():
    assert "".join(piece.text for piece in pieces(WIKITEXT, [])) == EXPECTED


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
