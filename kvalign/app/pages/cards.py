"""What streaming methods write, as cards: text in coloured chunks, and how the stream stands."""

from collections.abc import Sequence
from html import escape

from kvalign.app.pages.side_by_side import View
from kvalign.escape import escape_controls

LEGEND = (
    '<p class="legend"><span><span class="readable">readable</span> at least half of a chunk of '
    '10 words are in a dictionary</span><span><span class="unreadable">unreadable</span> fewer are'
    "</span><span>plain: not judged yet</span></p>"
)


def cards(prompt: str, views: Sequence[View]) -> str:
    """The cards of all streams in HTML; prompt and text are escaped."""
    return LEGEND + f'<div class="cards">{"".join(_card(prompt, view) for view in views)}</div>'


def message(line: str) -> str:
    """One line in place of the cards; escaped."""
    return f'<p class="message" role="alert">{_text(line)}</p>'


def _card(prompt: str, view: View) -> str:
    title = _text(view.title)
    return (
        f'<section class="card{" done" if view.is_done else ""}" aria-label="{title}">'
        f'<h2>{title}</h2><p class="note">{_text(view.about)}</p>{_figures(view)}{_fill(view)}'
        f'<div class="passage" tabindex="0" role="region" aria-label="Text by {title}">'
        f'<p><bdi class="prompt">{_text(prompt)}</bdi>{_pieces(view)}</p></div></section>'
    )


def _figures(view: View) -> str:
    dash = "\N{EN DASH}"
    evictions = f"{view.num_evictions}"
    if view.num_evicted > 1:
        evictions += f" <small>of {view.num_evicted}</small>"
    figures = {
        "tokens": f"{view.num_tokens}",
        "tokens/s": f"{view.tokens_per_s:.0f}" if view.tokens_per_s else dash,
        "readable": dash if view.readable is None else f"{view.readable:.0%}",
        "evictions": evictions,
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in figures.items())
    return f'<dl class="figures">{rows}</dl>'


def _fill(view: View) -> str:
    share = 100 * view.fill / view.cache_size
    return (
        f'<div class="fill"><span>cache {view.fill} / {view.cache_size}</span>'
        '<div class="bar" role="meter" aria-label="Entries in the cache" aria-valuemin="0" '
        f'aria-valuemax="{view.cache_size}" aria-valuenow="{view.fill}">'
        f'<div style="width: {share:.1f}%"></div></div></div>'
    )


def _pieces(view: View) -> str:
    """The text with its finished chunks coloured, and the rest."""
    text, end, parts = view.text, 0, []
    for chunk in view.chunks:
        kind = "readable" if chunk.is_readable else "unreadable"
        parts.append(_text(text[end : chunk.start]))
        parts.append(f'<bdi class="{kind}">{_text(text[chunk.start : chunk.end])}</bdi>')
        end = chunk.end
    return f'{"".join(parts)}<bdi class="tail">{_text(text[end:])}</bdi>'


def _text(text: str) -> str:
    """Every character is seen and none acts."""
    return escape(escape_controls(text))
