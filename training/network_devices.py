"""Processes of `--devices`: the command runs once, and starts the others on this machine.

Left to itself, Lightning takes what SLURM, mpirun or torchrun says in the environment for processes
that they have started. With one task it then trains on one device, whatever `--devices` says.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvalign.foundation.errors import UserError

_LEADER = "KVALIGN_LEADER"  # tells a process that the command started which one did
# Variables by which launchers say how many processes they start.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
_OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    *("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def is_helper() -> bool:
    """Return whether the command that trains started this process, for another device."""
    return os.environ.get(_LEADER) == str(os.getppid())


def check_runs_once() -> None:
    """Raise UserError if a launcher starts the command several times."""
    counts = {name: os.environ[name] for name in _COUNTS if name in os.environ}
    if "SLURM_STEP_NUM_TASKS" in counts:
        counts.pop("SLURM_NTASKS", None)  # that of the whole job
    if "RANK" not in os.environ:
        counts.pop("WORLD_SIZE", None)  # of no launcher
    for name, number in counts.items():
        if number != "1":
            raise UserError(
                f"{name} is {number}, but training starts the processes of --devices itself: run "
                "it once, without torchrun or mpirun, in SLURM as one task: srun --ntasks=1"
            )


@contextmanager
def leading() -> Iterator[None]:
    """Let this process start those of the other devices, until the end of the block. What other
    launchers left in the environment does not count. UserError as of `check_runs_once`.
    """
    check_runs_once()
    before = {name: os.environ.pop(name) for name in _OF_LAUNCHERS if name in os.environ}
    os.environ[_LEADER] = str(os.getpid())
    try:
        yield
    finally:
        for name in (*_OF_LAUNCHERS, _LEADER):  # Lightning sets some of them, too
            os.environ.pop(name, None)
        os.environ.update(before)
