"""Test of networks on streams of the text that follows their training text.

The error of one move is not enough, since a network continues from its own output. Its recording
has only chunks, so the text is read again, beyond the recorded tokens. `kvalign train` judges what
it saves, `kvalign judge` leaves the aligner as it is and saves a copy.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain, islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvalign.aligners import Aligner, AlignerConfig
from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.corpora import token_pieces
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import locked
from kvalign.foundation.settings import keywords_of
from kvalign.models.identity import is_of
from kvalign.models.loading import LoadedModel, load_model
from kvalign.models.prefix_tokens import prefix_ids
from kvalign.training.aligner_folder import IDENTITY, check_free, save
from kvalign.training.judge import ROW_LABELS, judge, num_judged_tokens
from kvalign.training.settings import JudgeSettings
from kvalign.training.text import Text

NUM_ROWS = 4  # a step of networks takes long


@keywords_of(JudgeSettings)
def judge_aligner(settings: JudgeSettings) -> dict[str, Any]:
    """Judge the networks of an aligner by streams, and save it in `out` with those that help.

    Returns:
        the result of `kvalign.training.judge.judge`.

    Raises:
        NotFoundError: no such aligner or model.
        ExistsError: `out` has an aligner, and `overwrite` is not set.
        UserError: another kind of aligner, none of whose networks is used, or too short a text.
    """
    out = settings.out
    check_free(out, settings.overwrite)
    aligner = Aligner.from_pretrained(settings.aligner)
    if aligner.config.kind != "network":
        raise UserError(
            f"--aligner must be of kind network, got {aligner.config.kind}: kvalign train judges "
            "other kinds as it makes them"
        )
    if not _kvs_of(aligner.config):
        raise UserError(f"nothing to judge: no network of {settings.aligner} is used")
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
    data = config.training[kvs[0]]["data"] | ({"corpus": corpus} if corpus else {})
    if "corpus" not in data:
        raise UserError("the aligner has no text of its own")
    progress.phase("reading")
    loaded = _model_of(config, accelerator)
    text = text_after(data["corpus"], data.get("num_tokens", 0), config.chunk_len, loaded.tokenizer)
    aligner.to(loaded.model.device)
    untrained = deepcopy(aligner)
    for kv in kvs:
        getattr(untrained, kv).clear()
    progress.expect(num_judged_tokens(aligner, text, kvs), "tokens")
    verdict = judge(aligner, untrained.state_dict(), loaded.model, text, kvs)
    parts = {kv: {**part, **_verdict_of(kv, verdict)} for kv, part in config.training.items()}
    aligner.config = config.model_copy(update={"training": parts})
    aligner.cpu()
    return verdict


def _kvs_of(config: AlignerConfig) -> tuple[str, ...]:
    """The networks that change something."""
    training = config.training
    return tuple(kv for kv in TARGETS if kv in training and training[kv].get("used", True))


def text_after(
    corpora: Sequence[str], num_tokens: int, chunk_len: int, tokenizer: PreTrainedTokenizerBase
) -> Text:
    """Tokens after those of a recording in each of its corpora, which no network has seen;
    UserError if a corpus ends before.

    Args:
        corpora, num_tokens, chunk_len: of the recording.
    """
    num_rows = max(NUM_ROWS // len(corpora), 1)
    num_needed = num_rows * (chunk_len + ROW_LABELS)
    share = -(-num_tokens // len(corpora))
    texts = []
    for corpus in corpora:
        ids = islice(
            chain.from_iterable(token_pieces(corpus, tokenizer)), share, share + num_needed
        )
        texts.append(torch.tensor([*ids], dtype=torch.int64))
        if len(texts[-1]) < num_needed:
            raise UserError(
                f"corpus {corpus!r} has {len(texts[-1])} tokens after the {share} recorded "
                f"ones, {num_needed} are needed"
            )
    return Text([], texts, prefix_ids(tokenizer), is_recall=[*corpora] == ["recall"])


def _model_of(config: AlignerConfig, accelerator: str) -> LoadedModel:
    """The model that networks were made for; UserError if it is not there any more."""
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    loaded = load_model(config.base_model, "cuda" if on_gpu else "cpu", "float32")
    digest = next(iter(config.training.values())).get("data", {}).get(IDENTITY)
    if not is_of(loaded.model, digest, config.embedding_fingerprint):
        raise UserError(f"{config.base_model} has other weights than at the time of the recording")
    return loaded


def _verdict_of(kv: str, judged: dict[str, Any]) -> dict[str, Any]:
    """The changes that the judgement makes of a network's record."""
    return {"used": kv in judged["parts"], "val_nll": judged["val_nll"], "judged": judged}
