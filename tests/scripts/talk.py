"""A talk of 13 turns with a small chat model: how often do its answers repeat earlier ones, how
likely are they, and is a name that was told in the first turn known in the last?

    python tests/scripts/talk.py --chat-flags="--repetition-penalty 1" --seeds 0,1

Prints one JSON document with a row for each seed. An answer repeats an earlier one if it is equal
to it without case and punctuation, or if half of its runs of 4 words stand there. The perplexity is
that of all answers in the talk, as the model gives it without penalties and without a cache.
"""

import json
import math
import shlex
import sys
import time
from dataclasses import dataclass

import torch

from kvalign.app.cli.arguments import parse
from kvalign.app.sessions.conversation import Conversation, ConversationSettings
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option

NAME = "Ingeborg"
TURNS = (
    f"Hello! My name is {NAME}, and I would like to ask you a few things.",
    "What should I cook tonight with eggs, spinach and an onion?",
    "Why is the sky blue?",
    "My bicycle has a flat tyre. How do I mend it?",
    "Name three cities that are worth a visit in winter.",
    "How do I fall asleep more easily?",
    "What does a bee do all day?",
    "Write two sentences about the sea.",
    "How much water should a tomato plant get?",
    "What is the difference between a lake and a pond?",
    "I have to give a speech at a wedding. How do I begin?",
    "Which sport would you advise to somebody with a bad knee?",
    "And now tell me: what is my name?",
)


@dataclass(frozen=True, kw_only=True)
class TalkScriptSettings(Settings):
    """Hold the same talk with several seeds, as `kvalign chat` does."""

    model: str = option("smollm2-135m-instruct", help="a chat model")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), help="seeds, a talk each", at_least=0)
    num_turns: int = option(len(TURNS), help="first turns to say", at_least=1)
    chat_flags: str = option("", help="more of kvalign chat, as --chat-flags='--memory 100000'")


def words(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    kept = "".join(one for one in text.lower() if one.isalnum() or one.isspace())
    return kept.split()


def runs(text: str) -> set[tuple[str, ...]]:
    """Its runs of 4 words."""
    of = words(text)
    return {*zip(of, of[1:], of[2:], of[3:], strict=False)}


def repeats(text: str, earlier: list[str]) -> bool:
    """Return whether an answer repeats one of the earlier ones."""
    own = runs(text)
    return any(
        words(text) == words(one) or (own and 2 * len(own & runs(one)) >= len(own))
        for one in earlier
    )


@torch.inference_mode()
def nll_of(model: torch.nn.Module, ids: list[int], answers: list[tuple[int, int]]) -> list[float]:
    """Nats of each token of the answers, each of which has a begin and an end in `ids`."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    places = [place for begin, end in answers for place in range(begin, end)]
    before = logits[torch.tensor(places) - 1].float().log_softmax(-1)
    return (-before[range(len(places)), [ids[place] for place in places]]).tolist()


def measure(settings: TalkScriptSettings) -> dict:
    """A document of the talks, a row a seed."""
    started, rows, turns = time.perf_counter(), [], TURNS[: settings.num_turns]
    flags = [*shlex.split(settings.chat_flags), "--model", settings.model]
    chat, _ = parse(ConversationSettings, flags, "kvalign chat")
    loaded = chat.load()
    for seed in settings.seeds:
        own, _ = parse(ConversationSettings, [*flags, "--seed", str(seed)], "kvalign chat")
        conversation, texts = Conversation(own, loaded), []
        stream, begun = conversation.stream, time.perf_counter()
        for turn in turns:
            for _ in conversation.answer(turn):
                pass
            texts.append(stream.text)
        seconds = time.perf_counter() - begun
        last = (len(stream.ids) - len(stream.token_ids), len(stream.ids))
        nll = nll_of(loaded.model, stream.ids, [*stream.answers, last])
        row = {"seed": seed, "sampling": stream.sampling.in_flags(), "num_tokens": len(nll)}
        row["num_repeats"] = sum(repeats(one, texts[:i]) for i, one in enumerate(texts))
        row |= {"perplexity": math.exp(sum(nll) / len(nll)), "seconds": seconds}
        row |= {"knows_name": NAME.lower() in words(texts[-1]), "answers": texts}
        rows.append(row)
        about = ("seed", "num_repeats", "perplexity", "num_tokens", "knows_name", "seconds")
        print({name: row[name] for name in about}, file=sys.stderr, flush=True)
    return document("script talk", settings, rows, started=started, turns=list(turns))


if __name__ == "__main__":
    settings, _ = parse(TalkScriptSettings, sys.argv[1:], "python tests/scripts/talk.py")
    print(json.dumps(measure(settings)))
