"""The live page: a Gradio app on this machine, with nothing from anywhere else."""

import functools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

import gradio as gr

from kvalign import checkpoints
from kvalign.demo_ui import lanes
from kvalign.demo_ui.cards import cards, message
from kvalign.demo_ui.side_by_side import begin, side_by_side
from kvalign.eval.words import load_words
from kvalign.models import load_model

METHODS = ("window", "streaming-llm", "kvalign", "discard-half", "recompute")
DEFAULT = "default"
PROMPT = "The history of the island begins with a small harbour. The people who lived there"
ABOUT = (
    "<h1>KV-Align</h1><p>A language model writes without end while its cache keeps a fixed number "
    "of entries. Methods differ in what they do with the entries that stay when others are evicted. "
    "All begin with the same prompt and the same seed.</p>"
)
IDLE = '<p class="message">Choose methods and press Start.</p>'
FIT = """
const frame = element.querySelector('iframe');
frame.onload = () => {
  const page = frame.contentDocument.documentElement;
  new ResizeObserver(() => { frame.style.height = page.offsetHeight + 'px'; }).observe(page);
};
"""
PROMPT_LEN = 10_000  # characters; a longer prompt could not be stopped for seconds


def build(models: Sequence[str], device: str = "cpu") -> gr.Blocks:
    """The page, not yet served.

    Args:
        models: names, hub ids or folders to offer, the first one chosen.
        device: as torch names it.

    Raises:
        ValueError: the first of them cannot be loaded.
    """
    load = functools.cache(functools.partial(load_model, device=device))
    load(models[0])
    words = load_words("english-words").words  # it asks nothing of the network

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
    ) -> Iterator[str]:
        try:
            streams = begin(
                load(model),
                prompt,
                [name for name in METHODS if name in methods],
                cache_size=cache_size,
                num_evicted=num_evicted,
                aligner=None if aligner == DEFAULT else aligner,
                max_new_tokens=max_new_tokens,
                top_k=top_k,
                seed=seed or 0,
            )
        except ValueError as error:
            yield message(str(error))
            return
        for views in side_by_side(streams, words):
            yield cards(prompt, views)

    with gr.Blocks(title="KV-Align", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(ABOUT, elem_id="about")
        with gr.Tab("Side by side"):
            prompt = gr.Textbox(PROMPT, label="Prompt", lines=2, max_length=PROMPT_LEN)
            methods = gr.CheckboxGroup(
                METHODS,
                value=["streaming-llm", "kvalign", "recompute"],
                label="Methods",
                elem_id="methods",
            )
            with gr.Row():
                cache_size = gr.Slider(
                    8, 512, 64, step=1, label="Cache size (entries)", min_width=280
                )
                num_tokens = gr.Slider(10, 2000, 400, step=10, label="New tokens", min_width=280)
            with gr.Accordion("More settings", open=False):
                with gr.Row():
                    model = gr.Dropdown(list(models), value=models[0], label="Model")
                    aligner = gr.Dropdown(
                        aligners(models[0]), value=DEFAULT, label="Aligner of kvalign"
                    )
                with gr.Row():
                    num_evicted = gr.Slider(1, 128, 1, step=1, label="Evicted at once")
                    top_k = gr.Slider(1, 100, 20, step=1, label="Drawn from the k most likely")
                    seed = gr.Number(0, label="Seed", precision=0)
            with gr.Row():
                start = gr.Button("Start", variant="primary", min_width=100, elem_id="start")
                stop = gr.Button("Stop", interactive=False, min_width=100, elem_id="stop")
            stage = gr.HTML(IDLE, elem_id="stage", apply_default_css=False)
        with gr.Tab("The cache"):
            gr.HTML(_frame(), apply_default_css=False, js_on_load=FIT)

        def buttons(is_running: bool) -> list[dict]:
            return [gr.update(interactive=not is_running), gr.update(interactive=is_running)]

        settings = [prompt, methods, model, aligner, cache_size, num_evicted]
        settings += [num_tokens, top_k, seed]
        quiet = dict(show_progress="hidden", api_visibility="private")
        begun = start.click(lambda: buttons(True), None, [start, stop], queue=False, **quiet)
        running = begun.then(run, settings, stage, concurrency_limit=None, **quiet)
        for ended in (running.success, running.failure):
            ended(lambda: buttons(False), None, [start, stop], queue=False, **quiet)
        stop.click(lambda: buttons(False), None, [start, stop], cancels=running, **quiet)
        model.change(
            lambda name: gr.update(choices=aligners(name), value=DEFAULT), model, aligner, **quiet
        )
    return page


def aligners(model: str) -> list[str]:
    """What the page offers for a model: the default and the shipped ones that were made for it."""
    return [DEFAULT, *(x for x in checkpoints.ALIGNERS if x.startswith(f"kvalign-{model}-"))]


def looks() -> dict:
    """What `launch` takes to make the page look as it should: fonts that are on the machine."""
    css = resources.files("kvalign.demo_ui").joinpath("templates", "live.css").read_text("utf-8")
    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    green = dict.fromkeys(
        ["color_accent", "button_primary_background_fill", "button_primary_background_fill_dark"],
        "#00684a",
    )
    hover = dict.fromkeys(
        ["button_primary_background_fill_hover", "button_primary_background_fill_hover_dark"],
        "#005239",
    )
    subdued = dict(block_label_text_color="*neutral_600", body_text_color_subdued="*neutral_500")
    return {"css": css, "theme": theme.set(**green, **hover, **subdued)}


def _frame() -> str:
    source = escape(lanes.page(controls=True))
    return f'<iframe id="lanes" title="The cache" srcdoc="{source}"></iframe>'


def serve(page: gr.Blocks, host: str, port: int, in_browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    page.launch(
        server_name=host,
        server_port=port,
        inbrowser=in_browser,
        share=False,
        quiet=True,
        show_error=True,
        prevent_thread_lock=True,
        ssr_mode=False,
        footer_links=[],
        **looks(),
    )
    try:
        print(f"running on {page.local_url} (Ctrl-C ends it)", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        logging.getLogger("uvicorn.error").setLevel(
            logging.CRITICAL
        )  # it tells of each page it cuts
        page.server.force_exit = True  # pages that are open do not hold it up
        page.close(verbose=False)
