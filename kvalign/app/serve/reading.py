"""Reading of answers in pieces: thoughts, text and calls. A call within a thought is none."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.app.serve.messages import Message, as_call
from kvalign.streaming.answer import Decoder, special_names
from kvalign.streaming.calls import Call, CallForm, calls_in, marks_of

_LONGEST_MARK = 16  # tokens


class Said(NamedTuple):
    """Parts of an answer, or of what is new of it, that are complete."""

    thoughts: str
    text: str
    calls: list[Call]


class PieceReader:
    """Reader of one answer, which `Reading` describes."""

    def __init__(self, reading: "Reading"):
        self._form, self._tools = reading.form, reading.tools
        self._think = reading.thoughts or ("", "")
        self._tail = ""  # what has not been told
        self._blank = self._opened = ""  # what stood before a call, and its mark
        self._thoughts, self._text, self._calls = "", "", list[Call]()  # to be told
        self._has_thoughts = self._has_calls = self._is_last = False
        self._go_on: Callable[[], bool] = self._at_start
        if reading.is_thinking:
            self._go_on = self._in_thoughts

    def read(self, piece: str, *, is_last: bool = False) -> Said:
        """Return what is complete now."""
        self._tail, self._is_last = self._tail + piece, is_last
        while self._go_on():
            pass
        said = Said(self._thoughts, self._text, self._calls)
        self._thoughts, self._text, self._calls = "", "", []
        return said

    @property
    def has_call(self) -> bool:
        """Return whether a call is complete, after which an answer may end."""
        is_open = self._go_on == self._in_call and self._form and not self._form.end
        may_end = bool(is_open and self._tail[-1:] == "}")
        return self._has_calls or (may_end and bool(calls_in(self._tail, self._tools)))

    @property
    def is_thinking(self) -> bool:
        return self._go_on == self._in_thoughts

    # Each of these reads on at one place of an answer, and returns whether more can be read now.

    def _at_start(self) -> bool:
        """Nothing has been said: a thought may begin, or an answer that is a call."""
        text, begin = self._tail.lstrip(), self._think[0]
        of_call = ("{", *self._form.marks) if self._form and not self._form.begin else ()
        may_begin = any(x.startswith(text) and x != text for x in (begin, *of_call))
        if not self._is_last and (may_begin or not (text or self._has_calls)):
            return False
        if begin and text.startswith(begin):
            self._tail, self._go_on = text[len(begin) :], self._in_thoughts
            return True
        if self._has_thoughts:
            self._tail = text
        self._go_on = self._in_text
        if opened := [x for x in of_call if text.startswith(x)]:
            self._opened = opened[0].removeprefix("{")
            self._blank = self._tail[: len(self._tail) - len(text)]
            self._tail, self._go_on = text.removeprefix(self._opened), self._in_call
        return True

    def _in_thoughts(self) -> bool:
        thoughts, end, rest = self._tail.partition(self._think[1])
        if not end and not self._is_last:
            num = _num_sure(self._tail, [self._think[1]])
            thoughts, rest = self._tail[:num], self._tail[num:]
        elif end or self._is_last:
            thoughts = thoughts.rstrip()
        if not self._has_thoughts:
            thoughts = thoughts.lstrip()
        self._thoughts, self._tail = self._thoughts + thoughts, rest
        self._has_thoughts |= bool(thoughts or end)
        if end:
            self._think, self._go_on = ("", ""), self._at_start
        return bool(end)

    def _in_text(self) -> bool:
        form, tail = self._form, self._tail
        marks = [x for x in (form.begin, *form.frame) if x] if form else []
        found = min(((tail.find(x), x) for x in marks if x in tail), default=None)
        if form is None or found is None:
            num = len(tail) if self._is_last or not marks else _num_sure(tail, marks)
            text = tail[:num].rstrip() if self._is_last and self._has_calls else tail[:num]
            self._text, self._tail = self._text + text, tail[num:]
            return False
        start, mark = found
        text = tail[:start].rstrip()
        self._text, self._blank = self._text + text, tail[len(text) : start]
        self._tail = tail[start + len(mark) :]
        if mark == form.begin:
            self._opened, self._go_on = mark, self._in_call
        return True

    def _in_call(self) -> bool:
        assert self._form is not None
        end = self._form.end or self._form.begin
        inner, is_closed, _ = self._tail.partition(end) if end else (self._tail, "", "")
        if not is_closed and not self._is_last:
            return False
        closed = is_closed and self._form.end
        self._tail, self._go_on = self._tail[len(inner) + len(closed) :], self._in_text
        if calls := calls_in(inner, self._tools):
            self._calls += calls
            self._has_calls = True
        else:
            self._text += f"{self._blank}{self._opened}{inner}{closed}"
        return True


def _num_sure(text: str, marks: Sequence[str]) -> int:
    """Characters of a text that begin none of some marks, and no blank before one."""
    longest = max(map(len, marks))
    starts = range(max(0, len(text) - longest + 1), len(text))
    may_begin = (i for i in starts if any(mark.startswith(text[i:]) for mark in marks))
    return len(text[: next(may_begin, len(text))].rstrip())


@dataclass(frozen=True)
class Reading:
    """Rules by which the answers of a request are read.

    Attributes:
        thoughts: marks around them; None: none are looked for.
        form: of calls; None: none are looked for.
        tools: as of `calls_in`.
        is_single: an answer has one call at most.
        is_thinking: the prompt has begun a thought.
        place: of the answers in all conversations.
    """

    thoughts: tuple[str, str] | None = None
    form: CallForm | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_single: bool = False
    is_thinking: bool = False
    place: str = ""

    def spelled(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The special tokens that a text has to show."""
        marks = marks_of(self.form, self.thoughts)
        return [token for token, name in special_names(tokenizer).items() if name in marks]

    def is_begun(self, tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> bool:
        """Return whether a prompt [T] ends in a thought that it has begun."""
        if self.thoughts is None:
            return False
        last = ids[-_LONGEST_MARK:].tolist()
        text = tokenizer.backend_tokenizer.decode(last, skip_special_tokens=False)
        return text.rstrip().endswith(self.thoughts[0])

    def whole(self, text: str) -> Said:
        return PieceReader(self).read(text, is_last=True)

    def num_thoughts(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
        decoder, reader, num = Decoder(tokenizer, (), self.spelled(tokenizer)), PieceReader(self), 0
        for number, token in enumerate(ids if self.thoughts else (), 1):
            reader.read(decoder.step(token))
            num = number if reader.is_thinking else num
        return num

    def id_of(self, call: Call, index: int, number: int) -> str:
        """The id of a call of an answer, the same each time that it is read."""
        if call.id.isascii() and call.id.isalnum():
            return call.id
        digest = hashlib.sha256(f"{self.place} {index} {number}".encode()).hexdigest()
        return f"call_{digest[:24]}"

    def calls(self, calls: Sequence[Call], index: int = 0, first: int = 0) -> list[dict[str, Any]]:
        """Calls in OpenAI's form, the first of which has this number in an answer."""
        return [
            as_call(self.id_of(call, index, number), call.name, call.arguments)
            for number, call in enumerate(calls, first)
        ]

    def taken_apart(self, message: Message) -> Message:
        """A client's message; of an answer the thoughts that it has in its text are a field."""
        if message.role != "assistant" or message.reasoning_content or self.thoughts is None:
            return message
        said = replace(self, form=None).whole(message.content)
        if not said.thoughts:
            return message
        return message.model_copy(update={"content": said.text, "reasoning_content": said.thoughts})

    def message(self, text: str) -> Message:
        said = self.whole(text)
        fields: dict[str, Any] = {"tool_calls": self.calls(said.calls)} if said.calls else {}
        fields |= {"reasoning_content": said.thoughts} if said.thoughts else {}
        return Message.model_validate({"role": "assistant", "content": said.text, **fields})
