"""Names of aligners in rows of results: as short as possible, but different.

A shipped aligner, or one in `kvalign-data/MODEL`, is called by its last part (`table`), unless
another in the same table has that name. Other aligners are called by the differing end of their
path (`a-table`, `x/table`), else by the whole path with its revision. What an aligner corrects
stands behind any of these names unless that is all: `a-table: keys`.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import PurePath

from kvalign import checkpoints
from kvalign.aligners.kinds import often
from kvalign.eval.protocol.evaluation import SIZES, Row
from kvalign.foundation.folders import ROOT

_FACTS = ("aligner_label", "aligner_path", "aligner_revision")
_SIZES = tuple(name for name in SIZES if not name.startswith("aligner"))


def identity_of(row: Row) -> Hashable:
    """Return the fields that identify a row, whatever the name of its aligner in a document."""
    return _aligner_of(row), *map(row.get, _SIZES)


def names_of(rows: Sequence[Row]) -> list[str | None]:
    """Name for the aligner of each row, the same for the same aligner, and different for two; None
    for rows without one. It includes how often it realigns.
    """
    forms = {_aligner_of(row): _forms(row) for row in rows if row["aligner"]}
    while True:
        number = Counter(names[0] for names in forms.values())
        clashing = [names for names in forms.values() if number[names[0]] > 1 and len(names) > 1]
        if not clashing:
            break
        for names in clashing:
            del names[0]
    return [
        row["aligner"] and often(forms[_aligner_of(row)][0], row.get("realign_every") or 1)
        for row in rows
    ]


def renamed(rows: Iterable[Row]) -> list[Row]:
    """Rows with the names that their aligners get beside each other."""
    rows = list(rows)
    return [row | {"aligner": name} for row, name in zip(rows, names_of(rows), strict=True)]


def _aligner_of(row: Row) -> Hashable:
    """Return what tells an aligner from others; in older documents its name alone. These do not say
    what it corrects, which its weights decide.
    """
    label, path, revision = map(row.get, _FACTS)
    if not label:
        return row["aligner"]
    return label.partition(": ")[0] if revision else label, path, revision


def _forms(row: Row) -> list[str]:
    """Names of a row's aligner, the short ones first."""
    label, path, revision = map(row.get, _FACTS)
    if label is None:
        return [row["aligner"]]
    if path is None:
        return [f"untrained {label}"]
    parts = PurePath(path).parts
    ends = [PurePath(*parts[-n:]).as_posix() for n in range(1, len(parts) + 1)]
    _, colon, targets = label.partition(": ")
    ends = [f"{end}{colon}{targets}" for end in (*ends, f"{path}@{revision}")]
    is_ours = checkpoints.aligner_path(path) or parts[-3:-2] == (ROOT.name,)
    return [*([label] if is_ours or not parts else []), *ends]
