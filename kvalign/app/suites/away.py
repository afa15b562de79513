"""Steps of a suite that cannot run because the hub is away: what they lack, and how to get it.

A step lacks the models, corpora and prompts that are neither here nor on the hub, and what an
earlier step cannot write for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvalign import checkpoints
from kvalign.app.listing import cached
from kvalign.app.suites.cells import Cell
from kvalign.data_gen.corpora import hub_datasets
from kvalign.data_gen.prompts import MT_BENCH
from kvalign.foundation import hub
from kvalign.foundation.settings import Settings
from kvalign.models import fetched

Missing = tuple[str, str]  # MODEL or DATA_SET, and its hub name
MODEL, DATA_SET = "model", "data set"
_PROMPTS = "mt-bench"


def lacks_of(cells: Sequence[Cell]) -> dict[str, set[Missing]]:
    """Missing models and data sets of the steps that lack any, by the step's name.

    Args:
        cells: the steps to run, in order.
    """
    needed = {cell.name: set(_of_hub(cell.settings)) for cell in cells}
    if not any(needed.values()) or hub.is_reachable():
        return {}
    here = {(MODEL, name) for name, _ in cached("model")}
    here |= {(DATA_SET, name) for name, _ in cached("dataset")}
    lacks, unwritten = dict[str, set[Missing]](), dict[str, set[Missing]]()
    for cell in cells:
        values = set(_values(cell.settings))
        lacked = needed[cell.name] - here
        lacked = lacked.union(*(unwritten[value] for value in values & unwritten.keys()))
        if lacked:
            lacks[cell.name] = lacked
            if out := getattr(cell.settings, "out", None):
                unwritten[str(out)] = lacked
    return lacks


def how_to_get(lacks: Mapping[str, set[Missing]], variables: Mapping[str, str]) -> str:
    """One line: what is missing, and how to get it or name something else.

    Args:
        lacks: of `lacks_of`.
        variables: the suite's, with the run's changes.
    """
    missing = set().union(*lacks.values())
    models_first = sorted(missing, key=lambda x: (x[0] != MODEL, x))
    names = ", ".join(map(" ".join, models_first))
    others = {variable: _other(value, missing) for variable, value in variables.items()}
    words = " ".join(f"{variable}={other}" for variable, other in others.items() if other)
    instead = f', or name what is here: --variables "{words}"' if words else ""
    return (
        f"not here or on the hub{hub.why_not()}: {names}. Fetch each where the hub answers, with "
        "`hf download NAME --local-dir NAME` (data sets: --repo-type dataset), and run this in the "
        f"folder that has them{instead}"
    )


def _of_hub(settings: Settings) -> Iterator[Missing]:
    """Models and data sets that settings ask the hub for."""
    model = getattr(settings, "model", None)
    is_known = model in checkpoints.MODELS or model in fetched.MODELS
    if model and not (is_known or hub.is_path(model) or Path(model).exists()):
        yield MODEL, model
    corpus = getattr(settings, "corpus", None) or ()
    specs = [corpus] if isinstance(corpus, str) else [*corpus]
    if getattr(settings, "prompts", None) == _PROMPTS:
        specs.append(f"hub:{MT_BENCH}")
    for name in hub_datasets(specs):
        yield DATA_SET, name


def _values(settings: Settings) -> Iterator[str]:
    """Values of settings as text, of a tuple each."""
    for value in vars(settings).values():
        yield from map(str, value if isinstance(value, tuple) else (value,))


def _other(value: str, missing: set[Missing]) -> str:
    """Value for a variable that names something missing; "" if it names nothing such."""
    if (MODEL, value) in missing:
        return "FOLDER"
    if value == _PROMPTS and (DATA_SET, MT_BENCH) in missing:
        return "own"
    is_corpus = any((DATA_SET, name) in missing for name in hub_datasets([value]))
    return "text:FILE" if is_corpus else ""
