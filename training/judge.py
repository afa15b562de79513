"""Judge of an aligner: streams of held-out text, with its parts and without, show whether it helps.

The error of vectors does not show it. Neither does a stream without sinks on a model that needs
them: there anything helps that turns some entry into a sink. So each set of parts (none, keys,
values, both) streams the same text, with the default sinks of streaming methods and without. To be
used, a set must beat the best of `streaming-llm`, which is the set of none.

All cache sizes have the same labels. To choose, a label's loss is its mean over them: so each label
counts once in an interval. A few rows choose. The rest, which had no part in the choice, are what
is reported: what was chosen is held there, at each cache size, against `discard-half`, the way
without an aligner. These verdicts stay in the aligner, and `auto` obeys them
(`kvalign.methods.choice`).

For the corpus `recall` only answers count whose fact is still in the cache (`Texts.counted`).

Networks are judged by the text that follows their training text: the error of one move is not
enough, since a network continues from its own output. A recording has only chunks, so the text is
read again, beyond the recorded tokens. `kvalign train` judges what it saves, `kvalign judge` leaves
the aligner as it is and saves a copy.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.aligners import Aligner, AlignerConfig
from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.corpora import some_ids
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import locked
from kvalign.foundation.settings import keywords_of
from kvalign.foundation.statistics import interval
from kvalign.methods import make_method
from kvalign.methods.cached import StreamingLLM
from kvalign.models.identity import has_fingerprint, identity
from kvalign.models.input_ids import prefix_ids, with_prefix
from kvalign.models.loading import LoadedModel, load_model
from kvalign.streaming.scoring import check_losses, score
from kvalign.training.aligner_folder import IDENTITY, check_free, save
from kvalign.training.settings import JudgeSettings, device_of
from kvalign.training.text import Texts, val_sizes

ROW_LABELS = 256
NUM_CHOOSING, NUM_ROWS = 4, 32  # rows that choose, and all
NETWORK_ROWS = 8  # a step of networks takes long

Weights = dict[str, Tensor]
Parts = tuple[str, ...]


def usual_sinks(family: str) -> int:
    """Sinks of a model before anything is judged. Without an aligner entries of learned positions
    become stale with any number; elsewhere the default of `streaming-llm` is four.
    """
    return 0 if family == "learned" else StreamingLLM.default_num_sinks


def judge(
    aligner: Aligner, untrained: Weights, model: PreTrainedModel, text: Texts, kvs: Parts
) -> dict[str, Any]:
    """Stream validation text with each set of parts and sinks. `aligner` keeps the simplest set
    that does not differ from the best: few parts, then the usual sinks, then a low loss. Sets
    differ if the 95 % interval of the paired difference says so, on every other row.

    Args:
        aligner: trained. `config.num_sinks` are the usual sinks, and the only choice for a network.
        untrained: its weights before training, which change nothing.
        text: its validation part is streamed.
        kvs: the trained parts.

    Returns:
        `parts` and `num_sinks`: the choice; `streams`: `parts`, `num_sinks`, `val_nll` and
        `by_cache` (by cache size) of each set, and `num_choosing`, their labels. Of the rows that
        did not choose: `val_nll` of the choice; `tried`: `parts`, `num_sinks` and `val_nll` of the
        best set with parts, and `without`: the same of none with these sinks; `discard_half`: that
        method's loss with the chosen sinks; `against_discard_half`: by cache size the fields of
        `kvalign.aligners.base.Verdict`, empty if nothing is used; `num_labels`. And
        `cache_sizes`. Losses are in nats per token.

    Raises:
        UserError: only answers of the text count, and there are none.
    """
    progress.phase("judging by streaming")
    choosing, rest = excerpts(text, aligner.config.largest_cache, aligner.config.positions)
    usual, every = aligner.config.num_sinks, aligner.config.shifts[0]
    trained = {name: x.clone() for name, x in aligner.state_dict().items()}
    sinks = [n for n in sorted({0, StreamingLLM.default_num_sinks, usual}) if n < min(choosing)]

    def losses_of(rows: dict[int, Tensor], parts: Parts, num_sinks: int) -> Tensor:
        use_parts(aligner, trained, untrained, parts)
        name, options = "streaming-llm", {}
        if parts:
            name, options = "kvalign", {"aligner": aligner, "realign_every": every}
        return streamed(model, text, rows, name, num_sinks=num_sinks, **options)

    by_cache: dict[tuple[Parts, int], Tensor] = {}
    for parts in (parts for n in range(len(kvs) + 1) for parts in combinations(kvs, n)):
        for n in [usual] if parts and aligner.recursive else sinks:
            by_cache[parts, n] = losses_of(choosing, parts, n)
    losses = {one: by_label(x) for one, x in by_cache.items()}
    nll = {one: loss.mean().item() for one, loss in losses.items()}
    best = min(nll, key=lambda one: nll[one])
    simplest = sorted(nll, key=lambda one: (len(one[0]), one[1] != usual, nll[one]))
    choice = next(x for x in simplest if x == best or not is_better(losses[best], losses[x]))
    shown = choice if choice[0] else min((x for x in nll if x[0]), key=lambda one: nll[one])
    tried, plain = (losses_of(rest, parts, shown[1]) for parts in (shown[0], ()))
    half = streamed(model, text, rest, "discard-half", num_sinks=choice[1])
    use_parts(aligner, trained, untrained, choice[0])
    saved = tried
    if not choice[0]:
        saved = plain if choice[1] == shown[1] else losses_of(rest, *choice)
    val_nll = [by_label(x).mean().item() for x in (saved, tried, plain, half)]
    return {
        "parts": list(choice[0]),
        "num_sinks": choice[1],
        "val_nll": val_nll[0],
        "tried": {"parts": list(shown[0]), "num_sinks": shown[1], "val_nll": val_nll[1]},
        "without": {"num_sinks": shown[1], "val_nll": val_nll[2]},
        "discard_half": val_nll[3],
        "against_discard_half": [
            _verdict(size, *both) for size, *both in zip(rest, tried, half, strict=True)
        ]
        * bool(choice[0]),
        "streams": [
            {
                "parts": list(parts),
                "num_sinks": n,
                "val_nll": nll[parts, n],
                "by_cache": x.flatten(1).nanmean(1).tolist(),
            }
            for (parts, n), x in by_cache.items()
        ],
        "cache_sizes": list(rest),
        "num_choosing": len(losses[best]),
        "num_labels": len(by_label(half)),
    }


def _verdict(cache_size: int, losses: Tensor, of_half: Tensor) -> dict[str, Any]:
    """Fields of a `Verdict` from losses [rows, labels], nan where a label does not count."""
    difference = (losses - of_half).flatten()
    difference = difference[~difference.isnan()]
    low, high = interval(difference)
    known = high is not None
    ratio = math.exp(difference.double().mean().item())
    return {"cache_size": cache_size, "ratio": ratio, "low": low if known else None, "high": high}


def by_label(losses: Tensor) -> Tensor:
    """Losses of labels, [N]: means over the cache sizes of [sizes, rows, labels], which may be nan
    where a label does not count. Losses of one label at several sizes are alike. Side by side they
    would pass as independent, and an interval of them would be too narrow.
    """
    means = losses.flatten(1).nanmean(0)
    return means[~means.isnan()]


def is_better(losses: Tensor, others: Tensor) -> bool:
    """Return whether the 95 % interval of the ratio of perplexities lies below 1; of labels too few
    for one, but at least 30, whether the mean difference lies three standard errors below 0.
    """
    difference = losses - others
    _, high = interval(difference)
    if high is not None:
        return high < 1
    if len(difference) < 30:
        return False
    return bool(difference.mean() + 3 * difference.std() / len(difference) ** 0.5 < 0)


def num_judged_tokens(aligner: Aligner, text: Texts, kvs: Parts) -> int:
    """Number of tokens that `judge` counts for the progress."""
    of_sizes = excerpts(text, aligner.config.largest_cache, aligner.config.positions)
    choosing, rest = (sum(ids.numel() for ids in rows.values()) for rows in of_sizes)
    return 2 ** len(kvs) * 2 * choosing + 3 * rest


def use_parts(aligner: Aligner, trained: Weights, untrained: Weights, parts: Parts) -> None:
    """Give an aligner the trained weights of these parts and the untrained ones of the others. A
    weight's name begins with its part: `key_scale` and `table.key` belong to `key`.
    """
    weights = {}
    for name in trained:
        kvs = {word.partition("_")[0] for word in name.split(".")} & {*TARGETS}
        is_used = kvs & {*parts} if kvs else parts
        weights[name] = trained[name] if is_used else untrained[name]
    aligner.load_state_dict(weights)


def excerpts(
    text: Texts, largest: int, positions: Sequence[tuple[int, int]] = ()
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Rows that choose, and the others: by cache size [B, C + 1 + labels] of the validation part,
    without overlap. Those of all sizes end with the same labels. Where the
    positions of large caches are squeezed (`AlignerConfig.positions`), the largest cache without is
    one of them.
    """
    row_len = min(map(len, text.val)) // 2
    largest = min(largest, row_len // 2)
    squeezed = (at for size, at in positions if at < min(size, largest))
    sizes = sorted({*val_sizes(largest), *squeezed})
    row_len = min(row_len, largest + 1 + ROW_LABELS)
    most = max(2, NUM_ROWS // len(text.val))
    num_rows = max(2, min(most, min(map(len, text.val)) // row_len))
    every = max(2, -(-num_rows * len(text.val) // NUM_CHOOSING))
    rows = torch.cat([*text.val_rows(num_rows, row_len)])
    chooses = torch.arange(len(rows)) % every == 0
    choosing, rest = (
        {size: with_prefix(some[:, largest - size :], text.opening) for size in sizes}
        for some in (rows[chooses], rows[~chooses])
    )
    return choosing, rest


def streamed(
    model: PreTrainedModel, text: Texts, rows: dict[int, Tensor], name: str, **options: Any
) -> Tensor:
    """Losses [sizes, B, labels] in nats of the labels that rows [B, N] of all cache sizes have in
    common, under a method; nan for labels that do not count.
    """
    by_size = []
    for size, ids in rows.items():
        method = make_method(name, model, cache_size=size, warn=False, **options)
        losses = score(method, ids.to(model.device)).cpu()
        check_losses(losses, method)
        counted = text.counted(ids, size)
        if counted is not None:
            losses[~counted] = torch.nan
        by_size.append(losses.view(len(ids), -1))
        progress.advance(ids.numel())
    return torch.stack(by_size)


@keywords_of(JudgeSettings)
def judge_aligner(settings: JudgeSettings) -> dict[str, Any]:
    """Judge the parts of an aligner by streams, and save it in `out` with those that help.

    Returns:
        the result of `kvalign.training.judge.judge`.

    Raises:
        NotFoundError: no such aligner or model.
        ExistsError: `out` has an aligner, and `overwrite` is not set.
        UserError: an aligner none of whose parts is used, or too short a text.
    """
    out = settings.out
    check_free(out, settings.overwrite)
    aligner = Aligner.from_pretrained(settings.aligner)
    if not _kvs_of(aligner.config):
        raise UserError(f"nothing to judge: no part of {settings.aligner} is used")
    verdict = _judge(aligner, settings.accelerator, settings.corpus)
    command = settings.command_line("judge", leave_out=("overwrite",))
    for part in aligner.config.training.values():
        part["judged_by"] = command
    with locked(out):
        save(aligner, out)
    return verdict


def judge_networks(aligner: Aligner, accelerator: str) -> None:
    """Leave the networks that `judge` chooses in an aligner, with its findings. If the model or
    more text is not available, keep all of them, with a line that says why.
    """
    if _kvs_of(aligner.config):
        try:
            _judge(aligner, accelerator)
        except UserError as error:
            progress.say(f"not judged by streams: {error}")


@progress.shown_as("judge")
def _judge(
    aligner: Aligner, accelerator: str, corpus: Sequence[str] | None = None
) -> dict[str, Any]:
    """Leave the networks that `judge` chooses in an aligner, and return its findings. The text is
    that of the recording, unless a corpus is given.
    """
    config, kvs = aligner.config, _kvs_of(aligner.config)
    data = config.training[kvs[0]]["data"]
    corpus = corpus or data.get("corpus")
    if not corpus:
        raise UserError("the aligner has no text of its own")
    progress.phase("reading")
    loaded = _model_of(config, accelerator)
    num_rows = NETWORK_ROWS if aligner.recursive else NUM_ROWS
    text = text_after(data, corpus, num_rows, config.chunk_len, loaded.tokenizer)
    tried = deepcopy(aligner).to(loaded.model.device)  # of which an error leaves any part
    untrained = (
        deepcopy(tried) if aligner.recursive else type(aligner)(config).to(loaded.model.device)
    )
    for kv in kvs if aligner.recursive else ():
        getattr(untrained, kv).clear()
    progress.expect(num_judged_tokens(tried, text, kvs), "tokens")
    verdict = judge(tried, untrained.state_dict(), loaded.model, text, kvs)
    aligner.load_state_dict(tried.state_dict())
    records = {
        kv: record
        | {"used": kv in verdict["parts"], "val_nll": verdict["val_nll"], "judged": verdict}
        for kv, record in config.training.items()
    }
    aligner.config = config.model_copy(update={"training": records})
    return verdict


def _kvs_of(config: AlignerConfig) -> tuple[str, ...]:
    """The parts that change something."""
    training = config.training
    return tuple(kv for kv in TARGETS if kv in training and training[kv].get("used", True))


def text_after(
    data: dict[str, Any],
    corpora: Sequence[str],
    num_rows: int,
    chunk_len: int,
    tokenizer: PreTrainedTokenizerBase,
) -> Texts:
    """Tokens of corpora for so many rows, which an aligner has not seen: of a corpus that it was
    made from those after its own. UserError if one ends before.

    Args:
        data: its record of `corpus` and `num_tokens`.
    """
    num_needed = max(num_rows // len(corpora), 1) * (chunk_len + ROW_LABELS)
    own = data.get("corpus", ())
    share = -(-data.get("num_tokens", 0) // max(len(own), 1))
    texts = []
    for corpus in corpora:
        start = share if corpus in own else 0
        ids = some_ids(corpus, tokenizer, num_needed, start=start)
        texts.append(torch.tensor(ids, dtype=torch.int64))
        if len(ids) < num_needed:
            raise UserError(
                f"corpus {corpus!r} has {len(ids)} tokens after the {start} recorded ones, "
                f"{num_needed} are needed"
            )
    return Texts([], texts, prefix_ids(tokenizer), is_recall=[*corpora] == ["recall"])


def _model_of(config: AlignerConfig, accelerator: str) -> LoadedModel:
    """The model that networks were made for; UserError if it is not there any more."""
    loaded = load_model(config.base_model, device_of(accelerator), "float32")
    data = next(iter(config.training.values()))["data"]
    if IDENTITY in data:
        is_same = data[IDENTITY] == identity(loaded.model)
    else:  # as of networks that ship
        is_same = has_fingerprint(loaded.model, config.embedding_fingerprint)
    if not is_same:
        raise UserError(f"{config.base_model} has other weights than at the time of the recording")
    return loaded
