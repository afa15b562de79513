"""Losses of the authors, analysed as ours: figures, what names tell, what is refused."""

import pytest
import torch

from kvalign.eval.protocol.statistics import by_part, interval
from kvalign.eval.report import read_document
from kvalign.foundation.errors import UserError
from scripts.import_losses import MODES, ImportLossesSettings, run

NUM, SIZES = 400, (32, 64)
LOG = "Perplexity after {n} Label Tokens and Cache Size {c} with Mode {mode}: {p:.4f}. "
LOG += "Took 1.5 seconds\n"


def name_of(mode, size):
    return f"nglls_mode_{mode}_tokens_{NUM}_cache_size_{size}.pt"


@pytest.fixture
def folder(tmp_path):
    """Made-up losses of three modes: those of the network climb, their own log beside them."""
    rng, log = torch.Generator().manual_seed(0), ""
    (tmp_path / "nglls").mkdir()
    for size in SIZES:
        text = 3 + torch.rand(NUM, generator=rng)
        climbs = torch.linspace(0, 2, NUM)
        for mode, nll in zip(MODES, (text, text + 2, text + climbs), strict=True):
            torch.save(nll, tmp_path / "nglls" / name_of(mode, size))
            log += LOG.format(n=NUM, c=size, mode=mode, p=nll.double().mean().exp())
    (tmp_path / "perplexity.log").write_text(log)
    return tmp_path / "nglls"


def test_figures_are_those_of_our_tools(folder, capsys, tmp_path):
    run(ImportLossesSettings(losses=folder, model="distilgpt2"))
    (tmp_path / "one.json").write_text(capsys.readouterr().out)
    document = read_document(tmp_path / "one.json")  # the report takes it
    assert document["settings"]["stepwise"] and document["settings"]["corpus"] == "wikitext"
    rows = document["rows"]
    assert [(r["cache_size"], r["method"], r["num_sinks"]) for r in rows] == [
        (size, *MODES[mode]) for size in SIZES for mode in MODES
    ]
    nll, base = (
        torch.load(folder / name_of(mode, 64)) for mode in ("key_value_net", "with_recompute")
    )
    row = rows[-1]
    assert row["perplexity"] == pytest.approx(nll.double().mean().exp().item())
    assert (row["low"], row["high"]) == interval(nll) and row["seconds"] == 1.5
    assert (row["ratio_low"], row["ratio_high"]) == interval(nll - base)
    quarters = by_part(nll - base, 4)
    assert row["drift"] == quarters[-1] / quarters[0] > 3
    assert [x["end"] for x in row["segments"]] == [1, 2, 4, NUM / 64]
    assert rows[-2]["drift"] == pytest.approx(1)


def saved(value):
    return lambda folder: torch.save(value, folder / name_of("key_value_net", 32))


REFUSED = {
    "code": (saved({"run": len}), "damaged or has more than a tensor, which is not executed"),
    "too few": (saved(torch.ones(NUM - 1)), f"must have {NUM} losses, as its name says"),
    "no reference": (
        lambda folder: (folder / name_of("with_recompute", 64)).unlink(),
        "has no recompute at C = 64: name another --reference",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line(case, folder, capsys):
    change, message = REFUSED[case]
    change(folder)
    with pytest.raises(UserError, match=message):
        run(ImportLossesSettings(losses=folder, model="distilgpt2"))
    assert not capsys.readouterr().out
