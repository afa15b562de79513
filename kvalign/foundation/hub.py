"""Whether the Hugging Face hub answers, asked once: without it, its clients retry for half a minute
before they fail.
"""

import os
import socket
from functools import lru_cache
from urllib.parse import urlsplit

TIMEOUT_S = 3.0
_PORTS = {"http": 80, "socks5": 1080, "socks5h": 1080}


@lru_cache(maxsize=1)
def is_reachable() -> bool:
    """True if the hub can be asked: behind a proxy, if that can be; HF_HUB_OFFLINE=1 says no."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or ""
    asked = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    try:
        url = urlsplit(asked or constants.ENDPOINT)
        socket.create_connection(
            (url.hostname, url.port or _PORTS.get(url.scheme, 443)), timeout=TIMEOUT_S
        ).close()
    except (OSError, ValueError):  # no such place, or no address at all
        return False
    return True
