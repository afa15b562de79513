"""Whether the aligners that ship would be used if they were trained today: `kvalign.training.judge`
on text that none of them was trained on.

    python tests/scripts/shipped_aligners.py --aligners kvalign-gpt2-mini-table

Prints a row of a table an aligner: perplexities over the same labels, with the sinks of each.
"""

import argparse
import math
from itertools import chain, islice

import torch

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.corpora import token_pieces
from kvalign.models.loading import load_model
from kvalign.training.judge import judge
from kvalign.training.text import Text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aligners", default=",".join(checkpoints.ALIGNERS))
    parser.add_argument("--corpus", default="python-docs")
    parser.add_argument("--num-tokens", type=int, default=40_000)
    args = parser.parse_args()
    print("| aligner | sinks | nothing | keys | values | both | discard-half | used |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.aligners.split(","):
        aligner = Aligner.from_pretrained(name)
        loaded = load_model(aligner.config.base_model)
        pieces = token_pieces(args.corpus, loaded.tokenizer, "test")
        val = torch.tensor([*islice(chain.from_iterable(pieces), args.num_tokens)])
        untrained = type(aligner)(aligner.config).state_dict()
        text = Text([], [val], is_recall=args.corpus == "recall")
        found = judge(aligner, untrained, loaded.model, text, TARGETS)
        rows: dict[int, dict[tuple[str, ...], float]] = {}
        for row in found["streams"]:
            rows.setdefault(row["num_sinks"], {})[tuple(row["parts"])] = math.exp(row["val_nll"])
        chosen = f"{' and '.join(found['parts']) or 'nothing'}, {found['num_sinks']} sinks"
        for num_sinks, perplexities in rows.items():
            cells = [perplexities.get(parts) for parts in ((), ("key",), ("value",), TARGETS)]
            of_chosen = num_sinks == found["num_sinks"]
            cells.append(math.exp(found["discard_half"]) if of_chosen else None)
            said = " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells)
            print(
                f"| `{name}` | {num_sinks} | {said} | {chosen if of_chosen else ''} |", flush=True
            )


if __name__ == "__main__":
    main()
