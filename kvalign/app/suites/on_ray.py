"""Cells of a suite side by side on Ray: on this machine or on a cluster that shares the folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from kvalign.app.commands.eval_run import RunSettings
from kvalign.app.suites.cells import Cell
from kvalign.app.suites.suite import run_cell
from kvalign.foundation import progress
from kvalign.foundation.cluster import ray_session
from kvalign.foundation.errors import RunError, UserError


def run_on_ray(cells: list[Cell], settings: RunSettings) -> Iterator[tuple[Cell, str]]:
    """Yield each cell with what its command printed, in the order in which they end.

    Raises:
        RunError: a cell failed; the others are stopped.
        UserError: no cluster at the address.
    """
    with ray_session(settings.ray_address) as ray:
        task = ray.remote(
            num_cpus=settings.cpus_per_cell, num_gpus=settings.gpus_per_cell, max_retries=3
        )(_run)
        more = (str(Path.cwd()), settings.cpus_per_cell)
        waiting = {task.remote(cell.command, settings.out, *more): cell for cell in cells}
        with progress.shown_as("eval run") as bar:
            bar.expect(len(cells), "cells")
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                output, error = ray.get(done)
                if error:
                    raise RunError(error)
                bar.update(1)
                yield waiting.pop(done), output


def _run(command: str, out: Path, folder: str, num_threads: int) -> tuple[str, str]:
    """What a cell prints, and its error; its relative paths start at `folder`."""
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        return run_cell(command, out), ""
    except (RunError, UserError) as error:
        return "", str(error)
