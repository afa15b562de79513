"""Turns of a conversation that are cut or replaced: `/forget`, `/edit`, `/undo`."""

import pytest

from kvalign.app.commands.chat import obey
from kvalign.app.sessions.conversation import Conversation, ConversationSettings
from kvalign.foundation.errors import UserError

MODEL = "llama-mini"
TURNS = ("the king", "a ship of the navy", "what is it ?")


def held(loaded, turns=TURNS, **flags):
    sizes = dict(cache_size=120, max_new_tokens=12, seed=0, repetition_penalty=1.0)
    conversation = Conversation(ConversationSettings(**sizes | flags), loaded)
    for turn in turns:
        "".join(conversation.answer(turn))
    return conversation


def text_of(conversation):
    return conversation.tokenizer.decode(conversation.stream.ids)


@pytest.mark.parametrize(
    ("number", "system"), [(1, None), (1, "you are a sailor"), (2, None), (3, "you are a sailor")]
)
def test_a_turn_is_forgotten_with_its_answer(number, system, loaded):
    conversation = held(loaded, system=system)
    whole, begins = text_of(conversation), conversation.begins
    said = obey(f"/forget {number}", conversation)
    assert said.startswith(f"turn {number} is forgotten: ") and "not encoded again" in said
    text = text_of(conversation)
    assert [turn in text for turn in TURNS] == [i != number for i in (1, 2, 3)]
    assert text.startswith(whole[: whole.index(TURNS[0]) - 1])
    left = conversation.begins
    assert len(left) == 2 and left[0] == 0
    # The next turn is where the record says that it is.
    second = conversation.tokenizer.decode(conversation.stream.ids[left[1] :])
    assert (TURNS[1] if number == 3 else TURNS[2]) in second
    obey("/undo", conversation)
    assert text_of(conversation) == whole and conversation.begins == begins
    obey(f"/forget {number}", conversation)
    assert "".join(conversation.answer("and now ?"))
    with pytest.raises(UserError, match="no edit to undo"):
        obey("/undo", conversation)


def test_a_turn_is_edited_and_its_answer_stays(loaded):
    conversation = held(loaded)
    whole = text_of(conversation)
    assert obey("/edit 2 a train", conversation).startswith("turn 2 is edited: ")
    assert text_of(conversation) == whole.replace("a ship of the navy", "a train")
    obey("/edit 1 the queen of the sea", conversation)
    changed = whole.replace("a ship of the navy", "a train")
    assert text_of(conversation) == changed.replace("the king", "the queen of the sea")
    begins = conversation.begins
    turns = [conversation.stream.ids[x : x + 12] for x in begins]
    assert [conversation.tokenizer.decode(ids).count("USER") for ids in turns] == [1, 1, 1]
    assert "".join(conversation.answer("and now ?"))


def test_an_edit_that_changes_nothing_is_not_what_is_undone(loaded):
    conversation = held(loaded)
    whole, begins = text_of(conversation), conversation.begins
    obey("/forget 2", conversation)
    obey("/edit 1 the king", conversation)
    obey("/undo", conversation)
    assert (text_of(conversation), conversation.begins) == (whole, begins)


def test_evicted_tokens_of_a_turn_are_counted(loaded):
    conversation = held(loaded, TURNS * 2, cache_size=40)
    assert "of which had been evicted" in obey("/forget 2", conversation)
    assert "".join(conversation.answer("and now ?"))


@pytest.mark.parametrize(
    ("line", "how", "why"),
    [
        ("/forget", {}, "it is /forget N"),
        ("/edit 1", {}, "it is /edit N TEXT"),
        ("/forget 4", {}, "has 2 turns, got 4"),
        ("/forget 1", dict(turns=TURNS[:1]), "/reset starts"),
        ("/forget 1", dict(evict="turns"), "--evict turns"),
        ("/forget 1", dict(method="recompute"), "recompute cannot be edited"),
    ],
)
def test_what_cannot_be_edited_is_said(line, how, why, loaded):
    with pytest.raises(UserError, match=why):
        obey(line, held(loaded, **{"turns": TURNS[:2]} | how))
