"""Edits of a session whose conversation a client has changed."""

import random

import pytest
from helpers import edited_talks
from helpers.served import serving

from kvalign.app.serve.prompts import RUN, Edits
from kvalign.app.serve.service import Service
from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError
from kvalign.methods import choice

ASKED = dict(model="gpt2-mini", max_tokens=6, temperature=0)
EDITED = dict(edit=True, method="streaming-llm")
TALK = [*edited_talks.TALK, "Who was the captain ?"]


def said(client, messages, **more):
    reply = client.chat.completions.create(**ASKED, messages=messages, **more)
    usage = reply.usage
    counts = usage.prompt_tokens_details.cached_tokens, usage.kvalign["edited_tokens"]
    return reply.choices[0].message.content, usage.prompt_tokens, *counts


def talk(client, texts=TALK, **more):
    messages = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": said(client, messages, **more)[0]})
    return messages


def test_a_changed_message_is_edited_and_the_rest_is_kept(loaded):
    with serving(loaded, **EDITED, cache_size=250) as server, server.client() as client:
        messages = talk(client)
        # The second turn is left out.
        shorter = [*messages[:2], *messages[4:], {"role": "user", "content": "And then ?"}]
        _, num, num_cached, num_edited = said(client, shorter)
        # Answers are of other tokens when a client sends them as text, up to the next run.
        assert num_edited < 30 and num / 2 < num_cached < num - num_edited
        # A word of the first one is another.
        other = [{"role": "user", "content": TALK[0].replace("town", "village")}, *messages[1:-1]]
        answer, num, num_cached, num_edited = said(client, other)
        assert 0 < num_edited < 50 and num / 2 < num_cached < num - num_edited
        # It goes on as any other conversation.
        more = [*other, {"role": "assistant", "content": answer}]
        _, num, num_cached, num_edited = said(client, [*more, {"role": "user", "content": "Why ?"}])
        assert num_edited == 0 and num / 2 < num_cached < num
        assert said(client, [{"role": "user", "content": "Another talk ?"}])[2:] == (0, 0)


@pytest.mark.parametrize("how", [dict(cache_size=250), EDITED | dict(cache_size=60)], ids=str)
def test_without_edits_and_what_was_evicted_is_not_edited(how, loaded):
    with serving(loaded, **how) as server, server.client() as client:
        messages = talk(client)
        shorter = [*messages[:2], *messages[4:], {"role": "user", "content": "And then ?"}]
        assert said(client, shorter)[2:] == (0, 0)


@pytest.mark.parametrize("edit", [True, False])
def test_auto_is_told_of_edits(edit, loaded, monkeypatch):
    asked = []
    chosen = choice.Choice("streaming-llm")
    monkeypatch.setattr(choice, "choose", lambda *_, **how: asked.append(how) or chosen)
    Service(ServeSettings(model="gpt2-mini", edit=edit), loaded)
    assert asked[0]["cached"] is edit


def test_edit_needs_a_method_that_can_be_edited(loaded):
    settings = ServeSettings(model="gpt2-mini", method="discard-half", edit=True)
    with pytest.raises(UserError, match="discard-half cannot be edited"):
        Service(settings, loaded)
    with pytest.raises(UserError, match="--evict turns"):
        ServeSettings(edit=True, evict="turns")


def applied(held, edits):
    held = list(held)
    for start, stop, new in reversed(edits.changes):
        held[start:stop] = new
    return held


def part(name, num=40):
    rng = random.Random(name)
    return [rng.randrange(1000) for _ in range(num)]


@pytest.mark.parametrize(
    ("held", "asked", "num_kept"),
    [
        ("abc", "abcd", 120),
        ("abc", "acd", 80),
        ("abc", "abxc", 119),
        ("abcd", "axcyd", 119),
        ("abc", "xyz", 0),
        ("abcb", "abz", 80),
    ],
)
def test_what_both_have_in_a_row_is_kept(held, asked, num_kept):
    one, other = ([x for name in names for x in part(name)] for names in (held, asked))
    again = Edits.between(one, other, exactly=4)  # behind each change, unless nothing is
    behind = sum(stop < len(one) for _, stop, _ in again.changes)
    assert again.num_kept == num_kept - 4 * behind
    assert applied(one, again) == other[: again.num_held]
    edits = Edits.between(one, other)
    assert edits.num_kept == num_kept
    assert applied(one, edits) == other[: edits.num_held] and edits.num_held < len(other)
    assert edits.num_held == edits.num_kept + edits.num_new


def test_any_two_texts():
    rng = random.Random(0)
    for _ in range(200):
        held = [rng.randrange(3) for _ in range(rng.randrange(90))]
        asked = [rng.randrange(3) for _ in range(rng.randrange(1, 90))]
        if rng.random() < 0.7:  # they share something
            at = rng.randrange(len(asked))
            asked[at:at] = held[rng.randrange(len(held) + 1) :]
        edits = Edits.between(held, asked, rng.choice([0, 4, RUN]))
        assert applied(held, edits) == asked[: edits.num_held] and edits.num_held < len(asked)


def test_a_session_is_edited_in_place_and_goes_on(loaded, tmp_path):
    """The same answers as of an unnamed conversation; its last answer alone may be another."""
    how = EDITED | dict(cache_size=250, sessions=tmp_path)
    named = dict(extra_body={"session": "a"})
    with serving(loaded, **how) as server, server.client() as client:
        messages = talk(client, **named)
        shorter = [*messages[:2], *messages[4:], {"role": "user", "content": "And then ?"}]
        talk(client)
        unnamed = said(client, shorter)
        assert said(client, shorter, **named) == unnamed and unnamed[3] < 30
        again, _, num_cached, num_edited = said(client, shorter, seed=1, **named)
        assert again == unnamed[0] and num_edited == 0
        assert num_cached > len(server.service.sessions.known("a").ids) - 20
        shorter.append({"role": "assistant", "content": again})
    with serving(loaded, **how) as server, server.client() as client:
        _, num, num_cached, _ = said(client, [*shorter, messages[0]], **named)
        assert num / 2 < num_cached < num
