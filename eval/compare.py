"""One prompt, every method: the passages they write, the time they take, and their perplexity on a
text.
"""

import json
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from tqdm.auto import tqdm

from kvalign.commands.eval_compare import CompareSettings
from kvalign.eval.document import document
from kvalign.eval.perplexity import read_ids, score
from kvalign.files import write_text
from kvalign.methods import METHODS, make_methods, method_class
from kvalign.models import load_model
from kvalign.text import TextStream


def compare(settings: CompareSettings) -> dict[str, Any]:
    """Let every method continue the prompt with the same seed, and score it.

    Returns:
        `settings`, `environment` and `rows`: a dict each with method, aligner (kind), num_sinks,
        num_evicted, perplexity, ttft_s (prompt included), ms_per_token (after the first) and text.
        Speed is measured once on this prompt, after a warm-up.

    Raises:
        ValueError: wrong settings, said before any work.
    """
    started = time.perf_counter()
    for name in settings.methods:
        method_class(name)
    loaded = load_model(settings.model, settings.device, settings.dtype)
    methods = make_methods(
        settings.methods,
        loaded.model,
        aligners=settings.aligner,
        cache_size=settings.cache_size,
        num_sinks=settings.num_sinks,
        num_evicted=settings.num_evicted,
    )
    ids = read_ids(loaded, settings.corpus, settings.cache_size + 1 + settings.num_tokens)
    draws: dict[str, Any] = dict(
        top_k=settings.top_k, no_repeat_ngram_size=settings.no_repeat_ngram_size, seed=settings.seed
    )
    rows = []
    for method, scores in zip(methods, score(methods, ids, settings.num_tokens), strict=True):
        list(TextStream(loaded, method, settings.prompt, max_new_tokens=8, **draws))  # warm-up
        stream = TextStream(
            loaded, method, settings.prompt, max_new_tokens=settings.max_new_tokens, **draws
        )
        for _ in tqdm(stream, desc=f"{method.name} writes", unit="piece"):
            pass
        shown = ("method", "aligner", "num_sinks", "num_evicted", "perplexity")
        timing = {k: v for k, v in stream.timing().items() if k != "num_tokens"}
        rows.append({**{k: scores[k] for k in shown}, **timing, "text": stream.text})
    return document("eval compare", settings, rows, started=started)


def write(result: dict[str, Any], folder: Path) -> None:
    """Write comparison.json and the self-contained comparison.html; text of prompt and models is
    escaped.
    """
    templates = Environment(
        loader=PackageLoader("kvalign.eval"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    best = min(row["perplexity"] for row in result["rows"])
    page = templates.get_template("comparison.html").render(
        **result, best=best, about={name: cls.about for name, cls in METHODS.items()}
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "comparison.json", json.dumps(result, indent=1) + "\n")
    write_text(folder / "comparison.html", page)
