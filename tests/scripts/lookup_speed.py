"""How much sooner `--lookup` writes the same text: on text that repeats, and on text that does not.

    python tests/scripts/lookup_speed.py --model smollm2-135m-instruct --cache-size 512

A stream with lookup and one without write the same text, in short turns of random order.
"""

import argparse
import random
import time

import torch

import kvalign
from kvalign.models.loading import LoadedModel, load_model
from kvalign.streaming.text_stream import TextStream
from kvalign.streaming.turns import Talk

CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items[-1]

class Queue:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the queue is empty")
        return self.items.pop(0)
"""
LETTER = """\
Dear Ms Okafor, thank you for your order of 14 September. The blue lamp that you chose is out of \
stock until the end of October. You can wait for it, choose the green one, which costs the same, \
or have your 48 euros back. Please tell us by Friday what you prefer. We are sorry for the delay. \
Kind regards, Jonas Weber, Lampenhaus Weber, Cologne."""
GREEDY, DRAWN = dict(temperature=0), dict(temperature=1.0, top_k=0, seed=1)
SIZED = (
    f"Here is some code:\n\n{CODE}\nAdd a method `size` to both classes and show the whole code."
)
TEXTS = {
    "repeats: code": (SIZED, GREEDY),
    "repeats: code, drawn": (SIZED, dict(temperature=0.5, seed=1)),
    "repeats: a letter": (f"Correct the spelling and write all of it:\n\n{LETTER}", GREEDY),
    "does not: a story": ("Tell me a long story about a lighthouse and a ship.", DRAWN),
    "does not: history": ("What do you know about the history of bread?", DRAWN | dict(seed=2)),
    "does not: likely words": ("Tell me about the history of bread.", dict(seed=3)),
}


def begin(loaded: LoadedModel, text: str, args: argparse.Namespace, lookup: int) -> TextStream:
    """A stream of a text, whose prompt has been read."""
    prompt, sampling = TEXTS[text]
    sizes = dict(cache_size=args.cache_size, max_new_tokens=args.num_tokens, stop_at_end=True)
    stream = kvalign.stream(loaded.model, loaded.tokenizer, **sizes, lookup=lookup, **sampling)
    stream.feed(Talk(loaded.tokenizer).turn_ids(prompt, True))
    next(iter(stream))
    return stream


def write(stream: TextStream, num_tokens: int) -> float:
    """Seconds that so many tokens more take, or as many as there are."""
    end, start = len(stream.ids) + num_tokens, time.perf_counter()
    for _ in stream:
        if len(stream.ids) >= end:
            break
    return time.perf_counter() - start


def compare(loaded: LoadedModel, text: str, args: argparse.Namespace) -> str:
    """A line of figures."""
    plain, looked_up = streams = [begin(loaded, text, args, x) for x in (0, args.lookup)]
    seconds = [0.0, 0.0]
    for _ in range(-(-args.num_tokens // args.turn_len)):
        for i in random.sample((0, 1), 2):
            seconds[i] += write(streams[i], args.turn_len)
    nums = [len(stream.token_ids) - 1 for stream in streams]
    without, with_it = (num / s for num, s in zip(nums, seconds, strict=True))
    same = "the same tokens" if plain.ids == looked_up.ids else f"OTHER TOKENS, {nums[1]}"
    return (
        f"{text:24} {with_it / without:5.2f} times the tokens a second: {nums[0]} tokens, "
        f"{without:.1f} a second without, {with_it:.1f} with; {same}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-mini")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--cache-size", type=int, default=200)
    parser.add_argument("--lookup", type=int, default=8)
    parser.add_argument("--num-tokens", type=int, default=400)
    parser.add_argument("--turn-len", type=int, default=40)
    parser.add_argument("--texts", default="", help="those whose names begin so")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(args.model, dtype="float32", weights=args.weights)
    for text in TEXTS:
        if text.startswith(args.texts):
            print(compare(loaded, text, args), flush=True)


if __name__ == "__main__":
    main()
