"""Figures in sentences are those of the documents (helpers/claims.py)."""

import re

import pytest
from helpers import claims
from helpers.claims import Claim
from helpers.doc_pages import ROOT

from kvalign.foundation.errors import UserError


@pytest.mark.parametrize("page", claims.NAMES)
def test_sentences_say_what_their_documents_say(page):
    assert claims.page_faults(page) == []


def test_claims_are_of_pages_that_are_there():
    assert set(claims.ledger()) <= set(claims.NAMES)


@pytest.mark.parametrize("card", sorted((ROOT / "checkpoints").glob("*/README.md")))
def test_a_card_has_the_command_that_made_it(card):
    text = card.read_text(encoding="utf-8")
    assert re.search(r"\d\.\d", text) and re.search(
        r"kvalign (?:train|tune|pretrain) .*--out", text
    )


TEXT = """# 3.5 times

A step takes *1.21 to
1.30 times* as long, 12 % of it ([plot](a-1.5.png)), in version 2.13. `x=0.5` at C = 32 and 64.

| a table | 7.5 |
|---|---|

```bash
sleep 0.5
```
"""
RATIOS = Claim(says="*{:.2f} to {:.2f} times*", **{"from": 'ends(of("part/cell", "ms") / 10)'})
SHARE = Claim(says="12 % of it", by="sleep 0.5")


@pytest.mark.parametrize(
    ("claim", "fault"),
    [
        (None, None),
        (Claim(says="takes {:.1f} times", **{"from": "3"}), "0 times: takes 3.0 times"),
        (Claim(says="A step", holds='of("part/cell", "ms").max() < 13'), "no longer so: A step"),
        (Claim(says="12 % of it", by="wake"), "does not name what measured: wake"),
    ],
)
def test_a_claim_that_is_not_so_is_found(claim, fault, monkeypatch):
    rows = [{"ms": 12.1, "cache_size": 32}, {"ms": 13.0, "cache_size": 64}]
    monkeypatch.setattr(claims, "_documents", lambda part: {"cell": {"kind": "", "rows": rows}})
    found = claims.faults(TEXT, [RATIOS, SHARE, *[claim] * bool(claim)])
    assert [fault in one for one in found] == [True] * bool(fault)


def test_a_claim_has_a_figure_for_each_place():
    with pytest.raises(UserError, match="1 figures for 2 places"):
        claims.faults(TEXT, [Claim(says="{:.1f} of {:.1f}", **{"from": "12"})])


def test_a_figure_without_a_claim_is_found():
    found = claims.faults(TEXT, [])
    assert [one.partition("no claim for ")[2].split()[0] for one in found] == ["1.21", "1.30", "12"]
    more = "Of 1 200 MB 0.5 are read, 3, 4 and 5 % lost, 2 of 8 found and 7 kept."
    assert len(claims.faults(more, [])) == 7
