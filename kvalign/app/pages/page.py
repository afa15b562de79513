"""Live page: a Gradio app whose streams and lane use the same settings."""

import functools
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, get_args

import gradio as gr
import uvicorn
from fastapi import FastAPI

from kvalign.aligners import Aligner
from kvalign.app.pages import lanes, render, source
from kvalign.app.pages.side_by_side import Refusal, begin, side_by_side, verdict
from kvalign.app.sessions.stream_settings import StreamSettings
from kvalign.cache.sizes import CacheSizes, Positions
from kvalign.eval.judging.words import load_words
from kvalign.foundation.errors import UserError
from kvalign.methods import registry
from kvalign.methods.choice import aligners_at_hand
from kvalign.models.loading import LoadedModel, load_model
from kvalign.policies import OLDEST, POLICIES
from kvalign.streaming.sampling import Sampling

_LABELS = {
    "cache_size": "Cache size",
    "num_evicted": "Evicted at once",
    "max_new_tokens": "New tokens",
    "temperature": "Temperature",
    "top_k": "Top-k",
    "top_p": "Top-p",
    "min_p": "Min-p",
    "repetition_penalty": "Repetition penalty",
    "seed": "Seed",
}
"""Labels of a stream's settings on the page."""
_WORDS = {
    "num_sinks": "sinks",
    "chunk_len": "chunks of",
    "realign_every": "evictions before a move",
    "num_recent": "newest entries that stay",
    "num_recalled": "entries taken back",
}
"""Names in errors that have no control on the page."""
_SAMPLING: dict[str, tuple[float, float, float]] = {  # least, most, step
    "temperature": (0, 2, 0.05),
    "top_k": (0, 200, 1),
    "top_p": (0.05, 1, 0.05),
    "min_p": (0, 0.5, 0.01),
    "repetition_penalty": (1, 2, 0.05),
}
_LEAST_ENTRIES, _MOST_ENTRIES, _MOST_EVICTED = 8, 1024, 128
_HELP = {field.name: field.metadata["help"] for field in fields(StreamSettings)}
METHODS = ("window", "streaming-llm", "kvalign", "discard-half", "recompute")
# On gpt2-mini streaming-llm leaves entries stale, which the other two do not.
DEFAULT_METHODS = ("streaming-llm", "kvalign", "discard-half")
PROMPT = "The history of the island begins with a small harbour. The people who lived there"
# In the middle of what seeds 0 to 13 show; with 0, 6 and 12 streaming-llm goes into lists of names,
# which are easier to foresee.
SEED = 3
PROMPT_LEN = 10_000  # characters; a longer prompt could not be stopped for seconds
# What the page sets, in the order of its controls.
SIZES = (
    *("has_memory", "policy", "positions", "methods", "model", "aligner"),
    *("cache_size", "num_evicted"),
)
INPUTS = ("prompt", *SIZES, "max_new_tokens", *_SAMPLING, "seed")
MEMORY = 100_000  # tokens, where none are named
# The report's greys, from paper to ink.
_GREYS = "#f6f8fa #eaeef2 #d0d7de #c4ccd4 #9aa4af #6e7781 #57606a #30363d #161b22 #12171e #0d1117"
_GREEN, _DEEP_GREEN = "#00684a", "#005239"
IDLE = '<p class="message">The texts will begin in a moment.</p>'


def build(
    models: Sequence[str],
    load: Callable[[str], LoadedModel] = load_model,
    *,
    aligner: str | None = None,
    memory: int | None = None,
    num_recalled: int | None = None,
    cache_dtype: str | None = None,
) -> gr.Blocks:
    """The page, not yet served, with the first model chosen and `aligner` offered for it. A
    `memory` of so many tokens is switched on; each step takes back `num_recalled`.

    Raises:
        UserError: the first model or its aligner is unusable.
    """
    load = functools.cache(load)
    first = load(models[0])
    if aligner:
        loaded = Aligner.from_pretrained(aligner)
        config = loaded.config
        largest = CacheSizes(config.chunk_len - 1, config.num_sinks, config.shifts[0])
        loaded.check(first.model, largest)
    newest: dict[str, object] = {}  # the run of each page that is open

    def offered(model: str) -> list[str]:
        own = [aligner] if aligner and model == models[0] else []
        return list(dict.fromkeys([*own, *aligners_at_hand(load(model).model)]))

    def able(methods: Sequence[str], model: str) -> list[str]:
        """Methods that need no aligner or have one for the model."""
        return [name for name in methods if name != "kvalign" or offered(model)]

    def settle(
        prompt: str, methods: list[str], model: str, has_memory: bool, **settings: Any
    ) -> list:
        """Streams of the chosen methods; UserError for errors that concern all of them."""
        in_order = [name for name in METHODS if name in methods]
        if has_memory:
            settings |= {"memory": memory or MEMORY, "num_recalled": num_recalled}
        return begin(load(model), prompt, in_order, cache_dtype=cache_dtype, **settings)

    def run(request: gr.Request, *values: Any) -> Iterator[tuple]:
        settings = dict(zip(INPUTS, values, strict=True))
        this_run = newest[request.session_hash] = object()
        yield gr.skip(), *_buttons(is_running=True)
        try:
            streams = settle(**settings)
        except UserError as error:
            yield _message(str(error)), *_buttons(is_running=False)
            return
        seed = next((one.sampling.seed for one in streams if not isinstance(one, Refusal)), None)
        for views in side_by_side(streams, load_words().words):
            if newest.get(request.session_hash) is not this_run:
                return
            cards = render(
                "cards.html",
                prompt=settings["prompt"],
                views=views,
                seed=seed,
                verdict=verdict(views),
                labelled=_labelled,
            )
            yield cards, gr.skip(), gr.skip()
        yield gr.skip(), *_buttons(is_running=False)

    def end(request: gr.Request) -> list[dict]:
        forget(request)
        return _buttons(is_running=False)

    def forget(request: gr.Request) -> None:
        newest.pop(request.session_hash, None)

    def lane(*values: Any) -> str:
        """The cache of the first method that can be shown."""
        try:
            streams = settle(PROMPT, **dict(zip(SIZES, values, strict=True)))
        except UserError as error:
            return _message(str(error))
        frames = (lanes.frame(one.method) for one in streams if not isinstance(one, Refusal))
        return next(frames, None) or _message(streams[0].line)

    def follow(model: str, aligner: str | None, methods: list[str], cache_size: int) -> list[dict]:
        """Return the changes with another model: its aligners, its methods, its largest cache. What
        fits it stays, as it may have been chosen since: Gradio can say twice that a model changed.
        """
        names, most = offered(model), _most_entries(load(model))
        first, fit = names[0] if names else None, able(methods, model)
        return [
            gr.update(choices=names, **({} if aligner in names else {"value": first})),
            gr.update(**({} if fit == methods else {"value": fit})),
            gr.update(maximum=most, **({} if cache_size <= most else {"value": most})),
        ]

    with gr.Blocks(title="KV-Align", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(render("about.html"), elem_id="about")
        with gr.Row(elem_id="desk"):
            with gr.Column(elem_id="settings", min_width=280):
                prompt = gr.Textbox(
                    PROMPT,
                    label="Prompt",
                    info="the prompt of each method",
                    lines=3,
                    max_length=PROMPT_LEN,
                )
                first_methods, names = able(DEFAULT_METHODS, models[0]), offered(models[0])
                which_first = names[0] if names else None
                methods = gr.CheckboxGroup(
                    METHODS,
                    value=first_methods,
                    label="Methods",
                    info="they take turns; tokens/s counts own steps only",
                    elem_id="methods",
                )
                most = _most_entries(first)
                cache_size = _slider(
                    "cache_size", _LEAST_ENTRIES, most, min(64, most), info="entries that stay"
                )
                num_evicted = _slider(
                    "num_evicted", 1, _MOST_EVICTED, 1, info="entries; discard-half: half"
                )
                has_memory = gr.Checkbox(
                    memory is not None,
                    label="Memory",
                    info=f"of {memory or MEMORY} evicted tokens; {_without_policy()}",
                    elem_id="memory",
                )
                with gr.Row(elem_id="eviction"):
                    policy = gr.Dropdown(
                        list(POLICIES),
                        value=OLDEST,
                        label="Policy",
                        info=_without_policy(),
                        min_width=80,
                    )
                    positions = gr.Dropdown(
                        list(get_args(Positions)),
                        label="Positions",
                        info="of the entries that stay",
                        min_width=80,
                    )
                num_tokens = _slider(
                    "max_new_tokens", 10, 2000, 600, step=10, info="by each method"
                )
                with gr.Row(elem_id="actions"):
                    start = gr.Button("Start", variant="primary", min_width=80, elem_id="start")
                    stop = gr.Button("Stop", interactive=False, min_width=80, elem_id="stop")
                with gr.Accordion("Model", open=False):
                    model = gr.Dropdown(
                        list(models),
                        value=models[0],
                        label="Model",
                        info="another one: kvalign demo-ui --model",
                    )
                    which = gr.Dropdown(
                        names,
                        value=which_first,
                        label="Aligner of kvalign",
                        info="shipped, trained here, or given by --aligner",
                    )
                with gr.Accordion("Sampling", open=False):
                    drawing = [
                        _slider(name, least, most, getattr(Sampling, name), step)
                        for name, (least, most, step) in _SAMPLING.items()
                    ]
                    seed = gr.Number(
                        SEED,
                        label=_LABELS["seed"],
                        info="random seed; empty: a new one each time",
                        precision=0,
                    )
            with gr.Column(elem_id="shown", min_width=280):
                with gr.Tab("Side by side"):
                    stage = gr.HTML(IDLE, elem_id="stage", apply_default_css=False)
                with gr.Tab("The cache"):
                    frame = gr.HTML(
                        elem_id="lane", apply_default_css=False, js_on_load=source("fit.js")
                    )

        quiet: dict[str, Any] = dict(show_progress="hidden", api_visibility="private")
        sizes = [has_memory, policy, positions, methods, model, which, cache_size, num_evicted]
        inputs, outputs = [prompt, *sizes, num_tokens, *drawing, seed], [stage, start, stop]
        # On a phone the texts are below the settings: a click shows them, the first run does not.
        runs = [
            listen(run, inputs, outputs, js=js, concurrency_limit=None, **quiet)
            for listen, js in ((page.load, None), (start.click, source("show_stage.js")))
        ]
        ended: dict[str, Any] = dict(inputs=None, outputs=[start, stop], queue=False, **quiet)
        for one in runs:
            one.failure(end, **ended)
        stop.click(end, cancels=runs, **ended)
        page.unload(forget)
        follows = [which, methods, cache_size]
        model.change(follow, [model, *follows], follows, **quiet)
        changes = [page.load, *(setting.change for setting in sizes)]
        gr.on(changes, lane, sizes, frame, trigger_mode="always_last", **quiet)
    return page


def _slider(
    name: str, least: float, most: float, value: float, step: float = 1, **more: Any
) -> gr.Slider:
    """Control for a setting, with the command line's help unless `more` has `info`."""
    more = {"label": _LABELS[name], "info": _HELP[name], "elem_id": name, **more}
    return gr.Slider(least, most, value, step=step, **more)


def _without_policy() -> str:
    """Methods that have their own way to evict."""
    names = (name for name in METHODS if not registry.METHODS[name].takes_policy)
    return f"{', '.join(names)}: none"


def _labelled(line: str) -> str:
    """Error message with the page's labels instead of flags."""
    names = _LABELS | _WORDS
    return re.sub(rf"\b({'|'.join(names)})\b", lambda name: names[name[0]], line)


def _most_entries(loaded: LoadedModel) -> int:
    """The largest cache for which the model has positions."""
    context_len = loaded.spec.context_len or _MOST_ENTRIES + 1
    return max(_LEAST_ENTRIES, min(_MOST_ENTRIES, context_len - 1))


def _message(line: str) -> str:
    return render("message.html", line=_labelled(line))


def _buttons(is_running: bool) -> list[dict]:
    """Start and Stop."""
    return [gr.update(interactive=not is_running), gr.update(interactive=is_running)]


def application(page: gr.Blocks) -> FastAPI:
    """The page as an ASGI application, at the root."""
    return gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        page,
        path="/",
        ssr_mode=False,
        footer_links=[],
        theme=_theme(),
        css=source("live.css"),
    )


def serve(app: FastAPI, at: socket.socket) -> None:
    """Serve until Ctrl-C; pages that are open do not hold it up."""
    try:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        server.force_exit = True
        server.run([at])
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _theme() -> gr.themes.Default:
    theme = gr.themes.Default(
        neutral_hue=gr.themes.Color(*_GREYS.split(), name="report"),
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    fill = "button_primary_background_fill"
    return theme.set(
        color_accent=_GREEN,
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_label_text_color="*neutral_600",
        **dict.fromkeys([fill, fill + "_dark"], _GREEN),
        **dict.fromkeys([fill + "_hover", fill + "_hover_dark"], _DEEP_GREEN),
    )
