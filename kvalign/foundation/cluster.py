"""Ray for work in many processes: on this machine, or on a cluster that shares the folders."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvalign.foundation.errors import UserError

ANSWER_S = 5.0

# Read by Ray when it is imported: what it would send home, and a coming change it would warn of.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def ray_session(address: str | None = None) -> Iterator[Any]:
    """The `ray` module, quiet, on the cluster at an address (else at RAY_ADDRESS, which Ray reads)
    or started on this machine, and shut down at the end. UserError if no cluster is at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if address is not None:
        _check_answers(address)
    try:
        ray.init(
            address=address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise
        raise UserError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise UserError if nothing answers at a cluster's address; Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # `auto`, or a name that Ray knows
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise UserError(f"no Ray cluster at {address!r}: it takes HOST:PORT, or auto")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, UnicodeError) as error:
        raise UserError(f"no Ray cluster at {address!r}: {error}") from error
