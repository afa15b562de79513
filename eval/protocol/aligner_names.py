"""Names of aligners in rows of results: as short as keeps them apart.

`table` of one that ships or lies in `kvalign-data/MODEL`, where no other aligner beside it is
called so; else, as of the user's own folders, the end of its path as far as it differs (`a-table`,
`x/table`), else the whole of it with its revision.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import PurePath

from kvalign import checkpoints
from kvalign.eval.protocol.evaluation import SIZES, Row
from kvalign.foundation.folders import ROOT

_FACTS = ("aligner_label", "aligner_path", "aligner_revision")
_SIZES = tuple(name for name in SIZES if not name.startswith("aligner"))


def identity_of(row: Row) -> Hashable:
    """Return what tells a row from others; its aligner may be called otherwise in another
    document.
    """
    return _aligner_of(row), *map(row.get, _SIZES)


def names_of(rows: Sequence[Row]) -> list[str | None]:
    """A name for the aligner of each row, the same for the same one, and none for two; None for
    rows without any. How often it realigns is part of it.
    """
    forms = {_aligner_of(row): _forms(row) for row in rows if row["aligner"]}
    while True:
        number = Counter(names[0] for names in forms.values())
        clashing = [names for names in forms.values() if number[names[0]] > 1 and len(names) > 1]
        if not clashing:
            break
        for names in clashing:
            del names[0]
    return [row["aligner"] and _often(forms[_aligner_of(row)][0], row) for row in rows]


def renamed(rows: Iterable[Row]) -> list[Row]:
    """Rows with the names that their aligners get beside each other."""
    rows = list(rows)
    return [row | {"aligner": name} for row, name in zip(rows, names_of(rows), strict=True)]


def _aligner_of(row: Row) -> Hashable:
    """Return what tells an aligner from others; in older documents its name alone."""
    facts = tuple(map(row.get, _FACTS))
    return facts if any(facts) else row["aligner"]


def _forms(row: Row) -> list[str]:
    """Names of a row's aligner, the short ones first."""
    label, path, revision = map(row.get, _FACTS)
    if label is None:
        return [row["aligner"]]
    if path is None:
        return [f"untrained {label}"]
    parts = PurePath(path).parts
    ends = [PurePath(*parts[-n:]).as_posix() for n in range(1, len(parts) + 1)]
    is_ours = checkpoints.aligner_path(path) or parts[-3:-2] == (ROOT.name,)
    return [*([label] if is_ours or not parts else []), *ends, f"{path}@{revision}"]


def _often(name: str, row: Row) -> str:
    every = row.get("realign_every") or 1
    return name if every == 1 else f"{name}-every-{every}"
