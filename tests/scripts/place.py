"""Choose where a shipped aligner computes a full cache, and judge it, on the second half of a text.

    python tests/scripts/place.py --aligner kvalign-gpt2-mini-table-network \
      --corpus text:wikitext-2/test.txt --out FOLDER

`kvalign train` does the same on its own text. That of the shipped aligners was also read by their
models, which know it. The results score the first half of this one.
"""

import shlex
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from kvalign.aligners import Aligner, TableAligner
from kvalign.aligners.base import CARD, CONFIG
from kvalign.aligners.card import card_text
from kvalign.aligners.kinds import TARGETS
from kvalign.app.cli.arguments import parse
from kvalign.data_gen import corpora
from kvalign.foundation.files import write_json, write_text
from kvalign.foundation.settings import Settings, option
from kvalign.models.input_ids import prefix_ids
from kvalign.models.loading import load_model
from kvalign.training.aligner_folder import new_aligner
from kvalign.training.judge import judge
from kvalign.training.placing import place
from kvalign.training.text import Texts
from kvalign.training.text_run import usual_positions

NUM_JUDGED = 50_000  # the last tokens of the text; the others choose positions


@dataclass(frozen=True, kw_only=True)
class PlaceSettings(Settings):
    """Write the config and the card of an aligner that was placed and judged on a text."""

    aligner: str = option(help="shipped table or table-network")
    corpus: str = option(help="text, of which the second half of the lines is read")
    out: Path = option(help="folder for config and card")
    seed: int = option(0, help="of the rows that choose positions")


def run(settings: PlaceSettings) -> None:
    aligner = Aligner.from_pretrained(settings.aligner)
    assert isinstance(aligner, TableAligner)
    config = aligner.config
    loaded = load_model(config.base_model, dtype="float32")
    lines = "".join(corpora.texts(settings.corpus)).splitlines(keepends=True)
    text = "".join(lines[len(lines) // 2 :])
    ids = torch.tensor(loaded.tokenizer(text)["input_ids"])
    texts = Texts([ids[:-NUM_JUDGED]], [ids[-NUM_JUDGED:]], prefix_ids(loaded.tokenizer))
    positions = usual_positions(config.chunk_len, loaded.model)
    aligner.config = config.model_copy(update={"positions": positions})
    untrained = deepcopy(new_aligner(type(aligner), aligner.config).state_dict())
    record = place(aligner, loaded.model, texts, settings.seed)
    judged = judge(aligner, untrained, loaded.model, texts, TARGETS)
    record |= {"val_nll": judged["val_nll"], "judged": judged}
    record["judged_by"] = shlex.join(["python", "tests/scripts/place.py", *sys.argv[1:]])
    training = {kv: {**part, **record} for kv, part in config.training.items()}
    update = {"num_sinks": judged["num_sinks"], "training": training}
    aligner.config = aligner.config.model_copy(update=update)
    settings.out.mkdir(exist_ok=True)
    write_json(settings.out / CONFIG, aligner.config.model_dump(mode="json"))
    write_text(settings.out / CARD, card_text(aligner.config))


if __name__ == "__main__":
    run(parse(PlaceSettings, sys.argv[1:], "python tests/scripts/place.py")[0])
