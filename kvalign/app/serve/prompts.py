"""From messages and texts to the tokens that are fed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.sessions import Session, digest
from kvalign.app.serve.wire import Message
from kvalign.methods.base import Method
from kvalign.models.input_ids import encoded
from kvalign.streaming.turns import messages_text, opening_len, turn_ids


@dataclass
class Prompts:
    """What is fed of a request."""

    tokenizer: PreTrainedTokenizerBase
    method: Method  # as new sessions have it, but for their sinks
    keeps_opening: bool  # whether a session's system prompt stays as sinks
    keeps_turns: bool  # whether whole turns are evicted
    most_tokens: int  # that one request may bring

    def begun(self, session: Session, messages: Sequence[Message]) -> Session:
        """A new session of messages, with as many sinks as its system prompt has tokens."""
        sizes, system = self.method.sizes, None
        if messages[0].role == "system":
            system = messages[0].content
        num_sinks = sizes.num_sinks
        if system is not None and self.keeps_opening:
            num_sinks = opening_len(self.tokenizer, system)
            if num_sinks >= sizes.cache_size:
                raise RequestError(
                    f"the system message takes {num_sinks} entries of a cache of "
                    f"{sizes.cache_size}: shorten it, or serve with a larger --cache-size",
                    param="messages",
                    code="system_too_long",
                )
        return replace(session, system=system, num_sinks=num_sinks)

    def of_messages(self, session: Session, messages: Sequence[Message]) -> Tensor:
        """The tokens [T] of messages that go on with a session."""
        said = [message.model_dump() for message in messages]
        text = messages_text(self.tokenizer, said, goes_on=not session.is_new)
        return self.of(text, special=session.is_new and not self.tokenizer.chat_template)

    def of(self, prompt: str | list[int], *, special: bool) -> Tensor:
        """The tokens [T] of a text, or of ids; `special`: with what begins a text."""
        try:
            ids = encoded(prompt, self.tokenizer, self.method.model, special=special)
        except (UnicodeEncodeError, TypeError):  # half of a surrogate pair
            raise RequestError("the prompt is no Unicode text", param="prompt") from None
        if not ids:
            raise RequestError("the prompt is empty: give at least one word", param="prompt")
        if len(ids) > self.most_tokens:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, a request may bring {self.most_tokens}: send "
                "it in parts",
                param="prompt",
                code="prompt_too_long",
            )
        return torch.tensor(ids, dtype=torch.int64)

    def whole_turns(
        self, session: Session, before: Tensor, new: Tensor, num_answer: int
    ) -> tuple[Session, Tensor | None]:
        """Let the oldest turns of a session go, as a whole, until a new one fits.

        Args:
            before: [T] int64, the session's tokens.
            new: [N] int64, those of the turn.
            num_answer: tokens that may be answered; room is left for them, up to half the cache.

        Returns:
            the session with its new turn; what is to be encoded anew, where a turn has gone.
        """
        turns = (*session.turns, len(before))
        if session.is_new or not self.keeps_turns:
            return replace(session, turns=turns if self.keeps_turns else ()), None
        size = self.method.sizes.cache_size
        num_opening = opening_len(self.tokenizer, session.system)
        pair = (turn_ids(self.tokenizer, turn, False) for turn in "?0")
        num_asking = sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(*pair, strict=False)))
        room = size - num_opening - len(new) - min(num_answer, size // 2)
        # Of a turn that comes first, the opening asks.
        skipped = [turn + (num_asking if turn else num_opening) for turn in turns]
        if len(before) - skipped[0] <= room:
            return replace(session, turns=turns), None
        kept = next(
            (i for i in range(1, len(turns)) if len(before) - skipped[i] <= room), len(turns) - 1
        )
        text = torch.cat([before, new])
        anew = torch.cat([text[:num_opening], text[skipped[kept] :]])
        return replace(session, turns=turns[kept:]), anew


def unheard(session: Session, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages that a session has not heard; RequestError if they are other ones than it has
    said.
    """
    if session.is_new:
        return messages
    digests = digest("", messages)
    if session.said in digests[:-1]:
        return messages[digests.index(session.said) + 1 :]
    system = messages[0].content if messages[0].role == "system" else None
    turns = messages[1:] if system is not None else messages
    if len(turns) == 1 and system in (None, session.system):
        return turns
    raise RequestError(
        "these messages do not go on with what session has said: send the new turn alone, all "
        "messages as they were answered, or name another session",
        param="session",
        code="session_mismatch",
    )


def is_asked_again(session: Session, messages: Sequence[Message]) -> bool:
    """Whether these are all messages up to the session's last answer: it may have been lost."""
    is_whole = any(message.role == "assistant" for message in messages)
    return is_whole and digest("", messages)[-1] == session.asked
