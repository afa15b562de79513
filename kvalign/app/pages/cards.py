"""What streaming methods write, as cards: text in coloured chunks, and how the stream stands."""

from collections.abc import Sequence

from kvalign.app.pages import render
from kvalign.app.pages.side_by_side import View


def cards(prompt: str, views: Sequence[View]) -> str:
    """The cards of all streams in HTML."""
    return render("cards.html", prompt=prompt, views=views)


def message(line: str) -> str:
    """One line in place of the cards, in HTML."""
    return render("message.html", line=line)
