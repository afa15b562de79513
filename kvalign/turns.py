"""Turns of a conversation as text, one after another for one stream.

A model with a chat template gets its own; any other the plain form of StreamingLLM's demo:

    USER: ...

    ASSISTANT:
"""

from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from kvalign.errors import UserError
from kvalign.escape import check_text
from kvalign.input_ids import ids_of


def turn_ids(
    tokenizer: PreTrainedTokenizerBase, turn: str, is_first: bool, system: str | None = None
) -> list[int]:
    """The tokens of `turn_text`. A template writes the beginning of a text itself."""
    text = turn_text(tokenizer, turn, is_first, system)
    special = is_first and not tokenizer.chat_template
    if not text.strip():
        raise UserError("the chat template of this model leaves out what is said")
    return ids_of(text, tokenizer, special)


def opening_len(tokenizer: PreTrainedTokenizerBase, system: str | None) -> int:
    """Tokens of a conversation before the user's first word: what sinks should keep."""
    one, other = (turn_ids(tokenizer, turn, True, system) for turn in ("?", "0"))
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in alike)


def turn_text(
    tokenizer: PreTrainedTokenizerBase, turn: str, is_first: bool, system: str | None = None
) -> str:
    """What is fed before the model answers a user's turn; the answer before it has been fed.

    Args:
        tokenizer: of the model, with its chat template if it has one.
        turn: what the user says.
        is_first: the stream begins with it, so that the template's opening is part of it.
        system: what the model is told before the first turn.

    Raises:
        UserError: a template that fails, or takes no such conversation.
    """
    if not tokenizer.chat_template:
        opening = "" if is_first and system is None else f"{system if is_first else ''}\n\n"
        return f"{opening}USER: {turn}\n\nASSISTANT:"
    user = {"role": "user", "content": turn}
    if is_first:
        told = [] if system is None else [{"role": "system", "content": system}]
        return _render(tokenizer, [*told, user], to_answer=True)
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    whole = _render(tokenizer, [*before, user], to_answer=True)
    known = _render(tokenizer, before, to_answer=False)
    known = known[: known.rfind("!") + 1]
    if not known or not whole.startswith(known):
        what = "the chat template of this model changes earlier turns"
        raise UserError(f"{what}: they cannot be streamed")
    return whole.removeprefix(known)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], to_answer: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=to_answer
        )
        assert isinstance(text, str)
        check_text(text)
    except Exception as error:  # a program from outside raises anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template of this model fails: {said:.300}") from None
    return text
