"""A conversation from Python: that of the command, and its parts."""

import pytest

import kvalign
from kvalign.app.sessions.conversation import Conversation, ConversationSettings

FLAGS = dict(cache_size=120, max_new_tokens=12, seed=0)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = ("the king", "a ship of the navy", "what is it ?")


@pytest.fixture
def llama(minis, monkeypatch):
    """A model with a chat template, without a generation_config that says how to draw."""
    loaded = minis["llama-mini"]
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATE)
    return loaded


@pytest.mark.parametrize("system", [None, "you are a sailor"])
def test_it_is_the_conversation_of_the_command(system, llama, tmp_path):
    command = Conversation(ConversationSettings(**FLAGS, system=system), llama)
    talk = kvalign.chat(llama.model, llama.tokenizer, system=system, **FLAGS)
    for turn in TURNS[:2]:
        assert "".join(talk.say(turn)) == "".join(command.answer(turn))
    assert talk.stream.sampling == command.stream.sampling and talk.system == system
    assert talk.stream.method.sizes == command.stream.method.sizes
    assert talk.stream.notes == command.stream.notes and talk.stream.end_ids
    talk.save(file := tmp_path / "talk.safetensors")
    again = kvalign.load_chat(file, llama.model, llama.tokenizer)
    resumed = Conversation(ConversationSettings(state=file), llama)
    expected = "".join(talk.say(TURNS[2]))
    assert "".join(again.say(TURNS[2])) == "".join(resumed.answer(TURNS[2])) == expected


def test_turns_are_edited_forgotten_and_brought_back(llama):
    talk = kvalign.chat(llama.model, llama.tokenizer, **FLAGS)
    for turn in TURNS:
        "".join(talk.say(turn))
    ids = list(talk.stream.ids)
    assert talk.edit(2, "a train").startswith("turn 2 is edited: ")
    assert "a train" in llama.tokenizer.decode(talk.stream.ids)
    talk.undo_edit()
    assert talk.forget(1).startswith("turn 1 is forgotten: ")
    assert TURNS[0] not in llama.tokenizer.decode(talk.stream.ids)
    talk.undo_edit()
    assert talk.stream.ids == ids
    with pytest.raises(kvalign.UserError, match="has 3 turns, got 4"):
        talk.forget(4)
    talk.reset()
    assert "".join(talk.say("and now ?"))


def test_an_answer_that_was_left_or_cut_goes_on(llama):
    talk = kvalign.chat(llama.model, llama.tokenizer, **FLAGS)
    with pytest.raises(kvalign.UserError, match="no answer that was cut"):
        talk.go_on()
    whole = "".join(talk.say(TURNS[0]))
    assert talk.is_cut and talk.stream.is_cut and "".join(talk.go_on())
    again = kvalign.chat(llama.model, llama.tokenizer, **FLAGS)
    first = next(again.say(TURNS[0]))
    assert again.is_cut and first + "".join(again.go_on()) == whole


def test_a_setting_that_is_unknown_is_refused(llama):
    with pytest.raises(kvalign.UserError, match="sytem"):
        kvalign.chat(llama.model, llama.tokenizer, sytem="?")
