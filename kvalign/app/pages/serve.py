"""Theme and server of the live page, on this machine and with its fonts."""

import socket
import sys

import gradio as gr
import uvicorn
from fastapi import FastAPI

from kvalign.app.pages import source

# The report's greys, from paper to ink.
_GREYS = "#f6f8fa #eaeef2 #d0d7de #c4ccd4 #9aa4af #6e7781 #57606a #30363d #161b22 #12171e #0d1117"
_GREEN, _DEEP_GREEN = "#00684a", "#005239"


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
