"""An agent whose tool results are pruned two turns later: tokens that a server encodes, time and
answers, with and without --edit.

    python tests/scripts/agent_edits.py --model smollm2-135m-instruct --corpus python-docs

Each turn brings a result of 300 tokens of the corpus. The third turn after it sends one line in its
place, as agents prune what they have read.
"""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone
from helpers.served import serving

from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import first_ids
from kvalign.foundation.settings import ModelSettings, option
from kvalign.models.loading import load_model

NUM_TURNS, NUM_TOKENS, KEPT_TURNS = 10, 300, 2
PRUNED = "(This result was removed.)"


@dataclass(frozen=True, kw_only=True)
class AgentSettings(ModelSettings):
    """Compare a server with and without --edit on an agent's conversation."""

    corpus: str = option("python-docs", help="the text of the results")
    cache_size: int = option(4000, help="entries of the cache, more than the conversation has")
    max_tokens: int = option(16, help="tokens of an answer")


def talk(settings: AgentSettings, loaded, edit: bool) -> tuple[list[int], list[float], list[str]]:
    """Tokens encoded, seconds and answer of each turn."""
    ids = first_ids(settings.corpus, loaded.tokenizer, NUM_TURNS * NUM_TOKENS, "NUM_TURNS")
    results = [
        loaded.tokenizer.decode(ids[i * NUM_TOKENS : (i + 1) * NUM_TOKENS])
        for i in range(NUM_TURNS)
    ]
    codes = [random.Random(i).randrange(10_000, 100_000) for i in range(NUM_TURNS)]
    encoded, seconds, answers = [], [], []
    sizes = dict(cache_size=settings.cache_size, edit=edit)
    with serving(loaded, **sizes) as server, server.client() as client:
        for turn in range(NUM_TURNS):
            messages = []
            for i in range(turn + 1):
                result = results[i] if turn - i <= KEPT_TURNS else PRUNED
                head = f"Result {i + 1} of the tool, code {codes[i]}:\n"
                text = f"{head}{result}\nWhich code does this result have?"
                messages.append({"role": "user", "content": text})
                if i < turn:
                    messages.append({"role": "assistant", "content": answers[i]})
            began = time.perf_counter()
            how = dict(model=loaded.spec.name, max_tokens=settings.max_tokens, temperature=0)
            reply = client.chat.completions.create(messages=messages, **how)
            seconds.append(time.perf_counter() - began)
            usage = reply.usage
            cached = usage.prompt_tokens_details.cached_tokens
            encoded.append(usage.prompt_tokens - cached)
            answers.append(reply.choices[0].message.content)
    return encoded, seconds, answers


if __name__ == "__main__":
    settings = parse(AgentSettings, sys.argv[1:], Path(__file__).name)[0]
    loaded = load_model(settings.model, settings.device, settings.dtype, settings.weights)
    for edit in (False, True):
        encoded, seconds, answers = talk(settings, loaded, edit)
        print(
            f"{'with' if edit else 'without'} --edit: {sum(encoded)} tokens encoded, "
            f"{sum(seconds):.1f} s; turns {', '.join(map(str, encoded))}",
            flush=True,
        )
        for i, answer in enumerate(answers, start=1):
            print(f"  {i}: {answer!r}", flush=True)
