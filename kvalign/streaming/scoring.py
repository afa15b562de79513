"""Loss of a text's tokens under a streaming method, or another measure of them: step by step, or by
a faster way with the same results.

- Methods that re-encode clean windows (`recompute`, `discard-half`): a batch of windows at once.
- Caches whose entries are placed from their original form (`window`, `streaming-llm`, `kvalign`
  with a table): whole segments in the relative form (`kvalign.cache.attention`).
- Any other method: step by step.

Non-finite logits have their reason in one line.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from kvalign.cache import segments
from kvalign.foundation.errors import RunError, UserError
from kvalign.foundation.settings import expect
from kvalign.methods.as_encoded import Reencoding
from kvalign.methods.base import Method, check_ids
from kvalign.methods.cached import Cached
from kvalign.models.weights import check_finite

BATCH_TOKENS = 2048  # tokens encoded at once when whole windows are scored: labels count by these
BATCH_LOGITS = 1 << 26  # logits held at once, 256 MiB of float32
MOST_LOSS = 300.0
"""Nats, far above any trained model's; its exp, and that of a difference, are finite."""

OnLabels = Callable[[int], object]
Measure = Callable[[Tensor, Tensor], Tensor]
"""From logits [N, V] and labels [N] to [N] float32."""


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """NLL in nats, of logits [N, V] and labels [N]: [N]."""
    return cross_entropy(logits, labels, reduction="none")


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """hits: 1 if the label [N] is the most likely token by logits [N, V], else 0; nan without."""
    return torch.where(logits.isnan().any(-1), torch.nan, (logits.argmax(-1) == labels).float())


def score(
    method: Method,
    ids: Tensor,
    on_labels: OnLabels = lambda n: None,
    measure: Measure = losses,
    mask: Tensor | None = None,
) -> Tensor:
    """Losses and errors as of `score_stepwise`, by a faster way if there is one, which processes
    row after row. The measure may be nan for labels outside the `mask` [B * (N -
    cache_size - 1)] bool.
    """
    expect("method", method, Method, "one of kvalign.make_method")
    check_ids(ids, method.model.config.vocab_size)
    if ids.shape[1] < (least := method.sizes.cache_size + 2):
        raise UserError(f"ids must be at least cache_size + 2 = {least} a row, got {ids.shape[1]}")
    if isinstance(method, Reencoding):
        parts = [None] * len(ids) if mask is None else mask.view(len(ids), -1)
        rows = [
            score_windows(method, row, on_labels, measure, part)
            for row, part in zip(ids.split(1), parts, strict=True)
        ]
    elif isinstance(method, Cached) and method.is_exact:
        rows = [score_segments(method, row, on_labels, measure) for row in ids.split(1)]
    else:
        return score_stepwise(method, ids, on_labels, measure)
    return torch.cat(rows)


@torch.no_grad()
def score_stepwise(
    method: Method, ids: Tensor, on_labels: OnLabels = lambda n: None, measure: Measure = losses
) -> Tensor:
    """NLL in nats of every token after the first cache_size + 1, each given the tokens before it in
    its row; rows advance together.

        ids   0 1 ... C | C+1 C+2 ... N-1
              first input  labels

    Args:
        method: any; its stream begins again.
        ids: [B, N] int64, N >= cache_size + 2.
        on_labels: called with the number of labels scored since the last call, for a progress bar.
        measure: another measure instead of the NLL.

    Returns:
        [B * (N - cache_size - 1)] float32, row by row.
    """
    first = method.sizes.first_input_len
    method.reset()
    logits = method.feed(ids[:, :first])
    nll = []
    for i in range(first, ids.shape[1]):
        nll.append(measure(logits, ids[:, i]))
        on_labels(len(ids))
        if i + 1 < ids.shape[1]:
            logits = method.feed(ids[:, i : i + 1])
    return torch.stack(nll, 1).flatten()


@torch.no_grad()
def score_segments(method: Cached, ids: Tensor, on_labels: OnLabels, measure: Measure) -> Tensor:
    """Losses as of `score_stepwise`, for a method whose relative form is exact."""
    first, end = method.sizes.cache_size, ids.shape[1] - 1  # queries with a label
    method.reset()
    method.feed(ids[:, :first])
    # Made at once: a small tensor that stays behind each segment's logits makes the process grow.
    scores = ids.new_empty(end - first, dtype=torch.float32)
    for start in range(first, end, segments.SEGMENT_LEN):
        stop = min(start + segments.SEGMENT_LEN, end)
        logits = method.feed_segment(ids[:, start:stop])[0].float()
        scores[start - first : stop - first] = measure(logits, ids[0, start + 1 : stop + 1])
        on_labels(stop - start)
    return scores


@torch.no_grad()
def score_windows(
    method: Reencoding, ids: Tensor, on_labels: OnLabels, measure: Measure, mask: Tensor | None
) -> Tensor:
    """Losses as of `score_stepwise`. The tokens that a method keeps change only at an eviction. So
    all steps between two evictions are one causal forward pass, and several such periods make a
    batch. Periods without a label that counts are left out.
    """
    sizes, vocab_size = method.sizes, method.model.config.vocab_size
    first, k = sizes.first_input_len, sizes.num_evicted
    num_labels = ids.shape[1] - first
    # Period 0 predicts the first label alone; period i >= 1 has dropped i * k tokens and predicts
    # k labels.
    num_periods = 1 + -(-(num_labels - 1) // k)
    sinks, rest = ids[0, : sizes.num_sinks], ids[0, sizes.num_sinks :]
    windows = pad(rest, (0, k)).unfold(0, first - sizes.num_sinks, k)[:num_periods]
    periods = torch.arange(num_periods, device=ids.device)
    if mask is not None:
        assert mask.any()
        periods = (pad(mask, (k - 1, k)).unfold(0, k, k)[:num_periods]).any(1).nonzero()[:, 0]
    scores = ids.new_full((num_labels,), torch.nan, dtype=torch.float32)
    batch_size = max(1, min(BATCH_TOKENS // first, BATCH_LOGITS // (k * vocab_size)))
    num_reported = 0
    for batch in periods.split(batch_size):
        inputs = torch.cat([sinks.expand(len(batch), -1), windows[batch]], 1)  # [periods, C + 1]
        with method.in_eval_mode():
            logits = method.model(input_ids=inputs, use_cache=False, logits_to_keep=k).logits
        logits = logits.flatten(0, 1).float()  # [periods * k, V]
        of = (batch[:, None] * k + torch.arange(1 - k, 1, device=ids.device)).flatten()
        inside = (of >= 0) & (of < num_labels)
        if not inside.all():
            logits, of = logits[inside], of[inside]
        scores[of] = measure(logits, ids[0, first + of])
        on_labels(int(of[-1]) + 1 - num_reported)
        num_reported = int(of[-1]) + 1
    on_labels(num_labels - num_reported)
    return scores


def no_token(logits: Tensor, method: Method) -> RunError:
    """Return the error for logits [B, V] from which no token can be chosen."""
    if logits.isfinite().all():
        return RunError("no token is left to choose: penalties or no_repeat_ngram_size exclude all")
    return RunError(f"this stream has ended: {reason(method)}")


def check_losses(losses: Tensor, method: Method, most: float = MOST_LOSS) -> None:
    """Raise RunError unless losses [N] in nats are finite, by default with their perplexity."""
    if not losses.isfinite().all():
        raise RunError(f"{method.title} cannot be scored: {reason(method)}")
    if (worst := losses.max().item()) > most:
        raise RunError(
            f"{method.title} cannot be scored: a token costs {worst:.3g} nats, more than {most:g}: "
            "are these the weights of a trained model?"
        )


def perplexity_of(nats: float) -> float:
    """exp of a mean loss; RunError if that is not finite."""
    if not nats <= MOST_LOSS:
        raise RunError(
            f"no perplexity: a token costs {nats:.3g} nats, more than {MOST_LOSS:g}: are these the "
            "weights of a trained model?"
        )
    return math.exp(nats)


def reason(method: Method) -> str:
    """Reason why logits are non-finite: the weights of the model or the aligner, else precision."""
    aligner = getattr(method, "aligner", None)
    parts: dict[str, nn.Module] = {f"the model {method.spec.name}".rstrip(): method.model}
    if isinstance(aligner, nn.Module):
        parts[f"the aligner {getattr(aligner, 'source', None) or ''}".rstrip()] = aligner
    for name, part in parts.items():
        try:
            check_finite(part.state_dict().items(), f"the weights of {name}")
        except UserError as error:
            return str(error)
    dtype = str(method.model.dtype).removeprefix("torch.")
    which = " and ".join(parts)
    if method.model.dtype == torch.float32:
        return f"the logits are not finite, though the weights of {which} are: they overflow"
    return f"the logits are not finite in {dtype}: give another precision: weights=float32"
