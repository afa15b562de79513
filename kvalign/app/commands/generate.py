"""`kvalign generate`: stream text past the context length."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.errors import UserError
from kvalign.settings import NUM_SINKS, ModelSettings, option


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(ModelSettings):
    """Stream text past the context length: text on stdout, timings on stderr, Ctrl-C ends it.

    Example:
        kvalign generate --cache-size 32 --max-new-tokens 40 --prompt "The history of the island"
    """

    method: str = option("kvalign", help="streaming method; an unknown name lists the known ones")
    prompt: str | None = option(None, help="text to continue")
    prompt_file: Path | None = option(None, help="file with the text to continue")
    max_new_tokens: int = option(200, help="tokens to generate", at_least=1)
    cache_size: int = option(64, help="entries the cache keeps, sinks included", at_least=1)
    num_sinks: int | None = option(None, help=NUM_SINKS, at_least=0)
    num_evicted: int | None = option(
        None, help="entries evicted at once (default: 1; discard-half: half the window)", at_least=1
    )
    aligner: str | None = option(
        None, help="aligner of kvalign: folder, hub id or shipped name (default: shipped)"
    )
    top_k: int = option(
        20, help="draw from the k most likely tokens; 1 takes the most likely", at_least=1
    )
    temperature: float = option(1.0, help="divides the logits before drawing", above=0)
    no_repeat_ngram_size: int = option(
        0, help="never repeat an n-gram of this size; 0: off", at_least=0
    )
    stop_at_end: bool = option(False, help="stop at the model's end-of-text token")
    seed: int = option(0, help="seed of the draws")


SETTINGS = GenerateSettings


def run(settings: GenerateSettings, as_json: bool) -> None:
    import json
    import sys

    prompt = read_prompt(settings.prompt, settings.prompt_file)  # before the heavy imports
    from kvalign.methods import METHODS
    from kvalign.models import load_model
    from kvalign.text_stream import stream

    METHODS.find(settings.method)  # before the model is loaded
    loaded = load_model(settings.model, settings.device, settings.dtype)
    text_stream = stream(
        loaded.model,
        loaded.tokenizer,
        prompt,
        method=settings.method,
        cache_size=settings.cache_size,
        num_sinks=settings.num_sinks,
        num_evicted=settings.num_evicted,
        aligner=settings.aligner,
        max_new_tokens=settings.max_new_tokens,
        top_k=settings.top_k,
        temperature=settings.temperature,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        stop_at_end=settings.stop_at_end,
        seed=settings.seed,
    )
    if not as_json:
        print(prompt, end="", flush=True)
    try:
        for piece in text_stream:
            if not as_json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    timing = text_stream.timing()
    if as_json:
        document = {"settings": settings.as_dict(), "prompt": prompt, "text": text_stream.text}
        print(json.dumps({**document, "token_ids": text_stream.token_ids, **timing}))
    else:
        print()
    print(
        "{num_tokens} tokens by {method}: first after {ttft_s:.2f} s, then {ms_per_token:.2f} "
        "ms/token".format(method=text_stream.method.title, **timing),
        file=sys.stderr,
    )


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from one of the two flags; UserError unless exactly one is given and it is not
    empty.
    """
    if (prompt is None) == (prompt_file is None):
        raise UserError("give the text to continue with either --prompt or --prompt-file")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{prompt_file} is not UTF-8 text: {error}") from None
    assert prompt is not None
    if not prompt.strip():
        raise UserError("the prompt is empty: give at least one word")
    return prompt
