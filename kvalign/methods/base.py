"""What every streaming method does: take in tokens, give the logits of the next one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign import relative
from kvalign.cache import StreamingCache, check_sizes, named
from kvalign.models import spec_of
from kvalign.realign import Realigner

_BATCH_TOKENS = 8192  # tokens encoded at once when whole windows are scored
_BATCH_LOGITS = 1 << 26  # logits held at once, 256 MiB of float32

OnLabels = Callable[[int], object]


class Method(ABC):
    """One way to stream; an instance is a batch of streams of equal length.

    Args:
        model: a causal LM of transformers.
        cache_size: entries stored between steps.
        num_sinks: first entries that stay; None takes the method's own default.
        num_evicted: entries dropped at once; None takes the method's own default.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    default_num_sinks: ClassVar[int] = 4
    takes_aligner: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    """Sizes that the method itself sets."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache_size: int,
        num_sinks: int | None = None,
        num_evicted: int | None = None,
    ):
        self.model, self.spec = model, spec_of(model.config)
        self.cache_size = cache_size
        self.num_sinks = self.default_num_sinks if num_sinks is None else num_sinks
        self.num_evicted = self.default_num_evicted() if num_evicted is None else num_evicted
        check_sizes(self.spec, cache_size, self.num_sinks, self.num_evicted)

    def default_num_evicted(self) -> int:
        return 1

    @property
    def aligner_name(self) -> str | None:
        """What the aligner is called in a table of results; None for a method without one."""
        return None

    @property
    def title(self) -> str:
        """What a table calls it: `kvalign (table)`."""
        return f"{self.name} ({self.aligner_name})" if self.aligner_name else self.name

    @property
    def room(self) -> int | None:
        """Tokens that can still be fed; None: endless."""
        return None

    @property
    def fill(self) -> int:
        """Entries that the next token finds: at most cache_size, of `dense` all."""
        raise NotImplementedError(f"{self.name} does not say how full it is")

    @abstractmethod
    def reset(self) -> None:
        """Forget the stream."""

    @abstractmethod
    def feed(self, ids: Tensor) -> Tensor:
        """Take in ids [B, T] int64, T >= 1; return the next token's logits [B, V] float32."""

    def state(self) -> dict[str, Tensor]:
        """The stream so far; `restore` of a method made alike goes on with it, to the bit."""
        raise ValueError(f"streams of {self.name} cannot be saved")

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on with the stream of `state`, tensors on the model's device.

        Raises:
            ValueError: it is not the state of such a method on such a model.
        """
        raise ValueError(f"streams of {self.name} cannot be saved")

    def score(self, ids: Tensor, on_labels: OnLabels = lambda n: None) -> Tensor:
        """As `score_stepwise`, to rounding; by a faster way where the method has one."""
        return self.score_stepwise(ids, on_labels)

    @torch.no_grad()
    def score_stepwise(self, ids: Tensor, on_labels: OnLabels = lambda n: None) -> Tensor:
        """NLL in nats of every token after the first cache_size + 1, each given those before it.

            ids   0 1 ... C | C+1 C+2 ... N-1
                  first input  labels

        Args:
            ids: [1, N] int64, N >= cache_size + 2.
            on_labels: told the number of labels scored since the last call, for a progress bar.

        Returns:
            [N - cache_size - 1] float32.
        """
        first = self.cache_size + 1
        self.reset()
        logits = self.feed(ids[:, :first])
        nll = []
        for i in range(first, ids.shape[1]):
            nll.append(torch.nn.functional.cross_entropy(logits, ids[:, i]))
            on_labels(1)
            if i + 1 < ids.shape[1]:
                logits = self.feed(ids[:, i : i + 1])
        return torch.stack(nll)


class Cached(Method):
    """A method that keeps its entries in a streaming cache and moves them with a realigner."""

    def __init__(self, model: PreTrainedModel, **sizes: Any):
        super().__init__(model, **sizes)
        self.cache = StreamingCache(
            self.spec, self.cache_size, self.num_sinks, self.num_evicted, self.realigner()
        )

    @abstractmethod
    def realigner(self) -> Realigner | None:
        """What moves kept entries."""

    @property
    def fill(self) -> int:
        return self.cache.get_seq_length()

    def reset(self) -> None:
        self.cache.reset()

    def state(self) -> dict[str, Tensor]:
        return self.cache.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self.cache.restore(state, self.model)

    @torch.no_grad()
    def score(self, ids: Tensor, on_labels: OnLabels = lambda n: None) -> Tensor:
        """The same figures as stepping; in segments where the relative form is exact."""
        realigner = self.cache.realigner
        if not relative.is_exact(self.model, self.cache_size, realigner):
            return self.score_stepwise(ids, on_labels)
        stream = relative.Stream(
            self.model, self.cache_size, self.num_sinks, self.num_evicted, realigner
        )
        return relative.score(stream, ids, on_labels)

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """The first cache_size + 1 tokens go in at once, more of them by half the window."""
        done = 0
        while done < ids.shape[1]:
            chunk = ids[:, done : done + self._chunk_len()]
            out = self.model(
                input_ids=chunk, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
            done += chunk.shape[1]
        return out.logits[:, -1].float()

    def _chunk_len(self) -> int:
        stored = self.cache.get_seq_length()
        if stored < self.cache_size:
            return self.cache_size + 1 - stored
        half = max(1, (self.cache_size - self.num_sinks) // 2)
        limit = self.num_positions
        return half if limit is None else min(half, limit - stored)

    @property
    def num_positions(self) -> int | None:
        """Positions at which an entry may be born; None: any."""
        return self.spec.context_len


class Reencoding(Method):
    """A method that re-encodes what it keeps: the logits of every step have nothing stale.

    The kept tokens change only when something is dropped, so all steps between two drops are one
    causal forward pass: scoring takes a batch of such periods at once.
    """

    seen: Tensor | None
    """[B, S] int64, what the last step saw."""

    def state(self) -> dict[str, Tensor]:
        return {} if self.seen is None else {"seen": self.seen}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        if state:
            shape = tuple(state["seen"].shape) if "seen" in state else ()
            seen = named(state, "seen", shape, torch.int64)
            vocab_size = self.model.config.vocab_size
            if (
                len(shape) != 2
                or seen.numel() == 0
                or shape[1] > self.cache_size + 1
                or not (0 <= seen.min() <= seen.max() < vocab_size)
            ):
                raise ValueError(
                    f"a stream's seen must be [B, S] ids below {vocab_size}, S at most "
                    f"{self.cache_size + 1}"
                )
            self.seen = seen.to(self.model.device)

    def keep(self, ids: Tensor) -> Tensor:
        """The part of ids [B, T] that a step sees: all, or the sinks and what is left."""
        dropped = self._num_dropped(ids.shape[1])
        if not dropped:
            return ids
        return torch.cat([ids[:, : self.num_sinks], ids[:, self.num_sinks + dropped :]], 1)

    @property
    def fill(self) -> int:
        length = 0 if self.seen is None else self.seen.shape[1]
        return length - self._num_dropped(length + 1)

    def _num_dropped(self, length: int) -> int:
        """Of `length` tokens, the new ones included."""
        excess = max(0, length - (self.cache_size + 1))
        return -(-excess // self.num_evicted) * self.num_evicted

    @torch.no_grad()
    def score(self, ids: Tensor, on_labels: OnLabels = lambda n: None) -> Tensor:
        """The same figures as stepping, in batches of windows."""
        first, k = self.cache_size + 1, self.num_evicted
        num_labels = ids.shape[1] - first
        # Period 0 predicts the first label alone; period i >= 1 has dropped i * k tokens and
        # predicts k labels.
        num_periods = 1 + -(-(num_labels - 1) // k)
        sinks, rest = ids[0, : self.num_sinks], ids[0, self.num_sinks :]
        windows = torch.nn.functional.pad(rest, (0, k)).unfold(0, first - self.num_sinks, k)[
            :num_periods
        ]
        windows = torch.cat([sinks.expand(num_periods, -1), windows], 1)  # [periods, C + 1]
        batch_size = max(
            1, min(_BATCH_TOKENS // first, _BATCH_LOGITS // (k * self.model.config.vocab_size))
        )
        nll: list[Tensor] = []
        for start in range(0, num_periods, batch_size):
            batch = windows[start : start + batch_size]
            logits = self.model(input_ids=batch, use_cache=False, logits_to_keep=k).logits
            logits = logits.flatten(0, 1).float()  # [periods * k, V], in the order of the labels
            if start == 0:
                logits = logits[k - 1 :]
            labels = ids[0, first + len(nll) :][: len(logits)]
            nll.extend(
                torch.nn.functional.cross_entropy(logits[: len(labels)], labels, reduction="none")
            )
            on_labels(len(labels))
        return torch.stack(nll)
