"""`kvalign generate`: stream text past the context length."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.app.stream_settings import StreamSettings
from kvalign.errors import UserError
from kvalign.settings import NUM_SINKS, option


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(StreamSettings):
    """Stream text past the context length: text on stdout, timings on stderr, Ctrl-C ends it.

    Example:
        kvalign generate --cache-size 32 --max-new-tokens 40 --prompt "The history of the island"
    """

    prompt: str | None = option(None, help="text to continue")
    prompt_file: Path | None = option(None, help="file with the text to continue")
    num_sinks: int | None = option(None, help=NUM_SINKS, at_least=0)


SETTINGS = GenerateSettings


def run(settings: GenerateSettings, as_json: bool) -> None:
    import json
    import sys

    from tqdm.auto import tqdm

    prompt = read_prompt(settings.prompt, settings.prompt_file)
    text_stream = settings.stream(settings.load(), prompt, settings.num_sinks)
    if not as_json:
        print(prompt, end="", flush=True)
    bar = tqdm(total=len(text_stream.ids), desc="prompt", unit="token", delay=1, leave=False)
    text_stream.method.on_tokens = bar.update
    try:
        for piece in text_stream:
            bar.close()
            if not as_json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        bar.close()
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
    """The prompt from one of the two flags.

    Raises:
        UserError: both or neither are given, or there is no text in it.
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
