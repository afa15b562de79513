"""Requests that `kvalign serve` takes for the same: by the fields that change an answer, and by
messages as people read them.
"""

import unicodedata

import openai
import pytest
from helpers.served import serving

SERVED = dict(cache_size=48, max_sessions=100)
DRAWN = dict(temperature=1, seed=1, max_tokens=8)
GREEDY = dict(temperature=0)
OTHERS = [dict(seed=2), dict(stop=["e"])]


def says(*texts):
    """Messages, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def ask(server, messages, session=None, **fields):
    """The answer, and how many tokens of the prompt were cached."""
    more = {"extra_body": {"session": session}} if session else {}
    with server.client() as client:
        how = dict(model="gpt2-mini", messages=messages, **more, **DRAWN | fields)
        reply = client.chat.completions.create(**how)
    return reply.choices[0].message.content, reply.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("other", OTHERS, ids=["seed", "stop"])
def test_other_fields_ask_for_another_answer_in_place_of_the_last(server, other):
    name = f"one-{next(iter(other))}"
    first, _ = ask(server, says("Who?"), name)
    assert ask(server, says("Who?"), name)[0] == first
    whole = says("Who?", first, "Why?")
    once, _ = ask(server, whole, name)
    assert ask(server, whole, name, user="me")[0] == once
    alone, _ = ask(server, whole, f"{name}-alone", **other)
    again = ask(server, whole, name, **other)
    assert again == (alone, 0) and alone != once
    assert ask(server, whole, name, **other)[0] == alone, "the same fields, the same answer"
    then = says("Who?", first, "Why?", alone, "When?")
    assert ask(server, then, name)[1] > 0, "the session goes on from that answer"
    with pytest.raises(openai.BadRequestError, match="do not continue the session"):
        ask(server, says("Who?", first, "Why?", once, "When?"), name)


def test_a_first_turn_is_asked_again_with_other_fields(server):
    ask(server, says("Who?"), "first")
    again = ask(server, says("Who?"), "first", seed=2)
    assert again == ask(server, says("Who?"), "first-alone", seed=2)


@pytest.mark.slow
def test_a_server_that_starts_again_knows_what_was_asked(loaded, tmp_path):
    how = dict(cache_size=48, sessions=tmp_path)
    with serving(loaded, **how) as server:
        once, _ = ask(server, says("Who?"), "s")
    with serving(loaded, **how) as server:
        assert ask(server, says("Who?"), "s")[0] == once
        other, _ = ask(server, says("Who?"), "s", seed=2)
        assert other == ask(server, says("Who?"), "alone", seed=2)[0] != once
    with serving(loaded, **how) as server:
        assert ask(server, says("Who?"), "s", seed=2)[0] == other


# What clients, editors, forms and other systems make of a text.
MADE_OF = (
    str.strip,
    lambda text: f"{text}\n",
    lambda text: text.strip().replace("\n", "\r\n"),
    lambda text: unicodedata.normalize("NFD", f"{text} "),
)


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [False, True])
def test_messages_are_compared_as_people_read_them(is_named, server):
    """The session goes on: nothing that it holds is fed again."""
    for number, made in enumerate(MADE_OF):
        asked, name = f"Who is\nJosé {number}{is_named}?", f"made{number}" if is_named else None
        answer, _ = ask(server, says(asked), name, **GREEDY)
        *_, held = server.service.sessions._by_id.values()
        assert answer[0].isspace()
        messages = says(made(asked), made(answer), "Why?")
        assert messages != says(asked, answer, "Why?")
        assert ask(server, messages, name)[1] == held.num_fed > 0
