"""Folders of aligners that came from somewhere: refused before anything runs, in one line."""

import pytest
import torch
from helpers.hostile_weights import all_of, more, number, one, raw
from helpers.refusals import altered_aligner, refuses

from kvalign import checkpoints
from kvalign.aligners import Aligner

HUGE = 2**31 - 1
TABLE, NETWORK = "kvalign-gpt2-mini-table", "kvalign-gpt2-mini-network"
WEIGHTS = {
    "nan": (one("key", number(float("nan"))), "key is not finite"),
    "extra": (more(extra=torch.zeros(2)), "extra"),
    "escape": (more(**{"\x1b[31m": torch.zeros(2)}), "31m"),
    "empty file": (raw(b""), "cannot read the weights"),
}
SIZES = dict.fromkeys(("num_layers", "num_kv_heads", "head_dim"), HUGE)
HIDDEN = {"sizes.key_hidden1": HUGE, "sizes.key_hidden2": HUGE}
CONFIGS = {
    "no kind": (TABLE, {"kind": None}, "kind"),
    "kind unknown": (TABLE, {"kind": "tables"}, "unknown aligner kind 'tables'"),
    "all huge": (TABLE, SIZES, "sizes do not make a table"),
    "a huge network": (NETWORK, HIDDEN, "sizes do not"),
    "another size": (NETWORK, {"sizes.key_hidden1": 128}, "must be"),
}


@pytest.mark.parametrize(("weights", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights(weights, message, tmp_path):
    folder = altered_aligner(tmp_path / "a", weights=weights)
    refuses(lambda: Aligner.from_pretrained(folder), message)


@pytest.mark.parametrize(("name", "config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configs(name, config, message, tmp_path):
    folder = altered_aligner(tmp_path / "a", name, config=config)
    refuses(lambda: Aligner.from_pretrained(folder), message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [TABLE, NETWORK])
def test_weights_of_any_float_type_are_taken(dtype, name, tmp_path):
    shipped = Aligner.from_pretrained(name).state_dict()
    folder = altered_aligner(tmp_path / "a", name, weights=all_of(dtype))
    for key, x in Aligner.from_pretrained(folder).state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x, shipped[key].to(dtype).float())


def test_what_ships_is_taken():
    for name in checkpoints.ALIGNERS:
        Aligner.from_pretrained(name)
