"""Test of the Hugging Face hub, once. Without it clients retry for half a minute."""

import os
import re
import socket
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 3.0
_PORTS = {"http": 80, "socks5": 1080, "socks5h": 1080}


def why_not() -> str:
    """Reason why the hub was not asked, as a clause that continues with its name; "" if it was."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return ", which was not asked because HF_HUB_OFFLINE is set"
    return "" if is_reachable() else ", which does not answer"


def is_id(name: str) -> bool:
    """Return whether a name has the form of a hub id."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None


def is_path(name: str) -> bool:
    """Return whether a name is no hub id, or begins with a folder that exists: it names a path."""
    folder, slash, _ = name.partition("/")
    return not is_id(name) or (bool(slash) and Path(folder).is_dir())


@lru_cache(maxsize=1)
def is_reachable() -> bool:
    """Return whether the hub, or the proxy before it, can be reached; HF_HUB_OFFLINE=1 says no."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or ""
    address = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    try:
        url = urlsplit(address or constants.ENDPOINT)
        socket.create_connection(
            (url.hostname, url.port or _PORTS.get(url.scheme, 443)), timeout=TIMEOUT_S
        ).close()
    except (OSError, ValueError):  # no such place, or no address at all
        return False
    return True


def in_cache(name: str, repo_type: str) -> Path | None:
    """The folder of a `model` or `dataset` in the hub's cache, its main branch; None: not there."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE
    try:
        folder = snapshot_download(
            name, repo_type=repo_type, cache_dir=cache, local_files_only=True
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(folder)
