"""Whether a conversation keeps a name: name, four other turns of 150 words, "What is my name?".

    python tests/scripts/name_kept.py --model smollm2-135m-instruct --seeds 0,1,2,3,4
    python tests/scripts/name_kept.py --weights float32 --dense

No flag of `kvalign chat` is given but the model's and the seed: its defaults must do. A
measurement, not a test. The turns ask for no more than a word: after four long answers of its own a
model of 135M parameters takes another name for the user's, also with all of them in its cache.

`--dense` holds the same conversation with `generate` of transformers, in float32, without KV-Align:
same template, sampling and seed. The default cache loses nothing of it, so with `--weights float32`
the two give the same answers, every character, for each of seeds 0 to 4: 0, 2 and 3 keep the name,
1 and 4 lose it. So what is forgotten is forgotten by the model. With int4, the default, 4 of these
5 keep it, and 11 of seeds 0 to 14; with "Answer in one short sentence." instead 10 of 15, with no
such words 0 of 6. The model is fetched (`kvalign models --fetch`), and takes a minute a seed.
"""

import functools
import json
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from kvalign.app.cli.arguments import parse
from kvalign.foundation.settings import Settings, option
from kvalign.models.loading import LoadedModel, load_model

NAME = "Sarah"
FIRST = f"My name is {NAME}. What is my name?"
BRIEF = "Answer with one word: OK."
LAST = "What is my name?"
TURNS = (
    "On Monday I began to clear the old shed at the end of the garden. It has stood there for "
    "longer than we have had the house, and nobody had opened the door in years. Behind the door "
    "I found two rusty bicycles, a box of jam jars, a broken lamp, and a great many pots of paint "
    "that had dried out. I carried everything onto the lawn and made three heaps: one to keep, one "
    "to give away, and one for the tip. By noon the lawn looked like a market on a rainy day. My "
    "neighbour came over to see what the noise was, and went home with one of the bicycles and "
    "four of the jars. In the evening I swept the floor, mended the window with a new pane of "
    "glass, and hung up a row of hooks for rakes.",
    "On Tuesday it rained from morning to night, so I stayed in the kitchen and baked bread. I "
    "used the flour that my sister brought from the mill, which is coarse and dark, and needs "
    "more water than the flour from the shop. The first loaf came out flat and heavy as a brick. "
    "For the second one I let the dough rest for three hours under a damp cloth, folded it twice, "
    "and heated the iron pot in the oven before I put it in. That loaf rose well and had a crust "
    "that cracked when I cut it. We ate half of it at once, with butter and salt, standing at the "
    "window and watching the rain run down the street. The other half went into a soup with beans "
    "and sage on the next day. I still have five bags of that flour.",
    "On Wednesday I took the early train to the coast, because the weather had cleared up and I "
    "had a day off. The train was almost empty, and for most of the way it runs beside a river "
    "with willows and grey herons. From the station it is half an hour on foot to the beach, down "
    "a lane between stone walls. The tide was out, and I walked along the wet sand as far as the "
    "lighthouse, which is painted in red and white stripes. There is a small museum in it now, "
    "with ropes, lamps, maps, and a stuffed seal that has seen better days. I had fish and chips "
    "on the harbour wall, and a gull stole the last of it out of my hand. On the way back I fell "
    "asleep and nearly missed my stop. Next time I would like to stay for a night or two.",
    "On Thursday I went back to work, and on my desk there was a pile of letters as high as a "
    "loaf. Most of them were bills and notices, but one came from an old school friend, who now "
    "keeps bees in the hills and sells honey at the market. She wrote four pages about the hives, "
    "the long winter, a bear that came down into the village, and her plans for a shop with a "
    "tea room. At the end she asked whether I would come and help her paint the walls in June. I "
    "have not seen her for eleven years, and I do not know the first thing about bees or about "
    "painting. I have put the letter on the shelf above the stove, and each time that I walk past "
    "I read a line of it again. I think that I shall say yes.",
)


@dataclass(frozen=True, kw_only=True)
class NameKeptSettings(Settings):
    """Hold one conversation a seed, and look for the name in its last answer.

    Example:
        python tests/scripts/name_kept.py --seeds 0,1
    """

    model: str = option("smollm2-135m-instruct", help="a model that chats")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), help="seeds of the draws")
    cache_size: int | None = option(None, help="another than the default, to see it forgotten")
    weights: str = option("auto", help="as of kvalign chat")
    dense: bool = option(False, help="hold it with generate of transformers, too")


def run(settings: NameKeptSettings) -> int:
    """Print a line a seed; 1 if the name is not in every last answer."""
    kept, num_dense, num_equal = 0, 0, 0
    for seed in settings.seeds:
        begun_s = time.perf_counter()
        document = talk(settings, seed)
        used, answers = document["settings"], [one["text"] for one in document["answers"]]
        kept += NAME in answers[-1]
        print(
            f"seed {seed}: {'kept' if NAME in answers[-1] else 'FORGOTTEN'} in a cache of "
            f"{used['cache_size']}, weights {used['weights']}, temperature "
            f"{used['temperature']:g}, {time.perf_counter() - begun_s:.0f} s: {answers[-1][:70]!r}",
            flush=True,
        )
        if settings.dense:
            dense = dense_talk(settings.model, used)
            num_dense, num_equal = num_dense + (NAME in dense[-1]), num_equal + (dense == answers)
            print(f"    transformers: {'the same' if dense == answers else repr(dense[-1][:70])}")
    num = len(settings.seeds)
    print(f"the name in {kept} of {num}")
    if settings.dense:
        print(f"with transformers alone in {num_dense} of {num}; the same answers in {num_equal}")
    return int(kept < num)


def turns() -> list[str]:
    """What the user says."""
    return [FIRST, *(f"{turn} {BRIEF}" for turn in TURNS), LAST]


def talk(settings: NameKeptSettings, seed: int) -> dict:
    """The document of the conversation, by the command itself."""
    words = [sys.executable, "-m", "kvalign", "chat", "--model", settings.model]
    words += ["--seed", str(seed), "--weights", settings.weights]
    if settings.cache_size is not None:
        words += ["--cache-size", str(settings.cache_size)]
    for turn in turns():
        words += ["--say", turn]
    done = subprocess.run([*words, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


@functools.cache
def loaded(name: str) -> LoadedModel:
    return load_model(name)


def dense_talk(name: str, used: dict) -> list[str]:
    """The answers of plain transformers, with the sampling and the seed that were used."""
    model, tokenizer = loaded(name).model, loaded(name).tokenizer
    sampling = {key: used[key] for key in ("max_new_tokens", "temperature", "top_k", "top_p")}
    messages: list[dict[str, str]] = []
    torch.manual_seed(used["seed"])
    for turn in turns():
        messages.append({"role": "user", "content": turn})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**inputs, **sampling, do_sample=True)[0]
        answer = tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return [one["content"] for one in messages if one["role"] == "assistant"]


if __name__ == "__main__":
    sys.exit(run(parse(NameKeptSettings, sys.argv[1:], "python tests/scripts/name_kept.py")[0]))
