"""`kvalign lanes`: a page that shows how entries enter the cache, move and are evicted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import ExistsError
from kvalign.foundation.settings import Settings, like, option


@dataclass(frozen=True, kw_only=True)
class LanesSettings(Settings):
    """Write one self-contained page that shows, step by step, what a method does to the cache. Open
    it in a browser, where you can choose other methods and examples. With --memory it shows which
    entries each step takes back.

    Example:
        kvalign lanes --out cache.html --method streaming-llm --cache-size 7 --num-sinks 3
    """

    out: Path = option(help="file of the page", writes="file")
    method: str = option(
        "kvalign", help="streaming method; for an unknown name the known ones are listed"
    )
    family: str = option(
        "learned", help="how positions are encoded", choices=("learned", "rotary", "alibi")
    )
    cache_size: int = option(7, help="entries the cache keeps, sinks included", at_least=1)
    num_sinks: int = option(3, help="first entries that are never evicted", at_least=0)
    num_evicted: int = option(1, help="entries evicted at once", at_least=1)
    memory: int = like(CacheSizes, "memory", 0, more="")
    num_recalled: int | None = like(CacheSizes, "num_recalled", at_least=1)
    overwrite: bool = option(False, help="replace the file")


def lanes(settings: LanesSettings, as_json: bool) -> dict[str, Any]:
    if settings.out.exists() and not settings.overwrite:
        raise ExistsError(f"{settings.out} already exists: give --overwrite or another --out")

    from kvalign.app.lanes_page import page
    from kvalign.foundation.files import write_text

    of_page = settings.as_dict()
    del of_page["out"], of_page["overwrite"]
    source = page(**of_page)  # what does not fit is refused before anything is written
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(settings.out, source)
    if not as_json:
        print(f"page: {settings.out}")
    return {"page": str(settings.out)}
