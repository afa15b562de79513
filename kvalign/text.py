"""A stream as text: prompt in, pieces of text out as tokens come, with the time each took."""

import time
from collections.abc import Iterator

import torch
from tokenizers.decoders import DecodeStream
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from kvalign.generation import stream_tokens
from kvalign.methods import Method
from kvalign.models import LoadedModel


class TextStream:
    """Iterate over the text that continues a prompt; afterwards `text`, `token_ids` and `timing()`
    tell of it.

    Args:
        loaded: model and tokenizer.
        method: made for that model.
        prompt: text to continue, tokenised as the tokenizer does for generation.
        max_new_tokens: where to stop.
        top_k: draw from the k most likely; 1 is greedy.
        temperature: divides the logits.
        no_repeat_ngram_size: over the whole history, 0 for off.
        stop_at_end: end at the model's end token.
        seed: of the draws.

    Raises:
        ValueError: a prompt without a token.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        method: Method,
        prompt: str,
        *,
        max_new_tokens: int,
        top_k: int = 20,
        temperature: float = 1.0,
        no_repeat_ngram_size: int = 0,
        stop_at_end: bool = False,
        seed: int = 0,
    ):
        self.tokenizer, self.max_new_tokens = loaded.tokenizer, max_new_tokens
        device = loaded.model.device
        ids = torch.tensor(
            [self.tokenizer(prompt, verbose=False)["input_ids"]], dtype=torch.int64, device=device
        )
        processors = LogitsProcessorList()
        if no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
        if temperature != 1.0:
            processors.append(TemperatureLogitsWarper(temperature))
        if top_k > 1:
            processors.append(TopKLogitsWarper(top_k))
        end = loaded.model.generation_config.eos_token_id if stop_at_end else None
        self._tokens = stream_tokens(
            method,
            ids,
            processors=processors,
            do_sample=top_k > 1,
            eos_token_ids=[] if end is None else torch.as_tensor(end).reshape(-1).tolist(),
            generator=torch.Generator(device).manual_seed(seed),
        )
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self.text = ""

    def __iter__(self) -> Iterator[str]:
        decoder, backend = DecodeStream(skip_special_tokens=True), self.tokenizer.backend_tokenizer
        while len(self.token_ids) < self.max_new_tokens:
            start = time.perf_counter()
            token = next(self._tokens, None)
            if token is None:
                return
            self.token_ids.append(int(token))  # waits for the device
            self.times_s.append(time.perf_counter() - start)
            piece = decoder.step(backend, self.token_ids[-1])
            if piece:
                self.text += piece
                yield piece

    def timing(self) -> dict[str, float]:
        """Tokens, seconds to the first (prompt included) and mean milliseconds of each after it."""
        later = self.times_s[1:]
        return {
            "num_tokens": len(self.token_ids),
            "ttft_s": self.times_s[0] if self.times_s else 0.0,
            "ms_per_token": 1e3 * sum(later) / len(later) if later else 0.0,
        }
