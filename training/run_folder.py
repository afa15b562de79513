"""The folder of one target's run: which run it is, whether it is finished or can be resumed.

OUT/training/TARGET/run.json              written first: settings and data
OUT/training/TARGET/best.ckpt, last.ckpt  Lightning's checkpoints
OUT/training/TARGET/csv, tensorboard      losses by step
OUT/training/TARGET/result.json           written last
"""

import json
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from kvalign.aligners.network_sizes import KV
from kvalign.data_gen.store import Store
from kvalign.errors import ExistsError
from kvalign.files import read_json, write_json
from kvalign.training.aligner_folder import describe_data
from kvalign.training.settings import TrainSettings

_RUN, _RESULT = "run.json", "result.json"
# What may differ between a run and its resumption.
_FREE = ("data", "out", "target", "accelerator", "num_threads", "resume", "overwrite")


class RunFolder:
    """One target's run in `path`, which need not exist yet."""

    def __init__(self, path: Path):
        self.path = path

    def begin(
        self, run: dict[str, Any], settings: TrainSettings, in_aligner: dict | None
    ) -> dict[str, Any]:
        """Make the folder ready: new, or as an unfinished run of the same description left it.

        Args:
            run: from `describe`.
            in_aligner: result of the run that the saved aligner's network is from, if any.

        Returns:
            the result of a run that was finished but is not in the aligner yet; else nothing.

        Raises:
            ExistsError: the folder holds another unfinished run, and `overwrite` is not set.
        """
        found = read_json(self.path / _RUN) if (self.path / _RUN).exists() else None
        result = read_json(self.path / _RESULT) if (self.path / _RESULT).exists() else {}
        if found == run and settings.resume and (not result or result != in_aligner):
            return result
        if not settings.overwrite and not (found and (result or not settings.resume)):
            self._check_replaceable(found, run)
        if rank_zero_only.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            write_json(self.path / _RUN, run)
        return {}

    def _check_replaceable(self, found: dict[str, Any] | None, run: dict[str, Any]) -> None:
        if found is None and self.path.exists() and any(self.path.iterdir()):
            raise ExistsError(f"{self.path} holds files that are no run: name another --out")
        if found not in (None, run):
            raise ExistsError(
                f"{self.path} holds an unfinished run of other settings "
                f"({difference(found, run)}): give --overwrite or another --out"
            )

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.path / _RESULT, result)


def describe(settings: TrainSettings, store: Store, kv: str) -> dict[str, Any]:
    """What a run of one kv depends on, as JSON holds it."""
    other = KV[1 - KV.index(kv)]
    run = {
        "settings": {
            name: value
            for name, value in settings.as_dict().items()
            if name not in _FREE and not name.startswith(f"{other}_")
        },
        "data": describe_data(store),
    }
    return json.loads(json.dumps(run))


def difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    for part in here:
        for name, value in here[part].items():
            found = there.get(part, {}).get(name)
            if found != value:
                return f"{name} is {found} there, {value} now"
    return "of an older version"
