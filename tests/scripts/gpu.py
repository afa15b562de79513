"""What runs on a GPU, beside the same on the CPU: methods, policies, memories, entries of 8 bits,
packed weights, batches, saved streams, segments and texts; and captured steps beside eager ones.

    python tests/scripts/gpu.py --minutes 4

For an interpreter that has torch and transformers; the checkout need not be installed. Each finding
is printed as it comes, so a run that is stopped has told what it found. The exit code is 1 if
anything differs. What the time does not reach is printed as not measured.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

sys.path.extend(map(str, Path(__file__).parents[1:3]))  # the checkout need not be installed
from helpers.methods import made
from helpers.pairwise import of_each_family
from helpers.tiny_models import KINDS, MORE_KINDS, VOCAB, tiny_model

import kvalign
from kvalign.methods.base import Method
from kvalign.methods.registry import METHODS
from kvalign.policies import POLICIES
from kvalign.streaming.loop import Batch, Row
from kvalign.streaming.sampling import Sampling

CLOSE, OF_INT8, NEAR = 1e-4, 1e-2, 1e-2
"""Largest difference of logits in float32, in parts of the largest logit; with entries of 8 bits,
one of which may be rounded the other way; and logits of two tokens that count as equal.
"""
Check = Callable[[str], str]
"""From a device to what was found; AssertionError if the device gives something else."""


def logits(method: Method, ids: Tensor) -> Tensor:
    """Logits [N, V] of a prompt and of steps past two cache sizes, on the CPU."""
    there = ids.to(method.model.device)
    found = [method.feed(there[:, :30])]
    found += [method.feed(there[:, i : i + 1]) for i in range(30, 80)]
    found.append(method.feed(there[:, 80:110]))
    return torch.cat(found).float().cpu()


def random_ids(num_rows: int, num: int) -> Tensor:
    return torch.randint(2, VOCAB, (num_rows, num), generator=torch.Generator().manual_seed(1))


def apart(found: Tensor, expected: Tensor, most: float = CLOSE) -> str:
    """Largest difference of logits, in parts of the largest, which is to be below `most`."""
    worst = ((found - expected).abs().max() / expected.abs().max()).item()
    assert worst < most, f"logits differ by {worst:.1e} of the largest"
    return f"{worst:.1e}"


def same(name: str, kind: str, sizes: dict, device: str, *, num_rows: int = 2) -> str:
    """Logits of a method in float32, here and there."""
    ids, model = random_ids(num_rows, 110), tiny_model(kind)
    expected = logits(made(name, model, **sizes), ids)
    found = logits(made(name, copy.deepcopy(model).to(device), **sizes), ids)
    return apart(found, expected, OF_INT8 if "cache_dtype" in sizes else CLOSE)


def captured(
    name: str, kind: str, sizes: dict, device: str, *, num_rows: int = 1, compiled: bool = False
) -> str:
    """Logits of captured steps and of eager ones there, from a cache that fills on."""
    ids = random_ids(num_rows, 140)
    model = copy.deepcopy(tiny_model(kind)).to(device)
    eager, method = (made(name, model, **sizes) for _ in range(2))
    method.compile() if compiled else method.take_ready_stepper()
    found = []
    for one in (eager, method):
        parts = ids.to(device).split([6] + [1] * 134, 1)
        found.append(torch.stack([one.feed(part) for part in parts]).float())
    expected = "compiled and captured" if compiled else "captured"
    assert method.steps_in_a_word == expected, "nothing was captured"
    worst = apart(found[1], found[0], OF_INT8 if "cache_dtype" in sizes else CLOSE)
    return f"{worst}, {len(method.stepper.graphs)} graphs"


def as_exact(name: str, kind: str, sizes: dict, device: str) -> str:
    """Errors of bfloat16 there are those of bfloat16 here, beside float32."""
    ids, model = random_ids(2, 110), tiny_model(kind)
    exact = logits(made(name, model, **sizes), ids)
    half = copy.deepcopy(model).to(torch.bfloat16)
    errors = [
        (logits(made(name, copy.deepcopy(half).to(place), **sizes), ids) - exact).std().item()
        for place in ("cpu", device)
    ]
    assert errors[1] < 1.5 * errors[0], f"errors {errors[1]:.3f}, on the CPU {errors[0]:.3f}"
    return f"error {errors[1]:.3f}, on the CPU {errors[0]:.3f}"


def one_by_one(name: str, kind: str, device: str) -> str:
    """Segments there give what steps there give."""
    ids = random_ids(1, 110).to(device)
    model = tiny_model(kind).to(device)
    at_once, stepped = made(name, model), made(name, model)
    found = at_once.feed(ids)
    for one in ids.split(1, 1):
        expected = stepped.feed(one)
    return apart(found, expected)


def text(name: str, method: str, how: dict, device: str, num_tokens: int = 400) -> str:
    """A text of a shipped model, half of it after it was saved there and loaded there and here. Two
    texts may part where the best two tokens are nearly equal.
    """
    loaded = kvalign.load_model(name, dtype="float32")
    there = copy.deepcopy(loaded.model).to(device)
    asked = dict(method=method, cache_size=64, max_new_tokens=num_tokens, do_sample=False) | how
    prompt = "The history of the island. The history"
    here, written = (
        kvalign.stream(model, loaded.tokenizer, prompt, **asked) for model in (loaded.model, there)
    )
    deque(islice(written, num_tokens // 2), maxlen=0)
    with tempfile.TemporaryDirectory() as folder:
        written.save(Path(folder) / "saved")
        after = [
            kvalign.load_stream(Path(folder) / "saved", model, loaded.tokenizer)
            for model in (there, loaded.model)
        ]
    for one in (here, written, *after):
        deque(one, maxlen=0)
    assert after[0].ids == written.ids, "loaded there it goes on with another text"
    for one in (here, after[1]):
        both = enumerate(zip(one.ids, written.ids, strict=True))
        if (at := next((i for i, (x, y) in both if x != y), None)) is not None:
            again = here.method.new()
            best = again.feed(torch.tensor([written.ids[:at]]))[0].topk(2).values
            gap = (best[0] - best[1]).item()
            assert gap < NEAR, f"another text from token {at} on; the best two differ by {gap:.2g}"
            return f"the same {at} tokens; then the best two differ by {gap:.2g}"
    return f"{len(written.ids)} tokens"


def weights(bits: str, device: str) -> str:
    """The loss of a text with packed weights there and here, and with bfloat16 there."""
    ids = torch.randint(2, 4000, (1, 400), generator=torch.Generator().manual_seed(1))
    found = []
    for dtype, place in (("bfloat16", device), (bits, device), (bits, "cpu")):
        model = kvalign.load_model("llama-mini", place, weights=dtype).model
        method = kvalign.make_method("streaming-llm", model, cache_size=64)
        found.append(kvalign.score(method, ids.to(place)).mean().item())
    plain, there, here = found
    assert abs(there - here) < 0.05, f"loss {there:.3f}, on the CPU {here:.3f}"
    return f"loss {there:.3f}, on the CPU {here:.3f}, bfloat16 {plain:.3f}"


def drawing(num_rows: int, device: str, num_steps: int = 50) -> str:
    """Tokens a second of rows that draw, all together, and the step's share of that time."""
    model = kvalign.load_model("llama-mini", device).model
    first = kvalign.make_method("streaming-llm", model, cache_size=64)
    first.take_ready_stepper()
    ids, batch = random_ids(num_rows, 80).to(device).split(1), Batch(first)
    methods = [first.new() for _ in ids]
    rows = [Row(x, **Sampling(seed=i).of_row(model.device)) for i, x in enumerate(ids)]
    for row, method in zip(rows, methods, strict=True):
        row.choose(method.feed(row.ids), method)
    batch.join(rows, methods)
    tokens, seconds = torch.cat([row.token for row in rows])[:, None], []
    for step in (lambda: first.feed(tokens).max().item(), batch.step):
        for num in (8, num_steps):  # the first ones are recorded
            start = time.perf_counter()
            for _ in range(num):
                step()
        seconds.append((time.perf_counter() - start) / num_steps)
    share = seconds[0] / seconds[1]
    return f"{num_rows / seconds[1]:.0f} tokens a second, {share:.2f} of the time is the step's"


def invariants(name: str, method: str, device: str, **sizes) -> str:
    """All of `kvalign verify`."""
    model = kvalign.load_model(name, device).model
    make_it = partial(kvalign.make_method, method, cache_size=32, **sizes)
    found = kvalign.verify(model, make_it, num_steps=100)
    failed = [one.name for one in found if one.state == "failed"]
    assert not failed, f"failed: {', '.join(failed)}"
    return f"{sum(one.state == 'passed' for one in found)} passed"


def checks() -> Iterator[tuple[str, Check]]:
    """In the order of their worth."""
    names = (name for name in METHODS if name != "dense")
    ways = of_each_family((*names, "tables"))
    more = [("streaming-llm", "llama", dict(policy=name)) for name in POLICIES]
    more += [
        ("streaming-llm", kind, sizes)
        for kind in ("llama", "qwen3")
        for sizes in (
            dict(cache_dtype="int8"),
            dict(memory=30),
            dict(memory=60, cache_dtype="int8"),
            dict(num_evicted=5),
        )
    ]
    more += [
        ("tables", "gpt2", dict(cache_dtype="int8")),
        ("tables", "gpt2", dict(memory=30)),
        ("tables", "gpt2", dict(memory=30, recall_places="age")),
        ("tables", "gpt2", dict(policy="key-norm")),
    ]
    for name, kind, sizes in (
        ("streaming-llm", "llama", {}),
        ("tables", "gpt2", {}),
        ("tables", "llama", {}),
        ("streaming-llm", "llama", dict(cache_dtype="int8")),
        ("tables", "gpt2", dict(cache_dtype="int8")),
        ("streaming-llm", "llama", dict(memory=60)),
        ("tables", "gpt2", dict(memory=60)),
        ("streaming-llm", "llama", dict(memory=60, cache_dtype="int8")),
        ("window", "qwen3", dict(num_evicted=3)),
        ("streaming-llm", "opt", {}),
        ("kvalign", "gpt2", {}),
    ):
        for num_rows in (1, 4):
            title = f"captured, {name}, {kind}, {sizes}, {num_rows} rows"
            yield title, partial(captured, name, kind, sizes, num_rows=num_rows)
    for name, kind in (("streaming-llm", "llama"), ("tables", "gpt2"), ("tables", "llama")):
        yield f"compiled, {name}, {kind}", partial(captured, name, kind, {}, compiled=True)
    for name, kind in (("streaming-llm", "llama"), ("window", "qwen3"), ("streaming-llm", "gpt2")):
        yield f"bfloat16, {name}, {kind}", partial(as_exact, name, kind, {})
    for num_rows in (1, 64, 256):
        yield f"{num_rows} rows that draw", partial(drawing, num_rows)
    for bits in ("int8", "int4"):
        yield f"weights of {bits}", partial(weights, bits)
    for name, kind in ways:
        yield f"float32, {name}, {kind}", partial(same, name, kind, {})
    for name, kind, sizes in more:
        yield f"float32, {name}, {kind}, {sizes}", partial(same, name, kind, sizes)
    for model, method, how in (
        ("gpt2-mini", "kvalign", {}),
        ("llama-mini", "streaming-llm", {}),
        ("gpt2-mini", "kvalign", dict(lookup=8)),
        ("llama-mini", "streaming-llm", dict(cache_dtype="int8")),
        ("llama-mini", "streaming-llm", dict(memory=200)),
        ("gpt2-mini", "discard-half", {}),
    ):
        yield f"text, {model}, {method}, {how}", partial(text, model, method, how)
    for name, kind in ways:
        yield f"bfloat16, {name}, {kind}", partial(as_exact, name, kind, {})
    for name, kind in (("streaming-llm", "llama"), ("tables", "gpt2"), ("window", "bloom")):
        yield f"segments, {name}, {kind}", partial(one_by_one, name, kind)
    for num_rows in (1, 64):
        rows = partial(same, "streaming-llm", "llama", {}, num_rows=num_rows)
        yield f"float32, {num_rows} rows", rows
    for kind in (*KINDS, *MORE_KINDS):
        method = "streaming-llm" if kind not in ("gpt2", "opt", "gpt_neo") else "tables"
        yield f"float32, {method}, {kind}", partial(same, method, kind, {})
    for model, method in (("llama-mini", "streaming-llm"), ("gpt2-mini", "kvalign")):
        yield f"verify, {model}", partial(invariants, model, method)
        yield f"verify, {model}, memory", partial(invariants, model, method, memory=200)


def run(device: str, minutes: float, only: str = "") -> int:
    """Print each finding; return how many differ."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    print(f"{name}, torch {torch.__version__}, {minutes:g} minutes", flush=True)
    end, num_failed, num_passed, not_measured = time.monotonic() + 60 * minutes, 0, 0, []
    for title, check in checks():
        if only not in title:
            continue
        if time.monotonic() > end:
            not_measured.append(title)
            continue
        start = time.monotonic()
        try:
            found, num_passed = f"passed: {check(device)}", num_passed + 1
        except AssertionError as error:
            found, num_failed = f"DIFFERS: {error}", num_failed + 1
        except Exception as error:
            first = str(error).partition("\n")[0]
            found, num_failed = f"FAILED: {type(error).__name__}: {first}", num_failed + 1
        print(f"{title}: {found} ({time.monotonic() - start:.1f} s)", flush=True)
    for title in not_measured:
        print(f"{title}: not measured")
    print(f"{num_passed} passed, {num_failed} failed, {len(not_measured)} not measured", flush=True)
    return num_failed


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", default="", help="a part of the titles of checks")
    asked = parser.parse_args()
    return 1 if run(asked.device, asked.minutes, asked.only) else 0


if __name__ == "__main__":
    sys.exit(main())
