"""Whether the Hugging Face hub answers, asked once: without it, its clients retry for half a minute
before they fail.
"""

import os
import socket
from functools import lru_cache
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


@lru_cache(maxsize=1)
def is_reachable() -> bool:
    """True if the hub can be asked. Behind a proxy it is assumed so; HF_HUB_OFFLINE=1 says no."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True
