"""Turns of a conversation as text: templates continued, not repeated."""

import pytest
from transformers import AutoTokenizer

from kvalign import checkpoints
from kvalign.streaming.turns import messages_text, turn_text

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))


def test_without_a_template_turns_are_plain(tokenizer):
    assert turn_text(tokenizer, "Hi", is_first=True) == "USER: Hi\n\nASSISTANT:"
    assert turn_text(tokenizer, "And?", is_first=False) == "\n\nUSER: And?\n\nASSISTANT:"


def test_turns_joined_are_the_whole_template(tokenizer):
    tokenizer.chat_template = CHATML
    messages, stream = [], ""
    for number, turn in enumerate(["Hi!", "Why?", "And?"]):
        messages.append({"role": "user", "content": turn})
        stream += turn_text(tokenizer, turn, is_first=number == 0)
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert stream == whole
        messages.append({"role": "assistant", "content": f"answer {number}!"})
        stream += f"answer {number}!"


@pytest.mark.parametrize("template", [None, CHATML])
def test_several_messages_are_their_turns_joined(template, tokenizer):
    tokenizer.chat_template = template
    said = [("system", "Know."), ("user", "Hi!"), ("assistant", " Oh."), ("user", "Why?")]
    messages = [{"role": role, "content": content} for role, content in said]
    whole = messages_text(tokenizer, messages, goes_on=False)
    first = turn_text(tokenizer, "Hi!", True, "Know.")
    assert whole == first + " Oh." + turn_text(tokenizer, "Why?", False)
    rest = messages_text(tokenizer, messages[1:], goes_on=True)
    assert rest == turn_text(tokenizer, "Hi!", False) + " Oh." + turn_text(tokenizer, "Why?", False)


def test_a_template_without_earlier_turns_has_one(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}: {{ messages[-1].content }}"
    assert turn_text(tokenizer, "Hi", is_first=True) == "1: Hi"
    with pytest.raises(ValueError, match="leaves out earlier answers"):
        turn_text(tokenizer, "Hi", is_first=False)


def test_a_template_that_changes_its_beginning_goes_on(tokenizer):
    """What a stream holds stays as it was fed."""
    whole = "{% for m in messages %} {{ m.content }}{% endfor %}"
    tokenizer.chat_template = "{{ messages | length }}" + whole
    assert turn_text(tokenizer, "Hi", is_first=True) == "1 Hi"
    assert turn_text(tokenizer, "Why?", is_first=False) == " Why?"
