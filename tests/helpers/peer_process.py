"""A context of llama.cpp in a process of its own.

Beside PyTorch in one process both would be slow with several threads: they share OpenMP, which sees
more threads than processors, and then no longer lets them spin between two products.
"""

import functools
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from kvalign.eval.protocol import PEER
from kvalign.foundation.errors import RunError

Answers = list[dict[str, Any]]


class PeerProcess:
    """Context of these parameters, by their dotted names in xllamacpp's `CommonParams`; its process
    ends with this object, or with the program.
    """

    def __init__(self, params: dict[str, Any]):
        context = get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, params), daemon=True)
        self.process.start()
        there.close()
        self._receive()

    def ask(self, request: dict[str, Any]) -> Answers:
        """All that it answers: of a stream one for each of its parts.

        Raises:
            RunError: the process has ended.
        """
        self.connection.send(request)
        return self._receive()

    def _receive(self) -> Answers:
        try:
            answers: Answers = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RunError(f"{PEER} ended with code {self.process.exitcode}") from None
        return answers

    def __del__(self) -> None:
        self.connection.close()  # it then ends


def _serve(connection: Connection, params: dict[str, Any]) -> None:
    """Answer what comes until nothing can come any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program says so, and closes the connection
    server = server_of(params)
    connection.send([])
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(answers_of(server, request))


def server_of(params: dict[str, Any]) -> Any:
    """The package's server."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    for name, value in params.items():
        *within, last = name.split(".")
        setattr(functools.reduce(getattr, within, parameters), last, value)
    return xllamacpp.Server(parameters)


def answers_of(server: Any, request: dict[str, Any]) -> Answers:
    """Answers of the package's server."""
    if not request.get("stream"):
        return [server.handle_completions(request)]
    answers: Answers = []
    server.handle_completions(request, answers.append)
    return answers
