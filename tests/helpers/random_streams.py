"""Random streams, each beside plain loops: whatever is done to a batch is done to them, too."""

import copy
import random
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from helpers.methods import network, table_network, tables
from helpers.plain_memory import PlainMemory
from helpers.plain_stream import PlainStream, PlainWindow, Plan
from helpers.tiny_models import SCALINGS, VOCAB
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.memory.memory import Memory
from kvalign.methods import make_method
from kvalign.models.architectures import FAMILIES, REGISTERED, spec_of
from kvalign.policies import POLICIES
from kvalign.streaming.pieces import Piece, encode

FACTOR = 4  # times as far from float64 as the plain loop of the same precision is
EXACT = 1e-5  # of logits of about 1 in float32
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float32, *HALVES)
MORE = {  # kinds of `tiny_model` with other settings
    "yarn": ("llama", dict(rope_parameters=SCALINGS["yarn"])),
    "short": ("qwen2", dict(max_position_embeddings=48, hidden_size=64)),  # than aligners
    "partial": ("phi", {}),
    "neighbours": ("glm", {}),
    "falcon": ("falcon", dict(alibi=True)),
    "layers": ("llama4_text", dict(num_local_experts=1)),
    "experts": ("qwen2_moe", dict(num_experts_per_tok=4)),  # all: a choice of some is turned
}
WAYS = ("window", "streaming-llm", "kvalign", "kvalign", "policy", "policy", "again", "memory")
AGAIN = ("recompute", "discard-half", "dense")
ALIGNERS = {"table": tables, "table-network": table_network, "network": network}
FAILURES = (RuntimeError, KeyboardInterrupt)
KEEPING = ("window", "streaming-llm", "kvalign")
CHANGES = ("feed", "feed", "edit", "edit", "join", "select", "save", "copy", "fail")
FED = (*(1, 2, 9) * 4, 70)


class RandomStream:
    """One case of an architecture: a batch of a method, and the plain loops of each of its rows:
    one in float64, in half precision one of that, too.

    Args:
        models: of a kind, a dtype and an attention: the model and its copies, those of
            `PlainMemory` among them.

    Attributes:
        worst: how far a logit was from float64; `honest`: how far one of the plain loop was.
        found: what happened, counted.
    """

    def __init__(self, kind, models, seed):
        self.rng, self.name = random.Random(seed), kind
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        self.found, self.worst, self.honest, self.method = Counter(), 0.0, 0.0, None
        while self.method is None:
            way = self.rng.choice(WAYS)
            self.dtype = self.rng.choice(DTYPES)
            of_model = kind, self.dtype, self.rng.choice(("sdpa", "eager"))
            self.model, self.exact, self.rough, self.remembering = models(*of_model)
            self.kind = self.model.config.model_type
            self.method = self._made(way)
        self.rows: list[list] = []
        self.found[str(self.dtype).removeprefix("torch.")] += 1

    def __str__(self):
        return f"{self.dtype} {self.method.in_words}, {self.plan or self.method.sizes}"

    def _made(self, way):
        """A method and its plain loops; None if these sizes do not go together."""
        rng, pick = self.rng, self.rng.choice
        size = rng.randint(2, 14)
        num_sinks = 0 if way == "window" else rng.randint(0, min(4, size - 1))
        num_evicted = pick((1, 1, 1, rng.randint(1, size - num_sinks)))
        asked = dict(cache_size=size, num_sinks=num_sinks, num_evicted=num_evicted)
        planned, name, kind = {}, way, "none"
        if way == "again":
            name = pick(AGAIN)
            if name == "discard-half":
                half = max(1, (size - num_sinks) // 2)
                num_evicted = asked["num_evicted"] = pick((half, num_evicted))
            if name == "dense":
                size, num_sinks, num_evicted = 10**6, 0, 1
        elif way == "policy":
            name = pick(("streaming-llm", "kvalign"))
            policy = pick([*POLICIES]) if name == "streaming-llm" else pick([*POLICIES][1:])
            is_kept = policy == "oldest" or (name == "streaming-llm" and pick((0, 0, 1)))
            num_recent = rng.randint(0, size - num_sinks + 1 - num_evicted)
            planned = dict(policy=policy, num_recent=num_recent)
            planned["positions"] = "keep" if is_kept else "compact"
            kind = pick(("table", "table-network")) if name == "kvalign" else "none"
        elif way == "memory":
            name = pick(("streaming-llm", "kvalign"))
            asked["num_evicted"], asked["memory"] = 1, rng.randint(5, pick((9, 60)))
            asked["num_recalled"] = rng.randint(1, max(1, size - num_sinks - 1))
            asked["recall_places"] = pick((None, "age", "rank"))
            asked["recall_layers"] = pick((None, None, "1", "0:-1.5,1:0.5"))
            if self.kind not in REGISTERED:
                return None
            kind = "table" if name == "kvalign" else "none"
        elif way == "kvalign":
            kind = pick([*ALIGNERS])
            planned["realign_every"] = pick((1, 1, 1, 2, 5))
            if kind == "table" and self.kind in REGISTERED and FAMILIES[self.kind] == "rotary":
                planned["realign_every"] = 1  # it is refused, unless it is the length of a frame
        rounds = way not in ("again", "policy") and pick((0, 0, 1))
        if rounds:
            asked["cache_dtype"] = "int8"
        fixed = {"window": ["num_sinks"], "dense": ["num_sinks", "num_evicted"]}
        asked = {x: y for x, y in (asked | planned).items() if x not in fixed.get(name, ())}
        aligner = self._aligner(kind, num_sinks)
        given = {} if aligner is None else {"aligner": aligner}
        try:
            method = make_method(name, self.model, warn=False, **asked, **given)
        except UserError:
            return None
        self.numbers = {} if aligner is None else dict(aligner.named_parameters())
        spec, self.rounds = spec_of(self.model.config), None
        if rounds:
            self.rounds = {i: x.double() for i, x in method.cache.bases.items()}
            self.rough = self.rough or self.exact
            self.remembering = (
                [self.remembering[0], self.remembering[-1]] if self.remembering else []
            )
        planned["context_len"] = spec.context_len or 64
        self.plan = Plan(self.kind, size, num_sinks, num_evicted, aligner=kind, **planned)
        self.loop = PlainWindow if way == "again" else PlainStream
        if way == "memory":
            self.plan, self.loop = None, PlainMemory
        self.most = spec.context_len if method.tokens_left is not None else 10**6
        self.found[way] += 1
        return method

    def _aligner(self, kind, num_sinks):
        if kind == "none":
            return None
        if kind == "network":
            return network(self.model, train=True, num_sinks=num_sinks)
        return ALIGNERS[kind](self.model, 0.3)

    @property
    def is_even(self) -> bool:
        return len({row[0].seen for row in self.rows}) == 1

    def run(self) -> None:
        """Begin, and do some things, one after another."""
        if self.rng.random() < 0.2:
            with self._failing():
                self.method.feed(self._tokens(self.rng.randint(1, 3), 3))
        num_rows = self.rng.choice((1, 1, 2))
        self.rows = [self._new_row() for _ in range(num_rows)]
        self._feed(self.rng.randint(1, 2 * self.method.sizes.cache_size))
        for _ in range(self.rng.randint(1, 4)):
            what = self.rng.choice(CHANGES)
            if what in ("join", "select") and self.method.name == "dense":
                what = "feed"
            if what == "edit" and not self._may_be_edited:
                what = "feed"
            self.found[what] += 1
            getattr(self, f"_{what}")(*[self.rng.choice(FED)] * (what == "feed"))
        self._feed(2)
        if self.loop is PlainMemory:
            memories = self.method.cache.memory.of.values()
            self.found["memories that turned"] += any(max(x.seen) > x.most for x in memories)

    def check(self) -> None:
        """Raise AssertionError if logits are further from float64 than they may be."""
        bound = FACTOR * self.honest if self.rough else EXACT
        assert self.worst <= bound, f"{self.worst:.1e} from float64, at most {bound:.1e}"

    def _tokens(self, num_rows, num) -> Tensor:
        return torch.randint(2, VOCAB, (num_rows, num), generator=self.generator)

    def _new_row(self):
        if self.loop is PlainMemory:
            told = self.method.sizes, self.numbers or None, 400
            each = zip(self.remembering, (None, self.rounds), strict=False)
            return [PlainMemory(model, *told, rounds) for model, rounds in each]
        plans = self.plan, replace(self.plan, rounds=self.rounds)
        each = zip([self.exact, *([self.rough] if self.rough else [])], plans, strict=False)
        return [self.loop(model, plan, self.numbers) for model, plan in each]

    @property
    def _may_be_edited(self) -> bool:
        if self.loop is PlainMemory:  # what is taken back is told of rows that are alike
            return self.is_even and len(set(self.method.cache.num_gone)) == 1
        return self.loop is PlainStream and self.plan.is_slice and self.plan.aligner != "network"

    def _edit(self) -> None:
        """Some tokens are replaced by others, and by pieces that were encoded alone, or it is
        tried, and taken back.
        """
        rng, cache, num_sinks = self.rng, self.method.cache, self.method.sizes.num_sinks
        kept = [*map(cache.kept_sizes.num_stored, cache.seen)]
        gone = [all_of - own for all_of, own in zip(cache.num_tokens, kept, strict=True)]
        least, most = num_sinks if any(gone) else 0, min(cache.num_tokens)
        if least > most:
            return
        start = rng.randint(least, most)
        stop = rng.randint(start, most)
        parts = [self._new_part() for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        first, last = (
            [x if x < num_sinks else max(x - num, num_sinks) for num in gone] for x in (start, stop)
        )
        is_left = [bool(parts) or num + x > y for num, x, y in zip(kept, first, last, strict=True)]
        if (stop == start and not parts) or not all(is_left):
            return
        is_memory = self.loop is PlainMemory
        with self._taken_back() if is_memory else nullcontext() as taken:
            self.method.edit(start, stop, *map(self._given, parts))
        if not is_memory and rng.random() < 0.2:
            self.method.undo_edit()
            return
        self.found["edits of uneven rows"] += not self.is_even
        for i, row in enumerate(self.rows):
            own = [part if isinstance(part, Piece) else part[i] for part in parts]
            if gone[i] and stop < num_sinks + gone[i]:  # before the oldest, as the new ones are
                own = []
            if is_memory:
                self._edit_memory(i, row, first[i], last[i], own, taken)
                continue
            for loop in row:
                loop.edit(first[i], last[i], [self._alone(loop, part) for part in own])

    def _new_part(self) -> Tensor | Piece:
        num, is_piece = self.rng.choice((1, 7)), self.rng.random() < 0.3
        self.found["pieces"] += is_piece
        if not is_piece:
            return self._tokens(len(self.rows), num)
        ids, before = (self._tokens(1, n)[0].tolist() for n in (num, self.rng.choice((1, 3))))
        return encode(self.model, None, ids, after=before)

    def _given(self, part):
        is_piece = isinstance(part, Piece)
        return part.part(self.method.model, len(self.rows)) if is_piece else part

    def _alone(self, loop, part):
        """The tokens of a part, or a stream of its own that has read them alone."""
        if isinstance(part, Tensor):
            return part
        other = PlainStream(loop.model, replace(loop.plan, cache_size=99), self.numbers)
        other.take(torch.tensor(part.info.before + part.ids))
        other.keep_slots(torch.arange(len(part.info.before), other.seen))
        return other

    def _edit_memory(self, i, row, first, stop, parts, taken) -> None:
        """Row `i`, with what was `taken` back by its method."""
        exact, *rough = row
        models = (self.exact, self.rough)
        tails = [loop.cut(first, stop) for loop in row]
        for part in parts:
            if isinstance(part, Piece):
                for loop, model in zip(row, models, strict=False):
                    loop.take_encoded(*_encoded(model, part))
                continue
            for token in part:
                of_token = _next_of(taken, i, exact.seen)
                for loop in rough:
                    loop.follow(token, of_token, None)
                exact.follow(token, of_token, *(rough or [None]))
        for loop, tail in zip(row, tails, strict=True):
            if tail[0].shape[2]:
                loop.append(tail)

    def _join(self) -> None:
        if len(self.rows) > 2:
            return
        batch, rows, others = self.method, self.rows, []
        for _ in range(self.rng.randint(1, 2)):
            self.method, self.rows = batch.new(), [self._new_row()]
            self._feed(self.rng.randint(1, 2 * self.method.sizes.cache_size))
            others.append(self.method)
            rows = rows + self.rows
        self.method, self.rows = batch, rows
        self.method.join(others)
        if self.rng.random() < 0.5 and self._may_be_edited:
            self._edit()

    def _select(self) -> None:
        chosen = [self.rng.randrange(len(self.rows)) for _ in range(self.rng.randint(1, 3))]
        self.method.select(chosen)
        self.rows = [[_copied(loop) for loop in self.rows[i]] for i in chosen]

    def _save(self) -> None:
        state = {name: x.clone() for name, x in self.method.state().items()}
        self.method = self.method.new()
        self.method.restore(state)

    def _copy(self) -> None:
        """The stream goes on in a copy, of its method or of its cache alone; what is done to the
        other is not seen.
        """
        method, cache = self.method, getattr(self.method, "cache", None)
        if self.rng.random() < 0.5 and isinstance(cache, StreamingCache) and method.name in KEEPING:
            other, method.cache = cache, copy.deepcopy(cache)
            other.select([0])
            return
        self.method = copy.deepcopy(method)
        if max(row[0].seen for row in self.rows) < self.most:
            method.feed(self._tokens(len(self.rows), 1))

    def _fail(self) -> None:
        """A step that fails is as if it had not been, or refused until the stream is taken up."""
        if max(row[0].seen for row in self.rows) + 3 > self.most:
            return
        state = {name: x.clone() for name, x in self.method.state().items()}
        ids = self._tokens(len(self.rows), self.rng.choice((1, 3)))
        with self._failing():
            self.method.feed(ids)
        try:
            self._take(ids[:, :1])
        except UserError as error:
            if "reset() it" not in str(error):
                raise
            self.found["refused"] += 1
            if self.rng.random() < 0.5:
                self.method = self.method.new()
            self.method.restore(state)
            self._take(ids[:, :1])

    @contextmanager
    def _failing(self):
        """Within it a layer of the model fails, and nothing else does."""
        lists = (x for x in self.model.modules() if isinstance(x, nn.ModuleList))
        layer, why = self.rng.choice(max(lists, key=len)), self.rng.choice(FAILURES)

        def fail(*args):
            raise why("planted")

        hook, failed = layer.register_forward_pre_hook(fail), False
        try:
            yield
        except why:
            failed = True
        finally:
            hook.remove()
        assert failed, "what fails was not asked"

    def _feed(self, num) -> None:
        """So many tokens more of each row, in pieces after which it can be seen who is left."""
        num = min(num, self.most - max(row[0].seen for row in self.rows))
        ids = self._tokens(len(self.rows), max(num, 0))
        while ids.shape[1]:
            num = ids.shape[1]
            if self.loop is PlainMemory and not self.is_even:
                num = 1
            if self.loop is PlainStream and not self.plan.is_slice:
                num = self.plan.takes_at_once(self.rows[0][0].seen, num) if self.is_even else 1
            self._take(ids[:, :num])
            ids = ids[:, num:]

    def _take(self, ids) -> None:
        if self.loop is PlainMemory:
            return self._take_with_memory(ids)
        logits, is_even = self.method.feed(ids), self.is_even
        for row, own, given in zip(self.rows, ids, logits, strict=True):
            exact, *rough = (self._stepped(loop, own, is_even) for loop in row)
            self.worst = max(self.worst, _apart(given, exact))
            self.honest = max(self.honest, *(_apart(x, exact) for x in rough), 0.0)
        if self.loop is PlainStream and not self.plan.is_slice:
            for i, row in enumerate(self.rows):
                kept = self.method.cache.index(i)
                self.found["other entries"] += row[0].evict(kept, row[-1], FACTOR)
        return None

    def _stepped(self, loop, ids, is_even) -> Tensor:
        if self.loop is PlainWindow:
            return loop.take(ids)
        while len(ids):
            num = self.plan.takes_at_once(loop.seen, len(ids)) if is_even else 1
            logits, ids = loop.take(ids[:num]), ids[num:]
        return logits

    def _take_with_memory(self, ids) -> None:
        """What is taken back is a choice that rounding turns: loops follow it, and judge it."""
        with self._taken_back() as taken:
            if ids.shape[1] > 1 and self.method.is_exact:
                logits = self.method.feed_segment(ids)
            else:
                tokens = ids.split(1, 1)
                logits = torch.stack([self.method.feed(token) for token in tokens], 1)
        for i, (row, own, given) in enumerate(zip(self.rows, ids, logits, strict=True)):
            exact, *rough = row
            for token, found in zip(own, given, strict=True):
                of_token = _next_of(taken, i, exact.seen)
                others = [loop.follow(token, of_token, None) for loop in rough]
                right = exact.follow(token, of_token, *(rough or [None]))
                self.worst = max(self.worst, _apart(found, right))
                self.honest = max(self.honest, *(_apart(x, right) for x in others), 0.0)

    @contextmanager
    def _taken_back(self):
        """What is taken back within it: of a row and a number of tokens before, which an edit may
        come to twice, in turn; by layer, the tokens of each head.
        """
        taken, find, see = defaultdict(list), Memory.find, Memory.see

        def told(memory, queries, asking, *placing):
            found = find(memory, queries, asking, *placing)
            memories = self.method.cache.memory.of
            (layer,) = (i for i, one in memories.items() if one is memory)
            for row, (ages, visible) in enumerate(zip(found.ages, found.visible, strict=True)):
                for t, now in enumerate(asking.seen[min(row, len(asking.seen) - 1)].tolist()):
                    of_heads = zip(ages[:, t], visible[:, t], strict=True)
                    steps = taken[row, now]
                    if not steps or layer in steps[-1]:
                        steps.append({})
                    steps[-1][layer] = [(now - x[seen]).tolist() for x, seen in of_heads]
            return found

        def found_and_seen(memory, queries, asking, *placing):
            turned = asking.angles.rotate(queries.float()) if asking.angles else queries
            memory.find(turned, asking)
            return see(memory, queries, asking, *placing)

        Memory.find, Memory.see = told, found_and_seen
        try:
            yield taken
        finally:
            Memory.find, Memory.see = find, see


def _next_of(taken, row, seen) -> dict[int, list[list[int]]]:
    """What the next step of a row with so many tokens takes back."""
    steps = taken[row, seen]
    return steps.pop(0) if steps else {}


def _encoded(model, piece) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [L, H, S, D] of a piece, and their positions."""
    cache, num = DynamicCache(), len(piece.info.before)
    with torch.no_grad():
        model(torch.tensor([piece.info.before + piece.ids]), past_key_values=cache)
    both = ([getattr(x, name)[0, :, num:] for x in cache.layers] for name in ("keys", "values"))
    return *map(torch.stack, both), torch.arange(num, num + len(piece))


def _copied(loop):
    """A loop that goes on alone."""
    if not isinstance(loop, PlainMemory):
        return loop.clone()
    other = copy.copy(loop)
    other.keys, other.values = loop.keys.clone(), loop.values.clone()
    return other


def _apart(x, y) -> float:
    return (x.double() - y.double()).abs().max().item()
