"""Many streams at once: each must be what it is alone, and what the batch gains is measured.

    python tests/scripts/rows.py --num-rows 64 --longest-prompt 2000

Prompts are pieces of Python's own documentation, of 1 token to the longest, log-uniform.
"""

import json
import sys
import time
from dataclasses import dataclass

import torch

from kvalign import load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import token_pieces
from kvalign.foundation.settings import Settings, option
from kvalign.streaming.loop import stream_rows
from kvalign.streaming.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class RowsSettings(Settings):
    """Generate greedily from prompts of unequal lengths, in one batch and one by one.

    Example:
        python tests/scripts/rows.py --num-rows 8 --max-new-tokens 50 --methods kvalign
    """

    models: tuple[str, ...] = option(("gpt2-mini", "llama-mini"), help="models, comma-separated")
    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half"), help="methods, comma-separated"
    )
    num_rows: int = option(64, help="streams", at_least=1)
    longest_prompt: int = option(2000, help="tokens of the longest prompt", at_least=1)
    max_new_tokens: int = option(200, help="tokens of each stream", at_least=2)
    cache_size: int = option(64, help="entries of each cache", at_least=5)


def run(settings: RowsSettings) -> int:
    """Print a line for each model and method and one of JSON; 1 if a row differs, else 0."""
    cases = [case(model, name, settings) for model in settings.models for name in settings.methods]
    print(json.dumps({"settings": settings.as_dict(), "cases": cases}))
    return int(any(found["num_unlike"] for found in cases))


def case(name: str, method: str, settings: RowsSettings) -> dict:
    """One model and method: rows that differ from what they are alone, and tokens a second."""
    loaded = load_model(name)
    prompts = prompts_of(loaded, settings)
    streaming = make_method(method, loaded.model, cache_size=settings.cache_size)
    greedy = Sampling(top_k=1, max_new_tokens=settings.max_new_tokens)
    together, rate = generated(streaming, prompts, greedy)
    alone = [generated(streaming, [prompt], greedy) for prompt in prompts]
    num_unlike = sum(together[i] != tokens[0] for i, (tokens, _) in enumerate(alone))
    rate_alone = sum(x for _, x in alone) / len(alone)
    print(
        f"{name} {method}: {len(prompts)} prompts of {min(map(len, prompts))} to "
        f"{max(map(len, prompts))} tokens, {num_unlike} rows differ, {rate:.0f} tokens/s together, "
        f"{rate_alone:.0f} alone: {rate / rate_alone:.1f} times",
        flush=True,
    )
    return {
        "model": name,
        "method": method,
        "num_unlike": num_unlike,
        "tokens_per_s": rate,
        "tokens_per_s_alone": rate_alone,
        "gain": rate / rate_alone,
    }


def prompts_of(loaded, settings: RowsSettings) -> list[list[int]]:
    ids: list[int] = []
    for piece in token_pieces("python-docs", loaded.tokenizer, "test"):
        ids += piece
        if len(ids) > 4 * settings.longest_prompt:
            break
    spread = torch.linspace(0, 1, settings.num_rows)
    lens = [round(settings.longest_prompt**x) for x in spread.tolist()]
    starts = torch.linspace(0, len(ids) - settings.longest_prompt, settings.num_rows).long()
    return [ids[start : start + n] for start, n in zip(starts.tolist(), lens, strict=True)]


def generated(method, prompts, sampling) -> tuple[dict[int, list[int]], float]:
    """The tokens of each row, and tokens a second once all prompts have been read."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    num_first, start = 0, 0.0
    for row, token in stream_rows(method, prompts, sampling=sampling):
        tokens[row].append(token)
        if num_first < len(prompts):
            num_first += 1
            start = time.perf_counter()
    num_later = sum(map(len, tokens.values())) - num_first
    return tokens, num_later / (time.perf_counter() - start)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run(parse(RowsSettings, sys.argv[1:], "python tests/scripts/rows.py")[0]))
