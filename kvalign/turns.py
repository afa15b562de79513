"""Turns of a conversation as text, one after another for one stream.

A model with a chat template gets its own; any other the plain form of StreamingLLM's demo:

    USER: ...

    ASSISTANT:
"""

from transformers import PreTrainedTokenizerBase


def turn_text(tokenizer: PreTrainedTokenizerBase, turn: str, is_first: bool) -> str:
    """What is fed before the model answers a user's turn; the answer before it has been fed.

    Args:
        tokenizer: of the model; its chat template is used where it has one.
        turn: what the user says.
        is_first: the stream begins with it, so that the template's opening is part of it.
    """
    if not tokenizer.chat_template:
        return f"{'' if is_first else chr(10) * 2}USER: {turn}\n\nASSISTANT:"
    user = {"role": "user", "content": turn}
    if is_first:
        return _render(tokenizer, [user], to_answer=True)
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    whole = _render(tokenizer, [*before, user], to_answer=True)
    known = _render(tokenizer, before, to_answer=False)
    answer_end = known.rindex("!") + 1
    if not whole.startswith(known[:answer_end]):
        raise ValueError(
            "the chat template of this model changes earlier turns: they cannot be streamed"
        )
    return whole[answer_end:]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], to_answer: bool) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_answer)
    assert isinstance(text, str)
    return text
