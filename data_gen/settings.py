"""Settings of a recording."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.foundation.errors import UserError
from kvalign.foundation.folders import DEFAULT_CORPUS, RECORDING, folder_of, of_corpus
from kvalign.foundation.settings import DEFAULT_MODEL, MOST_ROWS, MOST_SEED, Settings, option


@dataclass(frozen=True, kw_only=True)
class RecordSettings(Settings):
    """Record keys and values of a corpus before and after the tokens behind the sinks are evicted.

    Run the same command again to resume an interrupted recording. `kvalign train` uses the newest
    recording of a model.

    Example:
        kvalign gen-data --model gpt2-mini --num-tokens 2048 --chunk-len 64 --out caches
    """

    model: str = option(DEFAULT_MODEL, help="shipped name, hub id or folder of the base model")
    corpus: tuple[str, ...] = option(
        DEFAULT_CORPUS,
        help="python-docs, wikitext, everyday, text:PATH, hub:NAME or marked:SPEC; "
        "several give an equal share of the tokens each",
    )
    out: Path | None = option(
        None,
        help="folder of the recording (default: kvalign-data/MODEL/caches, or caches-CORPUS)",
        writes="folder",
    )
    num_tokens: int = option(50_000, help="tokens of the train split to record", at_least=1)
    chunk_len: int = option(
        256,
        help="tokens encoded together; caches up to this less one can be aligned",
        at_least=2,
        at_most=MOST_ROWS,
    )
    num_sinks: int = option(4, help="first entries that are never evicted", at_least=0)
    num_evicted: tuple[int, ...] = option(
        (1,), help="entries evicted at once; several numbers record each", at_least=1
    )
    stride: int | None = option(
        None,
        help="tokens from one chunk to the next; fewer than chunk-len overlap (default: chunk-len)",
        at_least=1,
    )
    val_share: float = option(0.1, help="share of the chunks for validation", above=0, at_most=0.5)
    dtype: str = option(
        "float16", help="type of the stored numbers", choices=("float16", "float32", "bfloat16")
    )
    shard_mb: float = option(
        64.0, help="size of a file in megabytes, filled with whole chunks", above=0, at_most=1e6
    )
    batch_size: int = option(8, help="chunks encoded at once", at_least=1, at_most=MOST_ROWS)
    device: str = option("auto", help="cpu, cuda; auto: cuda if there is one")
    seed: int = option(
        0, help="seed of the split into train and validation", at_least=0, at_most=MOST_SEED
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        num_removed = self.num_sinks + max(self.num_evicted)
        if self.chunk_len <= num_removed:
            raise UserError(
                f"--chunk-len must be above --num-sinks + --num-evicted ({num_removed}): "
                f"no entry is left to align, got {self.chunk_len}"
            )
        if self.stride is not None and self.stride > self.chunk_len:
            raise UserError(
                f"--stride must be at most --chunk-len ({self.chunk_len}), got {self.stride}"
            )

    @property
    def folder(self) -> Path:
        return self.out or folder_of(self.model) / of_corpus(RECORDING, self.corpus)
