"""What a memory that is full forgets: the questions of `eval recall`, and a text, with a rule each.

    python tests/scripts/memory_forgetting.py --rules oldest,asked --sizes 64,256

The memory holds everything, and each KV head forgets for itself: after every `STEP` tokens what is
beyond the size cannot be found any more. What it finds else is what it always does.

- `oldest`: the oldest goes, as in the package.
- `random`: any; what is left is a sample of all tokens, old and new.
- `asked`: what was taken back least, where a time counts half after `--half-life` sizes; of those
  that were never taken back the oldest.
- `repeated`: what a newer entry repeats (as of `RecallPlaces.alike`), then the oldest.
- `both`: what a newer entry repeats, then as `asked`.
"""

import copy
import json
import sys
import time
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign import load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.cache import segments
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.evaluations.recall import FAR, recall
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option
from kvalign.foundation.statistics import interval
from kvalign.memory.memory import Memory, alike_newer, at
from kvalign.streaming.scoring import score

STEP = 16
RULES = ("oldest", "random", "asked", "repeated", "both")


@dataclass(frozen=True, kw_only=True)
class ForgettingSettings(Settings):
    """Compare rules by which a full memory forgets.

    Example:
        python tests/scripts/memory_forgetting.py --sizes 64 --num-questions 50
    """

    rules: tuple[str, ...] = option(RULES, help="what is compared", choices=RULES)
    sizes: tuple[int, ...] = option((64, 128, 256, 512), help="tokens stored", at_least=16)
    half_life: float = option(4.0, help="of a time that an entry was asked for, in sizes", above=0)
    model: str = option("recall-llama", help="a model of facts, or one whose text is scored")
    method: str = option("streaming-llm", help="of that model")
    cache_size: int = option(64, help="entries of the cache", at_least=16)
    num_questions: int = option(400, help="questions about facts, each distance", at_least=1)
    corpus: str | None = option(None, help="text that is scored, instead of facts")
    num_labels: int = option(5000, help="labels of the text", at_least=1)


class Forgetting:
    """The rule of one run, with what it knows of each memory's slots, [B, H, S] each."""

    def __init__(self, rule: str, size: int, half_life: float):
        self.rule, self.size, self.decay = rule, size, 0.5 ** (1 / (half_life * size))
        self.lost: dict[int, Tensor] = {}
        self.asked: dict[int, Tensor] = {}
        self.find = Memory._find

    def __call__(self, memory: Memory, queries: Tensor, added: Tensor, evicted, span: slice):
        """What `Memory._find` returns, of the same arguments."""
        of, num_slots = id(memory), memory.num_slots
        like = queries.new_zeros(*queries.shape[:2], 0)
        more = num_slots - self.lost.get(of, like).shape[2]
        self.lost[of] = lost = pad(self.lost.get(of, like.bool()), (0, more))
        self.asked[of] = asked = pad(self.asked.get(of, like), (0, more))
        mine = copy.copy(evicted)
        mine.__dict__["worth"] = evicted.worth.masked_fill(lost[:, :, None], -torch.inf)
        mine.are_many = False
        slots, ages, visible = self.find(memory, queries, added, mine, span)
        num = queries.shape[3]
        asked *= self.decay**num
        asked.scatter_add_(2, slots.flatten(2), visible.flatten(2).float())
        now = evicted.ages(torch.arange(num_slots), span)[:, :, -1]  # [B, 1, S]
        oldest = evicted.oldest[:, :, span][:, :, -1]
        self.forget(memory, now, (now > evicted.near) & (now <= oldest) & ~lost, lost, asked)
        return slots, ages, visible

    def forget(self, memory: Memory, ages: Tensor, stored: Tensor, lost: Tensor, asked: Tensor):
        """Mark entries of the slots as lost until so many are stored."""
        excess = stored.sum(-1) - self.size  # [B, H]
        if (most := int(excess.max())) <= 0:
            return
        worth = -ages.double().expand(stored.shape)
        if self.rule == "random":
            rng = torch.Generator().manual_seed(0)
            worth = torch.rand(ages.shape[-1], generator=rng).double().expand(stored.shape)
        if self.rule in ("asked", "both"):
            worth = worth + 1e6 * (asked > 1e-3) * asked
        if self.rule in ("repeated", "both"):
            worth = worth - 1e12 * self.is_repeated(memory, ages, stored)
        worst = worth.masked_fill(~stored, torch.inf).topk(most, largest=False)
        goes = torch.arange(most) < excess[..., None]
        lost.scatter_(2, worst.indices, goes | lost.gather(2, worst.indices))

    def is_repeated(self, memory: Memory, ages: Tensor, stored: Tensor) -> Tensor:
        """Slots whose key a newer stored one repeats, [B, H, S]."""
        num = int(stored.sum(-1).max())
        by_age = ages.expand(stored.shape).masked_fill(~stored, -1)
        slots = by_age.topk(num).indices  # the oldest first
        is_there = stored.gather(2, slots)
        keys = at(memory.form.decode(memory.entries.keys), slots[:, :, None])[:, :, 0]
        newer = torch.full((num, num), -torch.inf).tril()
        alike = alike_newer(keys[:, :, None], newer, is_there[:, :, None])[:, :, 0]
        is_repeated = (alike > memory.alike) & is_there
        return torch.zeros_like(stored).scatter(2, slots, is_repeated)


def run(settings: ForgettingSettings) -> None:
    """Print a line for each run and one of JSON, the document."""
    started, rows, first = time.perf_counter(), [], {}
    how = dict(cache_size=settings.cache_size, memory=100_000, warn=False)
    loaded = load_model(settings.model) if settings.corpus else None
    for size in settings.sizes:
        for rule in settings.rules:
            start = time.perf_counter()
            forgetting = Forgetting(rule, size, settings.half_life)
            find = lambda *of, forgetting=forgetting: forgetting(*of)  # noqa: E731
            with (
                patch.object(Memory, "_find", find),
                patch.object(Memory, "_has_kernel", lambda _: False),
                patch.object(segments, "SEGMENT_LEN", STEP),
            ):
                about = {"model": settings.model, "rule": rule, "memory": size}
                if loaded is not None:
                    num = settings.num_labels + settings.cache_size + 1
                    text = first_ids(settings.corpus, loaded.tokenizer, num, "--num-labels")
                    method = make_method(settings.method, loaded.model, **how)
                    losses = score(method, torch.tensor([text]))
                    apart = losses - first.setdefault(size, losses)
                    low, high = interval(apart)
                    found = {"perplexity": losses.double().mean().exp().item()}
                    found |= {"ratio": apart.double().mean().exp().item()}
                    found |= {"ratio_low": low, "ratio_high": high}
                else:
                    of = dict(num_questions=settings.num_questions, farthest=64, num_streams=8)
                    of |= dict(num_sinks=(0,), cache_sizes=(settings.cache_size,))
                    method = dict(methods=(settings.method,), memory=(100_000,))
                    (found,) = recall(model=settings.model, **of, **method)["rows"]
                    names = ["accuracy", *FAR.values(), "num_questions"]
                    names += [f"{x}_{end}" for x in FAR.values() for end in ("low", "high")]
                    found = {name: found[name] for name in names}
            rows.append(about | found | {"seconds": round(time.perf_counter() - start, 1)})
            shown = {
                k: round(v, 3) for k, v in found.items() if "_low" not in k and "_high" not in k
            }
            print(*about.values(), shown, rows[-1]["seconds"], flush=True)
    print(json.dumps(document("script memory-forgetting", settings, rows, started=started)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        run(parse(ForgettingSettings, sys.argv[1:], "python tests/scripts/memory_forgetting.py")[0])
