"""A model that needs no sink: it is trained with attention whose sum of exponentials has 1 added,
as of an entry with a zero key and a zero value (softmax-off-by-one, Miller 2023; the "zero sink" of
Xiao et al. 2024, table 3). Then it streams with sinks and without.

    python tests/scripts/zero_sink.py --corpus text:valid.txt --eval-corpus text:test.txt

Prints one JSON document with the rows of `kvalign eval perplexity`. The folder of a model cannot
say that it has this attention, so the model is not kept.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvalign.app.cli.arguments import parse
from kvalign.cache import realigner, segments
from kvalign.eval.evaluations.perplexity import PerplexitySettings, perplexity
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import MOST_THREADS, Settings, option
from kvalign.training import pretrain
from kvalign.training.settings import PretrainSettings


@dataclass(frozen=True, kw_only=True)
class ZeroSinkSettings(Settings):
    """Pre-train a model whose attention has a zero sink, and stream it."""

    arch: str = option("llama", help="architecture", choices=("gpt2", "llama"))
    method: str = option("streaming-llm", help="method to stream with, whatever the sinks")
    corpus: tuple[str, ...] = option(("python-docs",), help="to train on, as of pretrain")
    tokenizer: str = option("gpt2-mini", help="folder or shipped name of its model")
    num_tokens: int = option(8_000_000, help="tokens to train on", at_least=1)
    eval_corpus: str = option("python-docs", help="text to stream")
    num_labels: int = option(20_000, help="labels to score", at_least=1)
    num_sinks: tuple[int, ...] = option((4, 0, 1, 2), help="sinks, comma-separated", at_least=0)
    cache_sizes: tuple[int, ...] = option((32, 64, 128, 255), help="cache sizes", at_least=2)
    num_threads: int = option(1, help="CPU threads", at_least=1, at_most=MOST_THREADS)
    compile: bool = option(False, help="use torch.compile to train (faster)")


@torch.compiler.disable  # its code in C++ does not compile (torch 2.13)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As PyTorch's of the same arguments, with an entry before the others whose key and value are
    zero and which each query sees.
    """
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        attn_mask = seen.tril()
    if attn_mask is not None:
        attn_mask = pad(attn_mask, (1, 0), value=attn_mask.dtype == torch.bool)
    key, value = (pad(x, (0, 0, 1, 0)) for x in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
    )


@contextlib.contextmanager
def with_zero_sinks() -> Iterator[None]:
    """Let all attention of this process have a zero sink."""
    name = "scaled_dot_product_attention"
    with contextlib.ExitStack() as stack:
        for module in (torch.nn.functional, realigner, segments):
            stack.enter_context(patch.object(module, name, attention))
        yield


def measure(settings: ZeroSinkSettings) -> dict:
    """A document of perplexities by cache size and number of sinks."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, with_zero_sinks():
        torch.set_num_threads(settings.num_threads)
        names = ("arch", "corpus", "tokenizer", "num_tokens", "eval_corpus", "num_threads")
        same = {name: getattr(settings, name) for name in (*names, "compile")}
        facts = pretrain(PretrainSettings(out=Path(folder) / "model", **same))
        sizes = dict(num_sinks=settings.num_sinks, cache_sizes=settings.cache_sizes)
        text = dict(corpus=settings.eval_corpus, num_tokens=settings.num_labels)
        of = dict(methods=(settings.method,), reference=settings.method, model=f"{folder}/model")
        # Segments of a turning window compute scores themselves.
        rows = perplexity(PerplexitySettings(**of, **text, **sizes, stepwise=True))["rows"]
    names = ("method", "cache_size", "num_sinks", "perplexity", "ratio", "ratio_low", "ratio_high")
    rows = [{name: row[name] for name in names} for row in rows]
    rows = [{"bits_per_byte": facts["bits_per_byte"], **row} for row in rows]
    return document("script zero-sink", settings, rows, started=started)


if __name__ == "__main__":
    settings, _ = parse(ZeroSinkSettings, sys.argv[1:], "python tests/scripts/zero_sink.py")
    print(json.dumps(measure(settings)))
