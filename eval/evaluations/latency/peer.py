"""llama.cpp on the same clock: the usual alternative for an endless stream on a CPU.

The package xllamacpp contains it, compiled. It reads the model's GGUF file and streams in its own
way: a context of C + 1 positions with sinks (`n_keep`). When it is full, a context shift drops half
of the window at once and rotates the keys that stay. So a step sees three quarters of C on average,
where a streaming cache sees C + 1.
"""

import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from kvalign.cache.sizes import CacheSizes, num_evicted_of
from kvalign.eval.evaluations.latency.peer_process import PeerProcess
from kvalign.eval.protocol.evaluation import PEER, SIZES, Row
from kvalign.foundation import progress
from kvalign.foundation.errors import RunError, UserError
from kvalign.models import fetched, gguf_file

UBATCHES = (64, 128, 256, 512, 1024, 2048)
"""Tokens of a prompt that it may take at once (`n_ubatch`): the fastest of them is timed."""
_SURE = 1e3  # added to a logit, its token is drawn; the probability that is told is without it


def file_of(model: str) -> Path:
    """The GGUF file from which a model is read, or was made when it was fetched.

    Raises:
        UserError: there is none, or no package that reads it.
    """
    try:
        import xllamacpp  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(f"--peer {PEER} needs xllamacpp: pip install 'kvalign[peer]'") from None
    if model in fetched.MODELS:
        if file := fetched.gguf_path(model):
            return file
        raise UserError(f"the GGUF file of {model} is not here: {fetched.how_to_fetch(model)}")
    if file := gguf_file.find(model):
        return file
    names = ", ".join(fetched.MODELS)
    raise UserError(f"--peer {PEER} reads a GGUF file: name one, or {names}, got {model!r}")


def about(model: str) -> dict[str, str | float]:
    """Version, instruction sets of the build, and the model's file with its size.

    Raises:
        UserError: as of `file_of`.
    """
    file = file_of(model)
    import xllamacpp

    has = re.findall(r"(\w+) = 1", xllamacpp.get_system_info())
    version = xllamacpp.__version__
    of_file = {"file": file.name, "file_mb": file.stat().st_size / 1e6}
    return {"name": PEER, "xllamacpp": version, "build": " ".join(has), **of_file}


class LlamaCpp:
    """One cache size of llama.cpp, to be timed among the methods.

    Args:
        file: the model's.
        sizes: the cache size C, with C + 1 a multiple of 256, and the sinks; one sink more if the
            file says that texts begin with a special token.
        num_threads: of its steps and its prompts.
        longest: tokens of the longest prompt.

    Attributes:
        num_ubatch: batch size of prompts; None before the first.
    """

    name: ClassVar[str] = PEER

    def __init__(self, file: Path, sizes: CacheSizes, num_threads: int, longest: int):
        num_evicted = num_evicted_of("half", sizes.window_size)
        self.sizes = CacheSizes(sizes.cache_size, sizes.num_sinks, num_evicted)
        self.file, self.num_threads, self.longest = file, num_threads, longest
        self.stream = self._server(sizes.cache_size + 1)
        self.reader: PeerProcess | None = None
        self.num_ubatch: int | None = None

    @property
    def title(self) -> str:
        """Name in a progress bar."""
        return f"{self.name} C={self.sizes.cache_size}"

    @property
    def row(self) -> Row:
        """Fields that identify its row (`SIZES`)."""
        names = ("cache_size", "num_sinks", "num_evicted")
        own = {name: getattr(self.sizes, name) for name in names}
        return {**dict.fromkeys(SIZES), "method": self.name, **own}

    def reset(self) -> None:
        """Nothing to reset: each prompt and each turn starts from an empty context."""

    def feed(self, ids: Tensor) -> None:
        """Read a prompt, ids [1, T], and draw a token.

        A context does not accept a prompt longer than itself. So another context, with room for the
        longest prompt, reads them, and each token sees all before it. Its `n_ubatch` is the fastest
        one for the first prompt.
        """
        if self.reader is None:
            self.reader = self._fastest(ids)
        _check_answer(*self.reader.ask(self._request(ids[0].tolist(), 1)))

    def turn(self, ids: Tensor, num_tokens: int) -> list[float]:
        """Seconds of each of so many steps, rounded up to whole periods from one shift to the next,
        by its own clock. C tokens, ids [1, C], fill the context first; the first step shifts it.
        """
        num_steps = -(-num_tokens // self.sizes.num_evicted) * self.sizes.num_evicted
        request = self._request(ids[0].tolist(), 1 + num_steps, ignore_eos=True)
        request |= {"stream": True, "timings_per_token": True}
        answers = self.stream.ask(request)
        seconds: list[float] = []
        for before, after in itertools.pairwise(
            _check_answer(answer)["timings"] for answer in answers
        ):
            ms = after["predicted_ms"] - before["predicted_ms"]
            num = after["predicted_n"] - before["predicted_n"]
            # Several: of a character that took them; none: the end.
            seconds += [ms / 1e3 / num for _ in range(num)]
        assert len(seconds) == num_steps, (len(seconds), num_steps)
        return seconds

    def losses(self, ids: Tensor, num_context: int) -> list[float]:
        """NLL in nats of each token of ids [1, T] after the first `num_context`, step by step; T is
        at most C + 1. The program reports probabilities only of tokens that it draws, so each token
        is forced.
        """
        tokens, nll = ids[0].tolist(), []
        for i in range(num_context, len(tokens)):
            sure = dict(logit_bias=[[tokens[i], _SURE]], logprobs=1, cache_prompt=True)
            answer = _check_answer(*self.stream.ask(self._request(tokens[:i], 1, **sure)))
            (token,) = answer["choices"][0]["logprobs"]["content"]
            assert token["id"] == tokens[i], (token, tokens[i])
            nll.append(-token["logprob"])
        return nll

    def _fastest(self, ids: Tensor) -> PeerProcess:
        best, fastest = float("inf"), None
        enough = min((num for num in UBATCHES if num >= self.longest), default=UBATCHES[-1])
        for num_ubatch in (num for num in UBATCHES if num <= enough):
            progress.phase(f"{self.title}, n_ubatch {num_ubatch}")
            reader = self._server(self.longest + 1, num_ubatch)
            start = time.perf_counter()
            _check_answer(*reader.ask(self._request(ids[0].tolist(), 1)))
            if (seconds := time.perf_counter() - start) < best:
                best, fastest, self.num_ubatch = seconds, reader, num_ubatch
        assert fastest is not None
        return fastest

    def _server(self, num_positions: int, num_ubatch: int = UBATCHES[0]) -> PeerProcess:
        """A context of so many places."""
        threads = {"cpuparams.n_threads": self.num_threads}
        threads |= {"cpuparams_batch.n_threads": self.num_threads}
        window = dict(n_ctx=num_positions, n_keep=self.sizes.num_sinks, ctx_shift=True)
        alone = dict(n_gpu_layers=0, n_parallel=1, verbosity=0)
        fixed = dict(fit_params=False, cache_ram_mib=0)  # neither other sizes nor old prompts
        model = {"model.path": str(self.file), "n_ubatch": num_ubatch}
        return PeerProcess({**model, **window, **threads, **alone, **fixed})

    def _request(self, ids: Sequence[int], num_tokens: int, **more: Any) -> dict[str, Any]:
        """Tokens after ids, so many and each the likeliest, in a context that is emptied first."""
        request = dict(prompt=ids, n_predict=num_tokens, temperature=0.0, cache_prompt=False)
        return {**request, "n_keep": self.sizes.num_sinks, **more}


def _check_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer, unless it says what went wrong (RunError)."""
    if error := answer.get("error"):
        raise RunError(f"{PEER}: {error['message']}")
    return answer


def beside(
    peer: LlamaCpp,
    turns: Sequence[Sequence[Sequence[float]]],
    first: Sequence[Sequence[float]],
    prompt_lens: Sequence[int],
    perplexities: tuple[float, float],
) -> list[Row]:
    """Return the columns of each row beside a peer, whose row is the last: tokens per second, of
    turns and of prompts, as median and range and relative to the peer's; perplexity; the peer's
    batch size for prompts.

    Args:
        turns: seconds of the steps of each turn, for each row.
        first: seconds to the first token of each trial, for each row.
        prompt_lens: tokens of the prompts, which the trials use in turn.
        perplexities: ours, which is the same for all methods, and the peer's.
    """
    lens = list(itertools.islice(itertools.cycle(prompt_lens), len(first[0])))
    decode = [[len(turn) / sum(turn) for turn in own] for own in turns]
    prompt = [[num / s for num, s in zip(lens, own, strict=True)] for own in first]
    *ours, theirs = [
        {**_spread("turn", steps, decode[-1]), **_spread("prompt", prompts, prompt[-1])}
        for steps, prompts in zip(decode, prompt, strict=True)
    ]
    own, of_peer = perplexities
    rows = [row | {"peer_perplexity": own, "num_ubatch": None} for row in ours]
    return [*rows, theirs | {"peer_perplexity": of_peer, "num_ubatch": peer.num_ubatch}]


def _spread(name: str, rates: Sequence[float], of_peer: Sequence[float]) -> Row:
    median = float(np.median(rates))
    return {
        f"{name}_per_s": median,
        f"{name}_low": min(rates),
        f"{name}_high": max(rates),
        f"{name}_by_peer": median / float(np.median(of_peer)),
    }
