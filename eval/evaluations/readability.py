"""What streaming methods write, and how it reads: one passage for each prompt, method and setting.

All methods start from the same prompts with the same seed of the draws.
"""

import time
from typing import Any

from tqdm.auto import tqdm

from kvalign.data_gen.prompts import conversations
from kvalign.eval.document import document
from kvalign.eval.fluency import judge
from kvalign.eval.grid import check_names, make_grid, sizes_of
from kvalign.eval.settings import ReadabilitySettings
from kvalign.eval.words import load_words
from kvalign.models import load_model
from kvalign.text_stream import Sampling, TextStream


def evaluate(settings: ReadabilitySettings) -> dict[str, Any]:
    """Let every method continue every prompt, and measure the passages.

    Returns:
        A document with `prompts` (the texts continued), `word_list` (name, num_words) and rows:
        a dict each with method, aligner, cache_size, num_sinks, num_evicted,
        no_repeat_ngram_size, prompt (index), and the measures of `kvalign.eval.fluency.judge`.

    Raises:
        UserError: wrong settings, said before any work.
    """
    started = time.perf_counter()
    check_names(settings)
    prompts = [turns[0] for turns in conversations(settings.prompts)][: settings.num_prompts]
    words = load_words(settings.words, settings.nltk_data)
    loaded = load_model(settings.model, settings.device, settings.dtype)
    methods = make_grid(settings, loaded.model)
    runs = [
        (method, ngram, number)
        for method in methods
        for ngram in settings.no_repeat_ngram_sizes
        for number in range(len(prompts))
    ]
    rows = []
    with tqdm(total=len(runs) * settings.max_new_tokens, unit="token", smoothing=0.05) as bar:
        for method, ngram, number in runs:
            bar.set_description(f"{method.title} C={method.sizes.cache_size}")
            sampling = Sampling(
                max_new_tokens=settings.max_new_tokens,
                top_k=settings.top_k,
                no_repeat_ngram_size=ngram,
                seed=settings.seed,
            )
            stream = TextStream(loaded.tokenizer, method, sampling)
            stream.feed(prompts[number])
            num_prompt = len(stream.ids)
            before = bar.n
            for _ in stream:
                bar.update(before + len(stream.token_ids) - bar.n)
            bar.update(before + settings.max_new_tokens - bar.n)
            cell = sizes_of(method) | {"no_repeat_ngram_size": ngram, "prompt": number}
            prompt_ids = stream.ids[:num_prompt]
            rows.append(cell | judge(loaded, prompt_ids, stream.token_ids, words.words))
    return document(
        "eval readability",
        settings,
        rows,
        started=started,
        prompts=prompts,
        word_list={"name": words.name, "num_words": len(words.words)},
    )
