"""Theme and server of the live page, on this machine and with its fonts."""

import logging
import signal
import sys
import threading

import gradio as gr

from kvalign.app.pages import source

# The report's greys, from paper to ink.
_GREYS = "#f6f8fa #eaeef2 #d0d7de #c4ccd4 #9aa4af #6e7781 #57606a #30363d #161b22 #12171e #0d1117"
_GREEN, _DEEP_GREEN = "#00684a", "#005239"


def serve(page: gr.Blocks, host: str, port: int, in_browser: bool) -> None:
    """Serve the page until Ctrl-C, or SIGINT, which a shell's background jobs ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
        theme=_theme(),
        css=source("live.css"),
    )
    try:
        print(f"running on {page.local_url} (Ctrl-C ends it)", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        # It tells of each page it cuts; pages that are open do not hold it up.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        page.server.force_exit = True
        page.close(verbose=False)


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
