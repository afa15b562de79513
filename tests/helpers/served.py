"""A server in this process, on a port of its own, and OpenAI's client of it."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import uvicorn

from helpers.mixed_requests import WORDS
from helpers.patience import PATIENCE_S, until
from kvalign.app.serve.server import build
from kvalign.app.serve.service import Service
from kvalign.app.serve.settings import ServeSettings
from kvalign.models.loading import LoadedModel


class Served:
    """What a test needs of a running server."""

    def __init__(self, service: Service, port: int):
        self.service, self.port = service, port
        self.address = f"http://127.0.0.1:{port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        address = f"{self.address}/v1"
        return openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=PATIENCE_S)


@contextmanager
def serving(loaded: LoadedModel, **settings) -> Iterator[Served]:
    """A server of a model, until the end of the block."""
    bound = socket.create_server(("127.0.0.1", settings.get("port", 0)))
    port = bound.getsockname()[1]
    app = build(ServeSettings(model=loaded.spec.name, **settings), loaded)
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield Served(app.state.service, port)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


@contextmanager
def running(loaded: LoadedModel, **settings) -> Iterator[Service]:
    """A service of a model, without a server around it."""
    service = Service(ServeSettings(model=loaded.spec.name, **settings), loaded)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def served(model: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of a model in a process of its own: its address, and the process."""
    command = [sys.executable, "-m", "kvalign", "serve", "--model", model, "--port", "0"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
    try:
        if not (address := re.search(r"http\S+", process.stdout.readline())):
            raise RuntimeError("no server listens")
        yield address[0], process
    finally:
        process.kill()
        process.communicate()


def turn_of(session: int, turn: int) -> str:
    """What is said: of other lengths in other sessions and turns."""
    num = 3 + (7 * session + 5 * turn) % 23
    return " ".join(WORDS[(session + turn + i * i) % len(WORDS)] for i in range(num)) + "?"
