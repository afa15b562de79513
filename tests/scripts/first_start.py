"""What the first Start of `kvalign demo-ui` shows, over seeds: the perplexity of what each method
writes, read again with nothing stale. Which seed the page begins with is chosen by it.

    python tests/scripts/first_start.py --seeds 14
"""

import argparse
from statistics import median

from tqdm import tqdm

from kvalign.app.pages.page import DEFAULT_METHODS, PROMPT
from kvalign.app.pages.side_by_side import View, begin, side_by_side
from kvalign.eval.judging.words import load_words
from kvalign.models.loading import load_model

CACHE_SIZE, NUM_TOKENS = 64, 600  # the page's defaults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=14, help="0 to this, less one")
    loaded, words = load_model("gpt2-mini"), load_words().words
    found: dict[str, list[float]] = {}
    for seed in tqdm(range(parser.parse_args().seeds), unit="seed"):
        streams = begin(
            loaded,
            PROMPT,
            DEFAULT_METHODS,
            cache_size=CACHE_SIZE,
            num_evicted=1,
            seed=seed,
            max_new_tokens=NUM_TOKENS,
        )
        *_, views = side_by_side(streams, words, shown_every_s=1e9)
        for view in views:
            assert isinstance(view, View) and view.perplexity is not None
            found.setdefault(view.title, []).append(view.perplexity)
    for title, values in found.items():
        each = " ".join(f"{value:.1f}" for value in values)
        print(f"{title}: median {median(values):.1f}; {each}")


if __name__ == "__main__":
    main()
