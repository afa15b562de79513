"""Prompts of requests: messages and texts as token ids, and what of them is new to a session: the
messages after its own, or edits that turn its tokens into those of a conversation that a client has
changed, a message in the middle left out, shortened or rewritten.

    held       a b c d e f g h i j k         kept: a b, f g, i j k
    asked for  a b x f g i j k l m           cut c d e, put x there, cut h, and feed l m
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.forms import ToolSet
from kvalign.app.serve.messages import Message, in_order, unsupported
from kvalign.app.serve.reading import Reading
from kvalign.app.serve.sessions import Session, as_read, digest
from kvalign.app.serve.settings import ServeSettings
from kvalign.app.serve.wire import ChatRequest
from kvalign.methods.base import Method
from kvalign.models.input_ids import encoded
from kvalign.streaming.template import Dialect
from kvalign.streaming.turns import Talk


@dataclass
class Prompts:
    """Token ids to feed for a request; `method` is as new sessions have it, but for their sinks."""

    tokenizer: PreTrainedTokenizerBase
    method: Method
    settings: ServeSettings
    keeps_opening: bool  # whether a session's system prompt stays as sinks

    def reading(self, request: ChatRequest, tools: ToolSet | None) -> Reading:
        """Rules for the answers to a request, before its tokens are known."""
        return Reading(
            thoughts=Dialect.of(self.tokenizer).thoughts,
            form=tools.form if tools else None,
            tools=tools.parameters if tools else {},
            is_single=request.parallel_tool_calls is False,
        )

    def new_session(self, session: Session, request: ChatRequest, tools: ToolSet | None) -> Session:
        """A new session, whose sinks are the tokens of its system prompt and its tools."""
        sizes, first = self.method.sizes, request.messages[0]
        system, num_sinks = first.content if first.role == "system" else None, sizes.num_sinks
        has_opening = system is not None or tools or self.settings.num_sinks == "system"
        if has_opening and self.keeps_opening:
            num_sinks = self._talk(system, request, tools).opening_len()
            if num_sinks >= sizes.cache_size:
                what = f"the {'tools and the ' * bool(tools)}system message"
                raise RequestError(
                    f"{what} take{'s' * (not tools)} {num_sinks} entries of a cache of "
                    f"{sizes.cache_size}: shorten it, or serve with a larger --cache-size",
                    param="messages",
                    code="system_too_long",
                )
        opening = request.opening
        begun = replace(session, messages_digest=opening, tools=opening)
        return replace(begun, system=system, num_sinks=num_sinks)

    def of_messages(
        self,
        session: Session,
        messages: Sequence[Message],
        request: ChatRequest,
        tools: ToolSet | None,
    ) -> Tensor:
        """The tokens [T] of messages of a request that continue a session."""
        for field in ("chat_template_kwargs", "tools"):
            if getattr(request, field) and self.settings.evict == "turns":
                raise unsupported(f"{field} with --evict turns", field)
        system = None if session.is_new else session.system  # one of the messages of a new one
        turns = [message.for_template() for message in messages]
        return self.of(self._talk(system, request, tools).ids(turns, goes_on=not session.is_new))

    def _talk(
        self, system: str | None, request: ChatRequest | None = None, tools: ToolSet | None = None
    ) -> Talk:
        template = request.chat_template_kwargs if request else None
        definitions = tools.definitions if tools else None
        return Talk(self.tokenizer, system, self.settings.special_tokens, template, definitions)

    def of(self, prompt: str | list[int]) -> Tensor:
        """The tokens [T] of a text, or of ids."""
        try:
            ids = encoded(prompt, self.tokenizer, self.method.model)
        except (UnicodeEncodeError, TypeError):  # half of a surrogate pair
            raise RequestError("the prompt is not Unicode text", param="prompt") from None
        if not ids:
            raise RequestError("the prompt is empty: give at least one word", param="prompt")
        if (num := len(ids)) > (most := self.settings.max_prompt_tokens):
            what = f"the prompt has {num} tokens, most for a request are {most}: send it in parts"
            raise RequestError(what, param="prompt", code="prompt_too_long")
        return torch.tensor(ids, dtype=torch.int64)

    def whole_turns(
        self, session: Session, before: Tensor, new: Tensor, num_answer: int
    ) -> tuple[Session, Tensor | None]:
        """Evict the oldest turns of a session, as `Talk.evict_turns`, for a new turn [N] after its
        tokens [T] `before`: the session with it, and the tokens to encode again, if any went.
        """
        keeps_turns = self.settings.evict == "turns"
        turns = (*session.turns, len(before))
        if session.is_new or not keeps_turns:
            return replace(session, turns=turns if keeps_turns else ()), None
        text = torch.cat([before, new])
        size, talk = self.method.sizes.cache_size, self._talk(session.system)
        num, rest = talk.evict_turns(turns, text.tolist(), size=size, num_answer=num_answer)
        return replace(session, turns=turns[num:]), torch.tensor(rest) if num else None

    def num_gone(self, session: Session) -> int:
        """Number of tokens of evicted turns, which follow the opening."""
        if not session.turns or not session.turns[0]:
            return 0
        first, begin = self._talk(session.system).word_starts((0, session.turns[0]))
        return begin - first

    def opening_len(self, session: Session) -> int:
        """Number of tokens before its first turn."""
        return self._talk(session.system).opening_len()


def new_messages(
    session: Session, request: ChatRequest, calls: Sequence[tuple[str | None, str]]
) -> Sequence[Message]:
    """The messages of a request that are new to a session; RequestError if the others, or what
    begins it beside them, differ from its own. `calls` are ids and names of its last answer's.
    """
    messages = request.messages
    if session.is_new:
        return messages
    if request.opening != session.tools:
        raise RequestError(
            "the tools and the chat_template_kwargs of a session stay as they were in its first "
            "turn: send the same ones, or name another session",
            param="tools" if request.tools else "chat_template_kwargs",
            code="session_mismatch",
        )
    digests = digest(request.opening, messages)
    if session.messages_digest in digests[:-1]:
        return messages[digests.index(session.messages_digest) + 1 :]
    system = messages[0].content if messages[0].role == "system" else None
    turns = messages[1:] if system is not None else messages
    is_turn = all(message.role == "tool" for message in turns[:-1])
    if is_turn and (system is None or as_read(system) == as_read(session.system or "")):
        results = [message for message in turns if message.role == "tool"]
        return [*in_order(results, calls), *turns[len(results) :]] if results else turns
    what = "these messages do not continue the session: send only the new turn, or all unchanged"
    raise RequestError(what, param="session", code="session_mismatch")


def session_for(session: Session, request: ChatRequest) -> Session | None:
    """Return the session that a request goes on with; None if it asks for the last answer again,
    which may have been lost.

    The last turn is asked again by all messages up to the last answer, or by the messages of a
    first turn; `fields` tell whether for the same answer or for another one. Another one takes the
    place of the last answer: the session begins anew with these messages. The same turn alone asks
    for the same answer if the client calls it a retry; otherwise it is a new turn.

    Raises:
        RequestError: a retry that wants logprobs, which are not stored.
    """
    if session.is_new:
        return session
    turn, is_same = digest(request.opening, request.messages)[-1], session.fields == request.fields
    if turn == session.turn_digest:
        return None if is_same and request.num_top is None else session.reset()
    if not (request.is_retry and is_same and turn == session.request):
        return session
    if request.num_top is not None:
        what = "logprobs of an answer that was given before are not stored: leave them out"
        raise RequestError(what, param="logprobs")
    return None


RUN = 16  # tokens in a row that are taken for the same text, once some before differed


class Change(NamedTuple):
    """Tokens from `start` to `stop` of what is held become `new`."""

    start: int
    stop: int
    new: list[int]


class Edits(NamedTuple):
    """Changes of what is held, in its order; `num_kept` of its tokens stay, and as many of those
    that are asked for are held afterwards as `num_held`.
    """

    changes: list[Change]
    num_kept: int
    num_held: int

    @property
    def num_new(self) -> int:
        return sum(len(change.new) for change in self.changes)

    @classmethod
    def between(cls, ids: Sequence[int], new_ids: Sequence[int], exactly: int = 0) -> "Edits":
        """Edits after which `ids` are the beginning of `new_ids`, without their last token, which
        is to be fed. Tokens are kept where a run of them comes in the same order in both, but for
        the first of each run behind a change: `exactly` of them, at most `RUN`, are encoded again,
        so that they know what is new. Each token is looked at once.
        """
        prefix = new_ids[:-1]
        runs: dict[tuple[int, ...], list[int]] = {}
        for j in reversed(range(len(prefix) - RUN + 1)):
            runs.setdefault(tuple(prefix[j : j + RUN]), []).append(j)  # the first is last
        changes, num_kept, i, j = list[Change](), 0, 0, 0
        while True:
            start = i
            while i < len(ids) and j < len(prefix) and ids[i] == prefix[j]:
                i, j = i + 1, j + 1
            num_kept += i - start
            run = _next_run(ids, i, runs, j)
            if run is None:
                if i < len(ids):
                    changes.append(Change(i, len(ids), []))
                return cls(changes, num_kept, j)
            after = run[0] + exactly, run[1] + exactly
            changes.append(Change(i, after[0], [*prefix[j : after[1]]]))
            i, j = after


def _next_run(
    ids: Sequence[int], start: int, runs: dict[tuple[int, ...], list[int]], at_least: int
) -> tuple[int, int] | None:
    """The next place from `start` on of a run that comes `at_least` so late in the new ids,
    and where it comes there; None: there is none.
    """
    for i in range(start, len(ids) - RUN + 1):
        places = runs.get(tuple(ids[i : i + RUN]))
        while places and places[-1] < at_least:
            places.pop()
        if places:
            return i, places[-1]
    return None
