"""`kvalign serve` beside llama.cpp's server: many sessions of the same GGUF file, in turns.

    python tests/scripts/serve_beside_llamacpp.py --sessions 1,8,32

Both servers stay up; in each turn the clients of one ask at once, then those of the other. Each
client sends a prompt and takes so many greedy tokens. llama.cpp has C + 1 positions for each of its
slots, and shifts its context when they are full. Tokens written are counted by wall clock and by
CPU time of the server, prompts included. Needs `kvalign[serve,peer,gguf]` and the fetched model; a
measurement, not a test.
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics

import httpx
import psutil
from beside_llamacpp import file_of

from kvalign.app.cli.arguments import parse
from kvalign.foundation.settings import MOST_SIZE, Settings, option

NUM_SINKS = 4
WORDS = " ".join(topics.values()).split()


@dataclass(frozen=True, kw_only=True)
class BesideSettings(Settings):
    """Time both servers in turns."""

    model: str = option("smollm2-135m-instruct", help="a fetched model with a GGUF file")
    sessions: tuple[int, ...] = option((1, 8, 32), help="clients that ask at once", at_least=1)
    cache_size: int = option(255, help="C; C + 1 positions of llama.cpp", at_least=16)
    prompt_words: int = option(
        50, help="words of a prompt, which must fit into C + 1 positions", at_least=1, at_most=1000
    )
    num_tokens: int = option(256, help="tokens of an answer", at_least=1, at_most=MOST_SIZE)
    num_trials: int = option(3, help="turns of each server", at_least=1)
    num_threads: int = option(1, help="threads of each server", at_least=1)
    flags: str = option("--weights int4", help="more flags of kvalign serve")


class Server:
    """A server that is up: its address and its process."""

    def __init__(self, address: str, pid: int, model: str):
        self.address, self.process, self.model = address, psutil.Process(pid), model
        while httpx.get(f"{address}/v1/models", timeout=60).status_code == 503:  # still loading
            time.sleep(0.5)

    def turn(self, settings: BesideSettings, num: int, turn: int) -> dict[str, float]:
        """Tokens per second of wall clock and of CPU time, of so many clients at once."""

        def ask(i: int) -> int:
            first = 997 * (num * turn + i) % (len(WORDS) - settings.prompt_words)
            prompt = " ".join(WORDS[first : first + settings.prompt_words])
            asked = dict(model=self.model, prompt=prompt, max_tokens=settings.num_tokens)
            more = {"ignore_eos": True} if self.model == "llama.cpp" else {}
            body = asked | {"temperature": 0} | more
            answer = httpx.post(f"{self.address}/v1/completions", json=body, timeout=3600)
            return answer.raise_for_status().json()["usage"]["completion_tokens"]

        with ThreadPoolExecutor(num) as clients:
            began, used = time.perf_counter(), self._cpu()
            tokens = sum(clients.map(ask, range(num)))
            return {
                "wall": tokens / (time.perf_counter() - began),
                "cpu": tokens / (self._cpu() - used),
            }

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def run_peer(file: Path, settings: BesideSettings, num: int, told: Connection) -> None:
    """Serve with llama.cpp until killed; `told` is sent its address."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel = (settings.cache_size + 1) * num, num
    params.n_keep, params.ctx_shift, params.kv_unified = NUM_SINKS, True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.num_threads
    params.n_gpu_layers, params.fit_params, params.cache_ram_mib = 0, False, 0
    params.verbosity, params.port = 0, 0
    server = xllamacpp.Server(params)
    told.send(server.listening_address)
    multiprocessing.Event().wait()


def run(settings: BesideSettings) -> int:
    """Print a line of JSON for each number of sessions."""
    file, spawn = file_of(settings.model), multiprocessing.get_context("spawn")
    words = [sys.executable, "-m", "kvalign", "serve", "--model", settings.model, "--port", "0"]
    words += ["--method", "streaming-llm", "--cache-size", str(settings.cache_size)]
    words += ["--no-stop-at-end", *settings.flags.split()]
    threads = os.environ | {"OMP_NUM_THREADS": str(settings.num_threads)}
    ours = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=threads)
    try:
        assert ours.stdout is not None
        address = next(x for line in ours.stdout for x in line.split() if x.startswith("http"))
        one = Server(address.removesuffix("/v1"), ours.pid, settings.model)
        one.turn(settings, 1, 0)  # what is made at the first answer is not timed
        for num in settings.sessions:
            here, there = spawn.Pipe()
            peer = spawn.Process(target=run_peer, args=(file, settings, num, there), daemon=True)
            peer.start()
            assert peer.pid is not None
            try:
                other = Server(here.recv(), peer.pid, "llama.cpp")
                other.turn(settings, num, 0)
                turns = [
                    (one.turn(settings, num, i), other.turn(settings, num, i))
                    for i in range(1, settings.num_trials + 1)
                ]
            finally:
                peer.kill()
            found: dict = {"sessions": num}
            for clock in ("wall", "cpu"):
                pair = [statistics.median(turn[i][clock] for turn in turns) for i in range(2)]
                both = {"kvalign": pair[0], "llama.cpp": pair[1]}
                found[clock] = both | {"ratio": pair[0] / pair[1]}
            print(json.dumps(found), flush=True)
    finally:
        ours.kill()
    return 0


if __name__ == "__main__":
    words = "python tests/scripts/serve_beside_llamacpp.py"
    sys.exit(run(parse(BesideSettings, sys.argv[1:], words)[0]))
