"""The live page: a Gradio app whose streams and lane follow the same settings."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.app.pages import lanes, render
from kvalign.app.pages.side_by_side import begin, side_by_side
from kvalign.errors import UserError
from kvalign.eval.words import load_words
from kvalign.models import load_model
from kvalign.sizes import CacheSizes

METHODS = ("window", "streaming-llm", "kvalign", "discard-half", "recompute")
CHOSEN = ("streaming-llm", "kvalign", "recompute")
DEFAULT = "default"
PROMPT = "The history of the island begins with a small harbour. The people who lived there"
PROMPT_LEN = 10_000  # characters; a longer prompt could not be stopped for seconds
ABOUT = (
    "<h1>KV-Align</h1><p>A language model writes without end while its cache keeps a fixed number "
    "of entries. Methods differ in what they do with those that stay when others are evicted. All "
    "have the same prompt and seed, and take turns: tokens/s counts a method's own steps.</p>"
)
IDLE = '<p class="message">Choose methods and press Start.</p>'
# A frame is as high as its page. It is replaced whenever it changes; a load does not bubble.
FIT = """
element.addEventListener('load', ({ target: frame }) => {
  const page = frame.contentDocument.documentElement;
  new ResizeObserver(() => { frame.style.height = page.offsetHeight + 'px'; }).observe(page);
}, true);
"""
# What is typed is put into range when the box is left; the lane follows earlier.
IN_RANGE = """
(methods, model, aligner, cacheSize, numEvicted) => [methods, model, aligner,
  Math.min(Math.max(cacheSize, 8), 512), Math.min(Math.max(numEvicted, 1), 128)]
"""
# On a phone it is below the settings.
SHOW_STAGE = """
(...settings) => {
  if (innerWidth <= 800) document.querySelector('#stage').scrollIntoView();
  return settings;
}
"""


def build(models: Sequence[str], device: str = "cpu", aligner: str | None = None) -> gr.Blocks:
    """The page, not yet served.

    Args:
        models: names, hub ids or folders to offer, the first one chosen.
        device: as torch names it.
        aligner: folder, shipped name or hub id of one to offer for the first model.

    Raises:
        UserError: the first model or its aligner cannot be used.
    """
    load = functools.cache(functools.partial(load_model, device=device))
    load(models[0])
    if aligner:
        loaded = Aligner.from_pretrained(aligner)
        config = loaded.config
        largest = CacheSizes(config.chunk_len - 1, config.num_sinks, config.shifts[0])
        loaded.check(load(models[0]).model, largest)
    words = load_words().words
    newest: dict[str, object] = {}  # the run of each page that is open

    def offered(model: str) -> list[str]:
        """Aligners of a model: that of `build`, the default, and the shipped ones."""
        first = [aligner] if aligner and model == models[0] else []
        shipped = (x for x in checkpoints.ALIGNERS if x.startswith(f"kvalign-{model}-"))
        return list(dict.fromkeys([*first, DEFAULT, *shipped]))

    def settle(prompt: str, methods: list[str], model: str, aligner: str, **settings: Any) -> list:
        """Streams of what is chosen; UserError where it does not fit together."""
        chosen = [name for name in METHODS if name in methods]
        name = None if aligner == DEFAULT else aligner
        return begin(load(model), prompt, chosen, aligner=name, **settings)

    def run(
        prompt: str,
        methods: list[str],
        model: str,
        aligner: str,
        cache_size: int,
        num_evicted: int,
        max_new_tokens: int,
        top_k: int,
        seed: int | None,
        request: gr.Request,
    ) -> Iterator[tuple]:
        this_run = newest[request.session_hash] = object()
        yield gr.skip(), *_buttons(is_running=True)
        try:
            streams = settle(
                prompt,
                methods,
                model,
                aligner,
                cache_size=cache_size,
                num_evicted=num_evicted,
                max_new_tokens=max_new_tokens,
                top_k=top_k,
                seed=seed or 0,
            )
        except UserError as error:
            yield render("message.html", line=error), *_buttons(is_running=False)
            return
        for views in side_by_side(streams, words):
            if newest.get(request.session_hash) is not this_run:
                return
            cards = render("cards.html", prompt=prompt, views=views)
            yield cards, gr.skip(), gr.skip()
        yield gr.skip(), *_buttons(is_running=False)

    def end(request: gr.Request) -> list[dict]:
        forget(request)
        return _buttons(is_running=False)

    def forget(request: gr.Request) -> None:
        newest.pop(request.session_hash, None)

    def lane(
        methods: list[str], model: str, aligner: str, cache_size: int, num_evicted: int
    ) -> str:
        try:
            streams = settle(
                PROMPT, methods, model, aligner, cache_size=cache_size, num_evicted=num_evicted
            )
        except UserError as error:
            return render("message.html", line=error)
        return lanes.frame(streams[0].method)

    with gr.Blocks(title="KV-Align", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(ABOUT, elem_id="about")
        with gr.Row(elem_id="desk"):
            with gr.Column(elem_id="settings", min_width=280):
                prompt = gr.Textbox(PROMPT, label="Prompt", lines=3, max_length=PROMPT_LEN)
                methods = gr.CheckboxGroup(
                    METHODS, value=list(CHOSEN), label="Methods", elem_id="methods"
                )
                cache_size = gr.Slider(
                    8, 512, 64, step=1, label="Cache size (entries)", elem_id="cache_size"
                )
                num_evicted = gr.Slider(1, 128, 1, step=1, label="Evicted at once")
                num_tokens = gr.Slider(10, 2000, 400, step=10, label="New tokens")
                with gr.Accordion("Model and sampling", open=False):
                    model = gr.Dropdown(list(models), value=models[0], label="Model")
                    names = offered(models[0])
                    which = gr.Dropdown(names, value=names[0], label="Aligner of kvalign")
                    top_k = gr.Slider(1, 100, 20, step=1, label="Drawn from the k most likely")
                    seed = gr.Number(0, label="Seed", precision=0)
                with gr.Row(elem_id="actions"):
                    start = gr.Button("Start", variant="primary", min_width=80, elem_id="start")
                    stop = gr.Button("Stop", interactive=False, min_width=80, elem_id="stop")
            with gr.Column(elem_id="shown", min_width=280):
                with gr.Tab("Side by side"):
                    stage = gr.HTML(IDLE, elem_id="stage", apply_default_css=False)
                with gr.Tab("The cache"):
                    frame = gr.HTML(elem_id="lane", apply_default_css=False, js_on_load=FIT)

        quiet: dict[str, Any] = dict(show_progress="hidden", api_visibility="private")
        sizes = [methods, model, which, cache_size, num_evicted]
        running = start.click(
            run,
            [prompt, *sizes, num_tokens, top_k, seed],
            [stage, start, stop],
            js=SHOW_STAGE,
            concurrency_limit=None,
            **quiet,
        )
        ended: dict[str, Any] = dict(inputs=None, outputs=[start, stop], queue=False, **quiet)
        running.failure(end, **ended)
        stop.click(end, cancels=running, **ended)
        page.unload(forget)
        model.change(
            lambda name: gr.update(choices=offered(name), value=offered(name)[0]),
            model,
            which,
            **quiet,
        )
        changes = [page.load, *(setting.change for setting in sizes)]
        gr.on(changes, lane, sizes, frame, js=IN_RANGE, trigger_mode="always_last", **quiet)
    return page


def _buttons(is_running: bool) -> list[dict]:
    """Start and Stop."""
    return [gr.update(interactive=not is_running), gr.update(interactive=is_running)]
