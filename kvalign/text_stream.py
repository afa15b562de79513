"""A stream as text: text in, pieces of text out as tokens come, more text in at any time.

stream = kvalign.stream(model, tokenizer, "The history of the island", cache_size=64)
for piece in stream:
    print(piece, end="", flush=True)
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from kvalign.aligners import Aligner
from kvalign.errors import RunError, UserError
from kvalign.generation import stream_tokens
from kvalign.methods import make_method
from kvalign.methods.base import Method

_OVERLAP = 16  # tokens that tell a decoder in the middle of a text what came before


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: tokens after each input; None: without end.
        top_k: draw from the k most likely; 1 is greedy.
        temperature: divides the logits.
        no_repeat_ngram_size: over the whole history, 0 for off.
        stop_at_end: end at the model's end token.
        seed: of the draws.
    """

    max_new_tokens: int | None = None
    top_k: int = 20
    temperature: float = 1.0
    no_repeat_ngram_size: int = 0
    stop_at_end: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        low = {"max_new_tokens": 1, "top_k": 1, "no_repeat_ngram_size": 0}
        for name, least in low.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} must be at least {least}, got {value}")
        if not self.temperature > 0:
            raise UserError(f"temperature must be above 0, got {self.temperature}")

    def processors(self) -> LogitsProcessorList:
        """transformers' own, in its order."""
        found = LogitsProcessorList()
        if self.no_repeat_ngram_size:
            found.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.temperature != 1.0:
            found.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k > 1:
            found.append(TopKLogitsWarper(self.top_k))
        return found


class TextStream:
    """Iterate over the text that continues what was fed. `feed` more of it at any time and iterate
    again; leave the loop and come back to it.

    Args:
        tokenizer: the model's; it must be a fast one, which decodes token by token.
        method: made for the model.
        sampling: how tokens are chosen.

    Attributes:
        ids: all tokens so far, fed and generated.
        token_ids: those generated since the last input.
        text: their text.
        times_s: seconds that each of them took, the input included in the first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, method: Method, sampling: Sampling):
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"a stream of text needs a fast tokenizer, got a {type(tokenizer).__name__}"
            )
        self.tokenizer, self.method, self.sampling = tokenizer, method, sampling
        end = method.model.generation_config.eos_token_id if sampling.stop_at_end else None
        self.end_ids: list[int] = [] if end is None else torch.as_tensor(end).reshape(-1).tolist()
        self.generator = torch.Generator(method.model.device).manual_seed(sampling.seed)
        self.ids: list[int] = []
        self.num_fed = 0
        self._is_whole = True
        self._begin_answer()

    def feed(self, text: str | Sequence[int]) -> None:
        """Add input after what was generated; the next iteration goes on from there.

        Args:
            text: or its token ids. The tokenizer's special tokens (the beginning of a text) are
                added to a text that begins the stream.

        Raises:
            UserError: nothing in it.
        """
        self.check_whole()
        if isinstance(text, str):
            special = not self.ids
            ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        else:
            ids = list(text)
        if len(ids) == 0:
            raise UserError("the input is empty: give at least one word")
        if self.has_ended:
            self.ids.pop()  # the end token: it has not been fed, and the stream goes on
        self.ids += ids
        self._begin_answer()

    def __iter__(self) -> Iterator[str]:
        self.check_whole()
        if not self.ids:
            raise UserError("this stream has no input: begin it with a prompt, or feed it first")
        limit = self.sampling.max_new_tokens
        while not self.has_ended and (limit is None or len(self.token_ids) < limit):
            start = time.perf_counter()
            self._is_whole = False
            token = next(self._tokens, None)
            self._is_whole = True
            if token is None:
                return
            self.token_ids.append(int(token))  # waits for the device
            self.times_s.append(time.perf_counter() - start)
            self.num_fed = len(self.ids)
            self.ids.append(self.token_ids[-1])
            piece = self._decode(self.token_ids[-1])
            if piece:
                yield piece

    @property
    def has_ended(self) -> bool:
        """Whether the last token is the model's end token, and ends the stream until it is fed."""
        return bool(self.token_ids) and self.token_ids[-1] in self.end_ids

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def timing(self) -> dict[str, float]:
        """Tokens since the last input, seconds to the first (input included) and mean milliseconds
        of each after it.
        """
        later = self.times_s[1:]
        return {
            "num_tokens": len(self.token_ids),
            "ttft_s": self.times_s[0] if self.times_s else 0.0,
            "ms_per_token": 1e3 * sum(later) / len(later) if later else 0.0,
        }

    def save(self, path: str | Path) -> None:
        """Write all that going on later needs to one safetensors file; see `load_stream`."""
        from kvalign.stream_file import save_stream

        save_stream(self, Path(path))

    def check_whole(self) -> None:
        """Raise RunError if an exception ended a step half-way: layers of the cache differ."""
        if not self._is_whole:
            raise RunError(
                "this stream was interrupted inside a step and cannot go on: begin a new one or "
                "load a saved one"
            )

    def resume(self, ids: list[int], num_fed: int, num_new: int) -> None:
        """Go on where a saved stream stopped: its method has been restored.

        Args:
            ids: all its tokens.
            num_fed: those of them that the method has been fed.
            num_new: the last of them, that were generated since the last input.
        """
        self.ids, answer = ids[: len(ids) - num_new], ids[len(ids) - num_new :]
        self._begin_answer()
        self.ids, self.num_fed = ids, num_fed
        self.token_ids.extend(answer)
        for token in answer:
            self._decode(token)

    def _begin_answer(self) -> None:
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self._pieces: list[str] = []
        self._tokens = self._new_tokens()
        # It knows what came before, so that a word in the middle keeps its space.
        self._decoder = DecodeStream(skip_special_tokens=True)
        for token in self.ids[-_OVERLAP:]:
            self._decoder.step(self.tokenizer.backend_tokenizer, token)

    def _new_tokens(self) -> Iterator[Tensor]:
        ids = torch.tensor([self.ids], device=self.method.model.device)
        yield from stream_tokens(
            self.method,
            ids[:, self.num_fed :],
            processors=self.sampling.processors(),
            do_sample=self.sampling.top_k > 1,
            eos_token_ids=self.end_ids,
            generator=self.generator,
            before=ids[:, : self.num_fed] if self.num_fed else None,
        )

    def _decode(self, token: int) -> str | None:
        piece = self._decoder.step(self.tokenizer.backend_tokenizer, token)
        if piece:
            self._pieces.append(piece)
        return piece


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    *,
    method: str = "kvalign",
    cache_size: int = 128,
    num_sinks: int | None = None,
    num_evicted: int | None = None,
    aligner: Aligner | str | Path | None = None,
    **sampling: Any,
) -> TextStream:
    """Stream the text that continues a prompt, past the context length.

    Args:
        model: a causal LM of transformers, in eval mode.
        tokenizer: its tokenizer.
        prompt: text to continue; empty: `feed` the stream before iterating.
        method, cache_size, num_sinks, num_evicted, aligner: as in `kvalign.make_method`.
        sampling: max_new_tokens, top_k, temperature, no_repeat_ngram_size, stop_at_end, seed: see
            `Sampling`. Without max_new_tokens the stream has no end.

    Raises:
        UserError: as in `make_method`, or a tokenizer that cannot stream.
        TypeError: an unknown setting.
    """
    made = make_method(
        method,
        model,
        cache_size=cache_size,
        num_sinks=num_sinks,
        num_evicted=num_evicted,
        aligner=aligner,
    )
    text_stream = TextStream(tokenizer, made, Sampling(**sampling))
    if prompt:
        text_stream.feed(prompt)
    return text_stream
