"""`kvalign demo-ui` as a command: whom it lets in, and how it ends."""

import signal
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest
from helpers.patience import PATIENCE_S

from kvalign.app.cli.main import main
from kvalign.models.packed import weights_of

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="gradio is not installed")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_others_are_let_in_if_that_is_meant(host, monkeypatch, capsys):
    served, local = [], ("127.0.0.1", 0)
    monkeypatch.setattr(
        "kvalign.app.commands.serve.listening",
        lambda *_: served.append(1) or socket.create_server(local),
    )
    monkeypatch.setattr("kvalign.app.pages.page.build", lambda *_, **__: served.append(2))
    monkeypatch.setattr("kvalign.app.pages.page.application", lambda _: None)
    monkeypatch.setattr("kvalign.app.pages.page.serve", lambda *_: served.append(3))
    assert main(["demo-ui", "--host", host]) == 2
    assert f"--host {host} lets other machines connect" in capsys.readouterr().err and not served
    assert main(["demo-ui", "--host", host, "--without-key"]) == 0
    assert main(["demo-ui"]) == 0
    assert served == 2 * [1, 2, 3]


def test_models_and_streams_are_as_asked(monkeypatch):
    """`--weights` and `--cache-dtype` of every model and card."""
    built = {}

    def build(models, load, **how):
        built.update(how, weights=weights_of(load(models[0]).model))

    monkeypatch.setattr("kvalign.app.pages.page.build", build)
    monkeypatch.setattr("kvalign.app.pages.page.application", lambda _: None)
    monkeypatch.setattr("kvalign.app.pages.page.serve", lambda *_: None)
    flags = ["--model", "llama-mini", "--weights", "int8", "--cache-dtype", "int8"]
    flags += ["--memory", "500"]
    assert main(["demo-ui", "--port", "0", *flags]) == 0
    assert built["cache_dtype"] == built["weights"] == "int8" and built["memory"] == 500


def test_sigint_ends_it_in_the_background():
    """Where a shell has jobs ignore it; here while it loads."""
    command = [sys.executable, "-m", "kvalign", "demo-ui", "--port", "0"]
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    unheard = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    server = subprocess.Popen(command, **piped, preexec_fn=unheard)
    try:
        line = server.stdout.readline()
        assert line.startswith("running on ")
        server.send_signal(signal.SIGINT)
        _, complaints = server.communicate(timeout=PATIENCE_S)
        assert (server.returncode, complaints.strip()) == (130, "kvalign demo-ui: interrupted")
    finally:
        server.kill()
        server.communicate()
