"""How long a test waits for what happens soon, unless others have the processor."""

import time

PATIENCE_S = 300.0


def until(holds, timeout_s: float = PATIENCE_S) -> None:
    """Wait for what holds soon."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.005)
