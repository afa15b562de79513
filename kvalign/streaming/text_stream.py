"""Stream as text: text in, pieces of text out as tokens come, more text in at any time.

stream = kvalign.stream(model, tokenizer, "The history of the island", cache_size=64)
for piece in stream:
    print(piece, end="", flush=True)
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.aligners import Aligner
from kvalign.cache.edits import EncodedPart
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import KeywordError, UserError
from kvalign.foundation.names import spelled_out
from kvalign.foundation.settings import check_output, typed
from kvalign.foundation.whole import NotPickled, Whole
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.methods.choice import aligners_at_hand, warn_if_too_long
from kvalign.methods.registry import AUTO, METHODS
from kvalign.models.architectures import spec_of
from kvalign.models.input_ids import check_fast, encoded, prefix_ids, unknown_ids
from kvalign.models.wrapped import unwrapped
from kvalign.streaming import stream_file
from kvalign.streaming.answer import Answer
from kvalign.streaming.lookup import check_lookup
from kvalign.streaming.loop import stream_tokens
from kvalign.streaming.pieces import Piece, first_of
from kvalign.streaming.sampling import Sampling, SamplingConfig, StreamConfig
from kvalign.streaming.stream_file import Digests, SavedStream
from kvalign.streaming.turns import end_ids

_SIZES = tuple(field.name for field in fields(CacheSizes))


class _BeforeEdit(NamedTuple):
    """State that `undo_edit` brings back; `is_fed`: that of the method is part of it."""

    ids: list[int]
    num_fed: int
    num_new: int
    answers: list[tuple[int, int]]
    notes: dict[str, str]
    is_fed: bool


class TextStream(NotPickled):
    """Iterator over the text that continues the input. `feed` more at any time and iterate again;
    you may leave the loop and come back to it.

    Attributes:
        ids: all tokens so far, fed and generated.
        times_s: seconds of each token since the last input; the first includes the input.
        notes: texts by name that are saved with the stream.
        answers: begin and end in `ids` of what was generated before the last input.
    """

    instead = (
        "a stream is neither copied nor pickled: save() it, and kvalign.load_stream() the file"
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase, method: Method, sampling: Sampling):
        check_fast(tokenizer)
        if sampling.lookup:
            check_lookup(method)
        self.tokenizer, self.method, self.sampling = tokenizer, method, sampling
        self.end_ids = end_ids(method.model, tokenizer) if sampling.stop_at_end else []
        self._unknown = unknown_ids(tokenizer, method.model.config.vocab_size)
        self.generator = sampling.generator(method.model.device)
        self.notes: dict[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all text: the next input begins a new one. Random numbers continue."""
        self.method.reset()
        self._whole, self.num_fed = Whole(), 0
        self._before_edit: _BeforeEdit | None = None
        self.answers: list[tuple[int, int]] = []
        self._begin_answer([])

    def feed(self, text: str | Sequence[int]) -> None:
        """Append a text, or its token ids, after the generated text; the next iteration continues
        there.

        A text that begins the stream gets the tokenizer's prefix tokens (the beginning of a text),
        unless it has them; one that goes on is continued as it is, without a space in front.
        UserError if it is empty, or neither text nor ids.
        """
        self._whole.check()
        ids = encoded(text, self.tokenizer, self.method.model, goes_on=bool(self.ids))
        if len(ids) == 0:
            raise UserError("the input is empty: give at least one word")
        warn_if_too_long(self.method, len(ids))
        with self._whole.change():
            # An end token has not been fed, and the stream goes on.
            before = self.ids[: len(self.ids) - self._answer.has_end_token]
            if self.token_ids:
                self.answers.append((len(self.ids) - len(self.token_ids), len(before)))
            self._begin_answer(before + ids)

    def go_on(self) -> None:
        """Let an answer that max_new_tokens cut go on, by as many tokens; UserError without one."""
        self._whole.check()
        if not self.is_cut:
            raise UserError("there is no answer that was cut")
        with self._whole.change():
            self.answers.append((len(self.ids) - len(self.token_ids), len(self.ids)))
            self._begin_answer(self.ids)

    def edit(
        self, start: int, stop: int, new: str | Sequence[int] | Piece = "", *, exactly: int = 0
    ) -> int:
        """Replace the tokens of `ids` from `start` to before `stop` by a text, token ids, or a
        piece. What stands behind is not encoded again: it moves to its new places, and knows what
        it has read (`Method.edit`). Nor is a piece. The next iteration continues after it.

        Args:
            start, stop: tokens of `ids`; equal: insert only.
            new: text, ids, or a piece (`kvalign.encode`); "": cut only.
            exactly: tokens behind that are encoded again, so that they know the new tokens, and
                not the old ones; of a piece, as many of its first, so that they know what stands
                before it.

        Returns:
            The number of replaced tokens that had been evicted before.

        Raises:
            UserError: no such tokens; a method whose entries cannot be edited; nothing is left; a
                piece of another model.
        """
        self._whole.check()
        start, stop = typed("start", start, int), typed("stop", stop, int)
        if not 0 <= start <= stop <= len(self.ids):
            what = f"start and stop must be among the {len(self.ids)} tokens of this stream"
            raise UserError(f"{what}, got {start} and {stop}")
        if typed("exactly", exactly, int) < 0:
            raise UserError(f"exactly must be at least 0, got {exactly}")
        parts: list[list[int] | Piece]
        if isinstance(new, Piece):
            prefix = [] if self.ids else prefix_ids(self.tokenizer)
            parts = [[*prefix, *new.ids[:exactly]], new[exactly:]]
        else:
            ids = encoded(new, self.tokenizer, self.method.model, goes_on=start > 0) if new else []
            while ids and start < stop and ids[0] == self.ids[start]:
                start, ids = start + 1, ids[1:]
            while ids and start < stop and ids[-1] == self.ids[stop - 1]:
                stop, ids = stop - 1, ids[:-1]
            parts = [ids]
        again = self.ids[stop : stop + exactly]
        parts = [part for part in (*parts, again) if len(part)]
        if start == stop and not parts:
            return 0
        return self._edit(start, stop, stop + len(again), parts)

    def insert(
        self, new: str | Sequence[int] | Piece, start: int | None = None, *, exactly: int = 0
    ) -> None:
        """Insert a text, ids or a piece before token `start`, or at the end; see `edit`."""
        start = len(self.ids) if start is None else start
        self.edit(start, start, new, exactly=exactly)

    def _edit(self, start: int, stop: int, end: int, new: list[list[int] | Piece]) -> int:
        """Same, for tokens `start` to `end`, of which those from `stop` on are encoded again."""
        ids, answers, num_new = self.ids, self.answers, len(self.token_ids)
        before = (ids, self.num_fed, num_new, answers, {**self.notes})
        begin = len(ids) - num_new
        if num_new and end > begin:  # the answer becomes part of the text, which goes on after it
            ids = ids[: len(ids) - self._answer.has_end_token]  # which has not been fed
            answers, num_new = [*answers, (begin, len(ids))], 0
            start, stop, end = (min(x, len(ids)) for x in (start, stop, end))
        edited = [*ids[:start], *(x for part in new for x in part), *ids[end:]]
        if not edited:
            raise UserError("the edit leaves nothing of this stream: reset() it")
        num_more, num_lost = len(edited) - len(ids), 0
        num_fed, from_fed, end_fed, parts = self.num_fed + num_more, start, end, new
        if end >= self.num_fed or num_fed == len(edited):  # the rest is fed as usual
            from_fed, end_fed = min(start, self.num_fed), self.num_fed
            num_fed, parts = min(from_fed, len(edited) - 1), []
            if any(isinstance(part, Piece) for part in new):  # but what is encoded already
                num_fed = min(end + num_more, len(edited) - 1)
                parts = first_of([ids[from_fed:start], *new], num_fed - from_fed)
            from_fed = min(from_fed, num_fed)
        if is_fed := from_fed < self.num_fed or bool(parts):
            # Of a stream that was encoded anew, or lost all that it had, the method knows the last
            # tokens only. Text before these is text alone, as what has been evicted.
            unknown = self.num_fed - self.method.num_tokens
            num_lost = max(0, min(stop, unknown) - start)
            if is_fed := end_fed > unknown or (end_fed == unknown and bool(parts)):
                first, last = (max(x - unknown, 0) for x in (from_fed, end_fed))
                again = max(start - max(from_fed, unknown), 0)  # fed once more, not replaced
                num_lost += max(self.method.edit(first, last, *self._inputs_of(parts)) - again, 0)

        def place_after(x: int, if_inside: int) -> int:
            return x if x <= start else x + num_more if x >= end else if_inside

        spans = [(place_after(x, end + num_more), place_after(y, start)) for x, y in answers]
        with self._whole.change():
            self.resume(edited, num_fed, num_new, [(x, y) for x, y in spans if x < y])
        self._before_edit = _BeforeEdit(*before, is_fed)
        return min(num_lost, stop - start)

    def _inputs_of(self, parts: list[list[int] | Piece]) -> Iterator[Tensor | EncodedPart]:
        model = self.method.model
        for part in parts:
            if isinstance(part, Piece):
                yield part.part(model)
            else:
                yield torch.tensor([part], device=model.device)

    def undo_edit(self) -> None:
        """Take the last edit back, and what became of `notes` since; UserError without one."""
        self._whole.check()
        if self._before_edit is None:
            raise UserError("there is no edit to undo")
        before = self._before_edit
        with self._whole.change():
            if before.is_fed:
                self.method.undo_edit()
            self.resume(before.ids, before.num_fed, before.num_new, before.answers)
            self.notes = before.notes

    def encode_anew(self, ids: list[int]) -> None:
        """Replace the method's entries by those of these tokens alone, at least one, encoded at the
        next iteration. `ids`, the record of the text, stay.
        """
        with self._whole.change():
            self.method.reset()
            self.num_fed, self._before_edit = 0, None
            self._tokens = self._new_tokens(ids)

    def __iter__(self) -> Iterator[str]:
        self._whole.check()
        if not self.ids:
            raise UserError("this stream has no input: begin it with a prompt, or feed it first")
        while not self._answer.finish:
            start = time.perf_counter()
            self._whole.begin()
            token = next(self._tokens, None)
            if token is not None:
                token_id = int(token)  # waits for the device
                self.times_s.append(time.perf_counter() - start)
                self.num_fed, self._before_edit = len(self.ids), None
                self.ids.append(token_id)
                piece, _ = self._answer.take(token_id)
            self._whole.end()
            if token is None:
                return
            if piece:
                yield piece

    def __repr__(self) -> str:
        model, size = self.method.spec.name or "a model", self.method.sizes.cache_size
        of = f"{self.method.title}, cache_size {size}, {len(self.ids)} tokens"
        return f"<stream of {model}: {of}>"

    @property
    def has_ended(self) -> bool:
        """Return whether an end token or a stop string has ended the stream, until it is fed."""
        return self._answer.finish == "stop"

    @property
    def is_cut(self) -> bool:
        """Return whether max_new_tokens has ended the stream, until it is fed."""
        return self._answer.finish == "length"

    @property
    def num_evicted(self) -> int:
        """Tokens that were fed and then evicted; 0 for a method that does not count."""
        try:
            return self.num_fed - self.method.fill if self.num_fed else 0
        except NotImplementedError:
            return 0

    @property
    def token_ids(self) -> list[int]:
        """Tokens that were generated since the last input."""
        return self._answer.token_ids

    @property
    def text(self) -> str:
        """Their text."""
        return self._answer.text

    def timing(self) -> dict[str, float]:
        """Tokens since the last input, seconds to the first, mean milliseconds of later ones."""
        later = self.times_s[1:]
        return {
            "num_tokens": len(self.token_ids),
            "ttft_s": self.times_s[0] if self.times_s else 0.0,
            "ms_per_token": 1e3 * sum(later) / len(later) if later else 0.0,
        }

    def save(self, path: str | Path) -> None:
        """Write everything needed to continue to a safetensors file; see `load_stream`. A memory
        goes to a file beside it (`PATH.memory.0` or `.1`), to which later saves append what is new.
        A stream without input can be saved, too, and begins when it is fed.
        """
        self._whole.check()
        file = Path(typed("path", path, Path))
        check_output(file, "file", "path")
        stream_file.save(
            file,
            self.method,
            Digests.of(self.method, self.tokenizer),
            self.sampling,
            ids=torch.tensor(self.ids, dtype=torch.int64),
            num_fed=self.num_fed,
            state=self.method.state(),
            generator=self.generator,
            num_new=len(self.token_ids),
            answers=self.answers,
            notes=self.notes,
        )

    def resume(
        self, ids: list[int], num_fed: int, num_new: int, answers: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Continue a saved stream of these ids; see `SavedStream`. Its method has been restored."""
        self.answers = [*answers]
        before, answer = ids[: len(ids) - num_new], ids[len(ids) - num_new :]
        self._begin_answer(before)
        self.ids, self.num_fed = ids, num_fed
        self._tokens = self._new_tokens(ids, num_new)
        for token in answer:
            self._answer.take(token)

    def _begin_answer(self, ids: list[int]) -> None:
        """Have these tokens, which an answer follows."""
        self._answer = Answer(self.tokenizer, ids, self.sampling, self.end_ids)
        self.ids = ids
        self._tokens = self._new_tokens(ids)
        self.times_s: list[float] = []
        self._before_edit = None

    def _new_tokens(self, of: list[int], num_new: int = 0) -> Iterator[Tensor]:
        """Tokens after others: `num_fed` of these were fed, the last `num_new` are the answer's."""
        earlier = (self.ids[first:end] for first, end in reversed(self.answers))
        ids = torch.tensor([of], device=self.method.model.device)
        return stream_tokens(
            self.method,
            ids[:, self.num_fed :],
            processors=self.sampling.processors(len(of) - num_new, earlier, self._unknown),
            do_sample=not self.sampling.is_greedy,
            eos_token_ids=self.end_ids,
            generator=self.generator,
            before=ids[:, : self.num_fed] if self.num_fed else None,
            lookup=self.sampling.lookup,
        )


@spelled_out(StreamConfig)
def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    *,
    method: str = AUTO,
    cache_size: int | None = None,
    keep: Literal["prompt"] | None = None,
    **config: Unpack[StreamConfig],
) -> TextStream:
    """Stream the text that continues a prompt, past the context length.

    Args:
        model: a causal LM of transformers, or a wrapped one: see `kvalign.make_method`.
        tokenizer: its tokenizer.
        prompt: text to continue; empty: `feed` the stream before iterating.
        method, cache_size: as in `kvalign.make_method`.
        keep: `prompt`: no token of it is ever evicted; instead of num_sinks.
        config: num_sinks, num_evicted, ...: see `MethodConfig`; `compile`; max_new_tokens,
            temperature, ...: see `Sampling`. Without max_new_tokens the stream has no end. Without
            a seed it draws one: `stream.sampling.seed`.

    Raises:
        UserError: as in `make_method`; a prompt that is not text; a tokenizer that cannot stream.
        KeywordError: an unknown setting, with the nearest known one.
    """
    sampling, rest = Sampling.of(stream, config)
    first: str | list[int] = prompt
    if keep is not None:
        if rest.get("num_sinks") is not None:
            raise UserError("keep and num_sinks set the same number: give one of them")
        if keep != "prompt":
            raise UserError(f"keep must be 'prompt', got {keep!r:.80}: num_sinks takes a number")
        first = encoded(prompt, tokenizer, unwrapped(model))
        rest["num_sinks"] = len(first)
    streaming = make_method(method, model, cache_size=cache_size, **{"compile": None, **rest})
    text_stream = TextStream(tokenizer, streaming, sampling)
    if not (isinstance(prompt, str) and prompt == ""):
        text_stream.feed(first)
    return text_stream


@spelled_out(SamplingConfig)
def load_stream(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    aligner: Aligner | str | Path | None = None,
    compile: bool | None = None,
    **config: Unpack[SamplingConfig],
) -> TextStream:
    """Load a stream that `TextStream.save` wrote, ready to be fed and iterated.

    It gives the same tokens as the saved stream would have given, on the same kind of device.

    Args:
        path: the file.
        model, tokenizer: those of the saved stream.
        aligner: that of the saved stream; None: it is one that ships for the model, or that was
            trained here last.
        compile: as in `kvalign.make_method`.
        config: changes to the choice of tokens: see `Sampling`. Everything else is as saved, and
            random numbers continue unless the seed changes.

    Raises:
        NotFoundError: no such file.
        UserError: it is not a stream, or one of another model, tokenizer, precision or aligner.
        KeywordError: an unknown setting, with the nearest known one.
    """
    for name in ("method", *_SIZES):
        if name in config:
            raise KeywordError(f"load_stream() takes no {name}: the saved stream keeps its own")
    Sampling.of(load_stream, config)
    changes = {name: x for name, x in config.items() if name != "seed" or x is not None}
    saved, tensors = stream_file.read(Path(typed("path", path, Path)))
    try:
        stream_file.check_fits(saved, tensors, unwrapped(model))
        ignored = METHODS.find(saved.method).ignored_settings()
        family = spec_of(unwrapped(model).config).family
        sizes = {x: size for x, size in saved.sizes(family).items() if x not in ignored}
        if aligner is None and saved.aligner is not None:
            aligner = _aligner_of(saved, unwrapped(model))
        method = make_method(saved.method, model, aligner=aligner, compile=compile, **sizes)
        digests = Digests.of(method, tokenizer)
        if digests.aligner != saved.aligner:
            raise UserError("it was made with another aligner: give that one")
        loaded = TextStream(tokenizer, method, Sampling(**saved.sampling | changes))
        if saved.tokenizer not in (None, digests.tokenizer):
            raise UserError(f"it was made with another tokenizer: give that of {saved.base_model}")
        device = method.model.device
        method.restore(stream_file.state_of(tensors))
        same_seed = loaded.sampling.seed == saved.sampling.get("seed")
        if saved.device == device.type and same_seed:
            loaded.generator.set_state(tensors["generator"])
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(f"cannot continue the stream in {path}: {error}") from error
    loaded.notes = saved.notes
    loaded.resume(tensors["ids"].tolist(), saved.num_fed, saved.num_new, saved.answers)
    return loaded


def _aligner_of(saved: SavedStream, model: PreTrainedModel) -> Aligner:
    """The aligner of a saved stream, among those at hand."""
    for name in aligners_at_hand(model, at_least="any"):
        aligner = Aligner.from_pretrained(name)
        if stream_file.aligner_digest(aligner) == saved.aligner:
            return aligner
    raise UserError("it was made with another aligner: give that one")
