"""`kvalign import-published`: the networks that the paper's authors publish, as an aligner."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class ImportPublishedSettings(Settings):
    """Make an aligner of the two files that the authors of KV-Align publish for a model.

    They are in `models/` of github.com/eecs585projectorg/kv-align, for DistilGPT2 and SmolLM2-135M.

    Example:
        kvalign import-published --keys keys_network_distilgpt2.pth --values values_network_distilgpt2.pth --model distilbert/distilgpt2 --out published
    """  # noqa: E501

    keys: Path = option(help="file of the network for keys")
    values: Path = option(help="file of the network for values")
    model: str = option(help="hub id or folder of the base model that they were trained for")
    out: Path = option(help="folder of the aligner")
    num_sinks: int = option(
        4, help="first entries that are never evicted (the authors' number)", at_least=0
    )
    chunk_len: int = option(
        256,
        help="caches up to this less one can be aligned (the authors recorded chunks of 256)",
        at_least=2,
    )
    overwrite: bool = option(False, help="replace the aligner in --out")
    json: bool = option(False, help="print one JSON document")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_len < self.num_sinks + 2:
            raise ValueError(
                f"--chunk-len must be above --num-sinks + 1 ({self.num_sinks + 1}): no entry is "
                f"left to align, got {self.chunk_len}"
            )


def run(settings: ImportPublishedSettings) -> None:
    import json

    from kvalign.training.published import import_published

    config = import_published(settings)
    if settings.json:
        print(json.dumps({"out": str(settings.out), "sizes": config.sizes}))
        return
    print(f"{settings.out}: the authors' networks for {config.base_model}")
