"""Folders of aligners that came from somewhere: refused before anything runs, in one line."""

import pytest
import torch
from helpers.hostile_weights import all_of, more, number, one, raw
from helpers.refusals import altered_aligner, refuses

from kvalign import checkpoints
from kvalign.aligners import Aligner

HUGE = 2**31 - 1
NETWORK = "kvalign-gpt2-mini-network"
WEIGHTS = {
    "nan": (one("key", number(float("nan"))), "key is not finite"),
    "int64": (one("key", lambda x: x.long()), "key must be"),
    "extra": (more(extra=torch.zeros(2)), "extra"),
    "path": (more(**{"../../x": torch.zeros(2)}), "../../x"),
    "escape": (more(**{"\x1b[31m": torch.zeros(2)}), "31m"),
    "one less": (one("value", lambda x: x[..., :-1].contiguous()), "value must be"),
    "a zero scale": (one("value_scale", number(0.0, 7)), "value_scale must not be 0"),
    "overflow": (lambda t: t | {"key": t["key"].double() + 1e39}, "key is not finite"),
    "empty file": (raw(b""), "cannot read the weights"),
}
CONFIGS = {
    "no kind": ({"kind": None}, "kind"),
    "no family": ({"family": None}, "family: Field required"),
    "kind unknown": ({"kind": "tables"}, "unknown aligner kind 'tables'"),
    "kind a path": ({"kind": "../x"}, "unknown aligner kind"),
    "family unknown": ({"family": "sinusoidal"}, "family"),
    "layers huge": ({"num_layers": HUGE}, "key must be"),
    "all huge": (
        dict.fromkeys(("num_layers", "num_kv_heads", "head_dim"), HUGE),
        "sizes do not make a table",
    ),
    "sinks above": ({"num_sinks": 300}, "num_sinks"),
    "shifts 0": ({"shifts": [0]}, "shifts"),
    "more fields in several lines": ({"a\nb": 1}, r"'a\nb': Extra"),
    "sizes of a table": ({"sizes": {"key_hidden1": 4}}, "sizes"),
}
NETWORKS = {
    "no sizes": ({"sizes": {}}, "sizes"),
    "all sizes huge": ({"sizes.key_hidden1": HUGE, "sizes.key_hidden2": HUGE}, "sizes do not"),
    "a size more": ({"sizes.other": 3}, "sizes"),
    "another size": ({"sizes.key_hidden1": 128}, "must be"),
    "no place": ({"num_sinks": 255}, "num_sinks"),
}


@pytest.mark.parametrize(("weights", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights(weights, message, tmp_path):
    folder = altered_aligner(tmp_path / "a", weights=weights)
    refuses(lambda: Aligner.from_pretrained(folder), message)


@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configs(config, message, tmp_path):
    folder = altered_aligner(tmp_path / "a", config=config)
    refuses(lambda: Aligner.from_pretrained(folder), message)


@pytest.mark.parametrize(("config", "message"), NETWORKS.values(), ids=NETWORKS)
def test_configs_of_networks(config, message, tmp_path):
    folder = altered_aligner(tmp_path / "a", NETWORK, config=config)
    refuses(lambda: Aligner.from_pretrained(folder), message)


@pytest.mark.parametrize("objective", [["kl"], 3, None, {"a": 1}, "kl"])
def test_what_it_was_trained_on_is_a_name(objective, tmp_path):
    folder = altered_aligner(tmp_path / "a", config={"training": {"key": {"objective": objective}}})
    assert Aligner.from_pretrained(folder).label == f"table-{objective}: keys"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["kvalign-gpt2-mini-table", NETWORK])
def test_weights_of_any_float_type_are_taken(dtype, name, tmp_path):
    shipped = Aligner.from_pretrained(name).state_dict()
    folder = altered_aligner(tmp_path / "a", name, weights=all_of(dtype))
    for key, x in Aligner.from_pretrained(folder).state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x, shipped[key].to(dtype).float())


def test_what_ships_is_taken():
    for name in checkpoints.ALIGNERS:
        Aligner.from_pretrained(name)
