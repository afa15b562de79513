"""Time of a step and of a prompt beside llama.cpp, in turns, on the same GGUF file.

    python tests/scripts/beside_llamacpp.py --weights int4 --cache-sizes 255 --num-threads 1

Prints a document of `kvalign eval latency`, in which llama.cpp has the last row of each cache size,
with the reference's sinks and as many threads. Needs `kvalign[peer,gguf]` and the model.

The package xllamacpp contains llama.cpp, compiled. It streams in its own way: a context of C + 1
positions with sinks (`n_keep`). When it is full, a context shift drops half of the window at once
and rotates the keys that stay. So a step sees three quarters of C on average, where a streaming
cache sees C + 1.

It gives probabilities only for tokens that it draws, so for its perplexity a bias forces each label
to be drawn; the probability is without the bias. After a context shift this is not possible, so
perplexity is that of the second half of the first C + 1 tokens of a text.
"""

import itertools
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone
from helpers.peer_process import PeerProcess

from kvalign.app.cli.arguments import parse
from kvalign.cache.sizes import CacheSizes, num_evicted_of
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.evaluations.latency import LatencySettings, timing
from kvalign.eval.evaluations.latency.subjects import load_with_prompts
from kvalign.eval.evaluations.latency.timing import bare_step, rows_of
from kvalign.eval.protocol import PEER, Document, Row
from kvalign.eval.protocol.document import document, environment
from kvalign.eval.protocol.grid import make_grid
from kvalign.foundation import progress
from kvalign.foundation.errors import RunError, UserError
from kvalign.foundation.settings import MOST_THREADS, Settings, option
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.models import fetched
from kvalign.models.input_ids import prefix_ids, with_prefix
from kvalign.models.loading import LoadedModel, load_model
from kvalign.models.model_folder import gguf_file
from kvalign.models.packed import num_bytes
from kvalign.streaming.scoring import score_stepwise

POSITIONS = 256  # a context of llama.cpp has a multiple of them
UBATCHES = (64, 128, 256, 512, 1024, 2048)
"""Tokens of a prompt that it may take at once (`n_ubatch`): the fastest of them is timed."""
_SURE = 1e3  # added to a logit, its token is drawn; the probability that is told is without it


@dataclass(frozen=True, kw_only=True)
class BesideSettings(Settings):
    """Time a method and llama.cpp in turns, on a CPU, one stream at a time, with full caches."""

    model: str = option("smollm2-135m-instruct", help="a GGUF file, or a model fetched as one")
    weights: str = option("float32", help="form of our weights: float32, int8, int4")
    methods: tuple[str, ...] = option(("streaming-llm",), help="methods; the first has the sinks")
    cache_sizes: tuple[int, ...] = option((255,), help="255, 511, 1023, ...", at_least=1)
    num_sinks: tuple[int, ...] | None = option(None, help="sinks of all", at_least=0)
    prompts: str = option("own", help="as of kvalign eval latency")
    prompt_len: int = option(64, help="tokens of a random prompt", at_least=1)
    corpus: str = option("python-docs", help="text for the perplexities")
    num_trials: int = option(10, help="turns of each", at_least=1)
    trial_len: int = option(20, help="timed tokens of a turn, at least", at_least=1)
    num_threads: int = option(1, help="CPU threads", at_least=1, at_most=MOST_THREADS)
    compile: bool = option(False, help="compile our steps")
    seed: int = option(0, help="seed of tokens", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if odd := [size for size in self.cache_sizes if (size + 1) % POSITIONS]:
            near = max(1, round((odd[0] + 1) / POSITIONS)) * POSITIONS - 1
            raise UserError(
                f"a context of {PEER} has a multiple of {POSITIONS} positions, one more than "
                f"--cache-sizes: use {near} instead of {odd[0]}"
            )

    @property
    def of_latency(self) -> LatencySettings:
        """The same as settings of `kvalign eval latency`."""
        own = {name: x for name, x in vars(self).items() if name != "corpus"}
        return LatencySettings(**own, device="cpu", reference=self.methods[0])


def measure(settings: BesideSettings) -> Document:
    """A document with rows of the bare step, of methods and of llama.cpp."""
    started, file = time.perf_counter(), file_of(settings.model)
    torch.set_num_threads(settings.num_threads)
    loaded = load_model(settings.model, "cpu", weights=settings.weights)
    wanted, model, prompts = load_with_prompts(settings.of_latency, loaded)
    methods = make_grid(wanted, model)
    if settings.compile:
        methods = [method.compile() for method in methods]
    text, rows = _text(settings, loaded), list[Row]()
    with progress.shown_as("timing") as bar:
        for size in dict.fromkeys(settings.cache_sizes):
            group = [method for method in methods if method.sizes.cache_size == size]
            longest = max(ids.shape[1] for ids in prompts)
            peer = LlamaCpp(file, group[0].sizes, settings.num_threads, longest)
            ours = [bare_step(group[0], wanted), *group]
            first = timing.time_first([*ours, peer], prompts, wanted, bar)
            turns = time_steps(ours, peer, wanted, bar)
            of_size = rows_of([*ours, peer], first, turns, 1, wanted)
            lens, both = [ids.shape[1] for ids in prompts], _perplexities(peer, group[0], text)
            more = beside(peer, turns, first, lens, both)
            rows += [{**row, "peak_mb": None, **x} for row, x in zip(of_size, more, strict=True)]
    about_both = {"peer": about(file), "weights_mb": num_bytes(model) / 1e6}
    machine = environment("cpu")
    return document(
        "eval latency", settings, rows, started=started, environment=machine, **about_both
    )


def time_steps(
    methods: list[Method], peer: "LlamaCpp", settings: LatencySettings, bar: progress.Bar
) -> timing.Turns:
    """Seconds of each step, of full caches; a turn of llama.cpp is rounded up to whole periods, and
    includes draws.
    """
    model, rng = methods[0].model, torch.Generator().manual_seed(settings.seed)
    for method in methods:
        timing.warm_up(method, timing.filling(method, 1, rng))
    turns: timing.Turns = [[] for _ in (*methods, peer)]
    for trial, i in timing.rounds([*methods, peer], settings.num_trials, bar, settings.seed):
        if i == len(methods):
            ids = timing.random_ids(model, 1, peer.sizes.cache_size, rng)
            turns[i].append(peer.turn(ids, settings.trial_len))
            continue
        num = timing.num_steps(methods[i], settings)
        first, last = (num * n // settings.num_trials for n in (trial, trial + 1))
        each = (timing.random_ids(model, 1, 1, rng) for _ in range(first, last))
        turns[i].append([timing.clocked(model.device, methods[i].feed, ids) for ids in each])
    return turns


def _text(settings: BesideSettings, loaded: LoadedModel) -> Tensor:
    num_ids = max(settings.cache_sizes) + 1
    ids = first_ids(settings.corpus, loaded.tokenizer, num_ids, "--cache-sizes")
    return with_prefix(torch.tensor([ids]), prefix_ids(loaded.tokenizer))


def _perplexities(peer: "LlamaCpp", method: Method, text: Tensor) -> tuple[float, float]:
    """The model's and llama.cpp's, of the second half of C + 1 tokens of a text, each token given
    all before it, step by step: what a stream is before anything is evicted.
    """
    progress.phase("perplexities")
    half = peer.sizes.cache_size // 2
    ids = text[:, : peer.sizes.cache_size + 1]
    ours = score_stepwise(make_method("dense", method.model, cache_size=half, warn=False), ids)
    return math.exp(ours.mean()), math.exp(fmean(peer.losses(ids, half + 1)))


def file_of(model: str) -> Path:
    """The GGUF file from which a model is read, or was made when it was fetched.

    Raises:
        UserError: there is none, or no package that reads it.
    """
    try:
        import xllamacpp  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(f"{PEER} needs xllamacpp: pip install 'kvalign[peer]'") from None
    if model in fetched.MODELS:
        if folder := fetched.model_path(model):
            return folder / Path(fetched.MODELS[model].member).name
        raise UserError(f"the GGUF file of {model} is not here: {fetched.how_to_fetch(model)}")
    if file := gguf_file(model):
        return file
    names = ", ".join(fetched.MODELS)
    raise UserError(f"{PEER} reads a GGUF file: name one, or {names}, got {model!r}")


def about(file: Path) -> dict[str, str | float]:
    """Version, instruction sets of the build, and the model's file with its size."""
    import xllamacpp

    has = re.findall(r"(\w+) = 1", xllamacpp.get_system_info())
    version = xllamacpp.__version__
    of_file = {"file": file.name, "file_mb": file.stat().st_size / 1e6}
    return {"name": PEER, "xllamacpp": version, "build": " ".join(has), **of_file}


class LlamaCpp:
    """One cache size of llama.cpp, to be timed among the methods, with what a row asks of one.

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
    title: ClassVar[str] = PEER
    aligner_name: ClassVar[str | None] = None
    takes_policy: ClassVar[bool] = False

    def __init__(self, file: Path, sizes: CacheSizes, num_threads: int, longest: int):
        num_evicted = num_evicted_of("half", sizes.window_size)
        self.sizes = CacheSizes(sizes.cache_size, sizes.num_sinks, num_evicted)
        self.file, self.num_threads, self.longest = file, num_threads, longest
        self.stream = self._server(sizes.cache_size + 1)
        self.reader: PeerProcess | None = None
        self.num_ubatch: int | None = None

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
    found = {"per_s": median, "low": min(rates), "high": max(rates)}
    found["by_peer"] = median / float(np.median(of_peer))
    return {f"{name}_{what}": x for what, x in found.items()}


if __name__ == "__main__":
    words = "python tests/scripts/beside_llamacpp.py"
    settings, _ = parse(BesideSettings, sys.argv[1:], words, has_json=False)
    try:
        print(json.dumps(measure(settings)))
    except (UserError, RunError) as error:
        sys.exit(f"error: {error}")
