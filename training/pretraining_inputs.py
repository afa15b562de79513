"""Tokenizer and model that pretraining begins with, new or those of another model, and its rows:
text of corpora with shares, in token files; and what some reference models had beyond it.

`recall-gpt2` and `recall-llama` learned from facts and questions, of which only answers count:
`kvalign pretrain --corpus recall`.

`context-gpt2` had rows that reward a small model for copying what it has read far back, mixed into
natural ones at first, and a loss of the heads that copy: --repeat-share, --rename-share and
--copy-weight. In a share of the rows a passage occurs a second time. In a share, rare tokens trade
places, each with the same other one everywhere in its row: a name then cannot be known from earlier
epochs, only from the row. Small models do not learn to copy from a few million tokens of natural
text alone; with such rows they form the heads that do.

After `A B ... A` such a model should guess `B`. Two layers do that (Olsson et al. 2022, "In-context
learning and induction heads"): a head of the earlier one writes into each entry which token came
before it, a head of the later one looks for the entry before which the newest token came. The loss
of a language model alone forms them late, as neither helps without the other. So both are shown
where to look until they are there.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvalign import checkpoints
from kvalign.data_gen.corpora import texts, token_pieces
from kvalign.data_gen.facts import END, FactStreams, recall_tokenizer
from kvalign.foundation import progress
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import write_together, write_whole
from kvalign.models.input_ids import num_ids
from kvalign.models.loading import load_model
from kvalign.training.pretraining_settings import HEAD_DIM, PretrainSettings
from kvalign.training.text import row_ages

SINK = "<|sink|>"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_CHARS = 16 << 20  # text that a new tokenizer is trained on


def build_model(settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Random model of the given shape; heads of 64 dimensions, Llama with half as many for KV."""
    hidden, num_heads = settings.hidden_size, settings.hidden_size // HEAD_DIM
    common = dict(
        vocab_size=num_ids(tokenizer),
        max_position_embeddings=settings.context_len,
        hidden_size=hidden,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if settings.arch == "gpt2":
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(**common, **no_dropout)
    elif settings.arch == "mpt":
        config = transformers.MptConfig(**common, max_seq_len=settings.context_len)
    else:
        config = transformers.LlamaConfig(
            **common,
            intermediate_size=3 * hidden,
            num_key_value_heads=max(1, num_heads // 2),
            tie_word_embeddings=True,
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def first_model(settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Model of the given shape to begin with: random, or with the weights of another one.

    Raises:
        UserError: that one has another shape.
    """
    model = build_model(settings, tokenizer)
    if settings.init is None:
        return model
    weights = load_model(settings.init, dtype="float32").model.state_dict()
    for name, weight in model.state_dict().items():
        there = list(weights[name].shape) if name in weights else "missing"
        if there != list(weight.shape):
            raise UserError(
                f"--init {settings.init} is another architecture or size: {name} is {there} there, "
                f"{list(weight.shape)} here"
            )
    model.load_state_dict(weights)
    return model


def open_tokenizer(settings: PretrainSettings) -> PreTrainedTokenizerBase:
    """The shared tokenizer, that of the first weights, the one already in `out`, or a new
    byte-level BPE of the mix; the corpus `recall` has its own. With a sink token if one is wanted.
    """
    folder = settings.tokenizer or settings.init or settings.out
    if settings.is_recall:
        tokenizer: PreTrainedTokenizerBase = recall_tokenizer(settings.context_len)
    elif folder != settings.out or (folder / _TOKENIZER).exists():
        folder = checkpoints.model_path(str(folder)) or folder
        if not (folder / _TOKENIZER).exists():
            raise NotFoundError(f"no {_TOKENIZER} in {folder}: name the folder of a model")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        tokenizer = _new_tokenizer(settings)
    if settings.sink_token and SINK not in tokenizer.get_vocab():
        add_sink(tokenizer)
    return tokenizer


def add_sink(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a token to a tokenizer, which puts it before every text."""
    tokenizer.add_special_tokens({"bos_token": SINK})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SINK} $A", pair=f"{SINK} $A $B", special_tokens=[(SINK, tokenizer.bos_token_id)]
    )


def _new_tokenizer(settings: PretrainSettings) -> PreTrainedTokenizerBase:
    progress.phase("training a tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample(parse_mix(settings.corpus)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, model_max_length=settings.context_len
    )
    write_together(settings.out, tokenizer.save_pretrained, last=_TOKENIZER)
    return tokenizer


def _sample(mix: dict[str, float]) -> Iterator[str]:
    """Text of each corpus by its share, a small corpus as often as it takes."""
    for spec, share in mix.items():
        num_left = int(_TOKENIZER_CHARS * share)
        for text in itertools.cycle(filter(None, texts(spec, "train"))):
            yield text[:num_left]
            num_left -= len(text)
            if num_left <= 0:
                break


@dataclass(frozen=True)
class Rows:
    """Rows of a step: ids and labels [B, T] int64, and the position of the first token."""

    ids: Tensor
    labels: Tensor
    first: int = 0

    def on(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, labels and position ids [1, T] on a device."""
        positions = self.first + torch.arange(self.ids.shape[1])[None]
        return self.ids.to(device), self.labels.to(device), positions.to(device)


@dataclass(frozen=True)
class TokenMix:
    """Tokenised corpora, [num_tokens] uint16 or uint32 memory-mapped, with their shares of rows."""

    ids: list[np.ndarray]
    shares: np.ndarray
    short_by: ClassVar[int] = 2

    def batch(self, seed: int, step: int, num_rows: int, row_len: int) -> Rows:
        """Rows of `row_len` tokens from random places: the same for the same seed and step."""
        rng = np.random.default_rng((seed, step))
        rows = []
        for which in rng.choice(len(self.ids), num_rows, p=self.shares):
            start = rng.integers(0, len(self.ids[which]) - row_len)
            rows.append(self.ids[which][start : start + row_len + 1].astype(np.int64))
        ids = torch.from_numpy(np.stack(rows))
        return Rows(ids[:, :-1], ids[:, 1:])


def parse_mix(specs: tuple[str, ...]) -> dict[str, float]:
    """Corpora and their shares, which add up to 1, from `SPEC` or `SPEC@WEIGHT` each."""
    weights = {}
    for spec in specs:
        name, at, weight = spec.rpartition("@")
        try:
            weights[name if at else spec] = float(weight) if at else 1.0
        except ValueError:
            raise UserError(f"--corpus takes SPEC or SPEC@WEIGHT, got {spec!r}") from None
    if not all(0 < weight < float("inf") for weight in weights.values()):
        raise UserError(f"--corpus weights must be above 0, got {', '.join(specs)}")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def open_mix(
    settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase, work_dir: Path
) -> TokenMix:
    """Tokenise each corpus once into a file of `work_dir`, and open the files.

    Raises:
        UserError: a corpus shorter than one row.
    """
    mix = parse_mix(settings.corpus)
    vocabulary = tokenizer.get_vocab()
    fingerprint = hashlib.sha256(repr(sorted(vocabulary.items())).encode()).hexdigest()
    dtype = np.uint16 if num_ids(tokenizer) <= 1 << 16 else np.uint32
    ids = []
    for spec in mix:
        name = hashlib.sha256(f"{spec} {fingerprint}".encode()).hexdigest()[:16]
        path = work_dir / f"{name}.npy"
        if not path.exists():
            progress.phase(f"reading {spec}")
            read = token_pieces(spec, tokenizer, "train", torch.get_num_threads())
            pieces = [np.array(piece, dtype) for piece in read]
            write_whole(path, partial(np.save, arr=np.concatenate([np.array([], dtype), *pieces])))
        ids.append(np.load(path, mmap_mode="r"))
        if len(ids[-1]) <= settings.context_len:
            raise UserError(
                f"corpus {spec!r} is too short: it has {len(ids[-1])} tokens, more than "
                f"--context-len {settings.context_len} are needed: name a longer text, or lower "
                "--context-len"
            )
    return TokenMix(ids, np.array(list(mix.values())))


NO_LABEL = -100  # what torch's cross entropy leaves out
NUM_EVAL_ROWS = 2000
NUM_EIGHTHS = 8
MIN_PASSAGE = 16  # tokens; the longest is half a row
RARE_FROM = 1024  # a byte-level BPE numbers its tokens by how often they are merged
NUM_HEADS = 2  # of either kind
_LEAST = 1e-5  # of an attention weight: the logarithm of 0 is none
ENDS_AT = 0.8  # of the steps: from there on all rows are natural


class RecallRows:
    """Rows of the corpus `recall`, endless streams of facts and questions, with the loss of answers
    only. The input of a step depends only on the seed and the step.

    Rows begin anywhere in a stream. If all rows began alike, a model would learn the contents of
    each position, and an aligner trained on its entries would carry content. The first, short rows
    lie at random positions, so that all positions are trained from the beginning.
    """

    short_by = 4

    def __init__(self, context_len: int):
        self.context_len = context_len

    def batch(self, seed: int, step: int, num_rows: int, row_len: int) -> Rows:
        """Rows of streams whose questions are for facts within a row."""
        stream = FactStreams((seed, step), num_rows, row_len, ask_oldest=True)
        ids = torch.from_numpy(stream.take(row_len + 1))
        rng = np.random.default_rng((seed, step, 1))
        first = int(rng.integers(self.context_len - row_len, endpoint=True))
        labels = ids.masked_fill(row_ages(ids) == 0, NO_LABEL)
        return Rows(ids[:, :-1], labels[:, 1:], first)


@torch.no_grad()
def accuracy_by_age(model: PreTrainedModel, context_len: int) -> list[float]:
    """Share of right answers in rows of `context_len` tokens, each read whole, by the age of the
    fact: up to an eighth of the context length, up to two, ...
    """
    streams = FactStreams(1, NUM_EVAL_ROWS, context_len, ask_oldest=True)
    ids = torch.from_numpy(streams.take(context_len))
    right, total = torch.zeros(2, NUM_EIGHTHS, dtype=torch.float32)
    for rows in ids.split(16):
        logits = model(input_ids=rows.to(model.device), use_cache=False).logits
        hits = (logits[:, :-1].argmax(-1).cpu() == rows[:, 1:]).float()
        age = row_ages(rows)[:, 1:]
        of = (age[age > 0] * NUM_EIGHTHS - 1) // context_len
        right.index_add_(0, of, hits[age > 0])
        total.index_add_(0, of, torch.ones(len(of), dtype=torch.float32))
    return (right / total).tolist()


def decay(step: int, num_steps: int) -> float:
    """Share of its first value that what falls has at a step."""
    return max(0.0, 1 - step / (ENDS_AT * num_steps))


@dataclass(frozen=True)
class ContextRows:
    """Rows of a mix, changed in shares that fall linearly to 0 over the first `ENDS_AT` of
    the steps. The input of a step depends only on the seed and the step.

    The first rows are short, and a passage fills them again and again: what there is to copy is
    near, and little else is. They lie at random positions, so that all positions are trained.
    """

    mix: TokenMix
    settings: PretrainSettings
    vocab_size: int
    short_by: ClassVar[int] = 8

    def batch(self, seed: int, step: int, num_rows: int, row_len: int) -> Rows:
        """Rows of `row_len` tokens from random places, some of them changed."""
        natural = self.mix.batch(seed, step, num_rows, row_len)
        ids = torch.cat([natural.ids, natural.labels[:, -1:]], 1).numpy()  # [B, T + 1]
        settings = self.settings
        share = decay(step, settings.num_steps)
        rng = np.random.default_rng((seed, step, 1))
        first = int(rng.integers(settings.context_len - row_len, endpoint=True))
        for row in ids:
            if rng.random() < share * settings.repeat_share:
                (repeat if row_len == settings.context_len else fill)(row, rng)
            if rng.random() < share * settings.rename_share:
                row[:] = renaming(self.vocab_size, rng)[row]
        whole = torch.from_numpy(ids)
        return Rows(whole[:, :-1], whole[:, 1:], first)


def repeat(row: np.ndarray, rng: np.random.Generator) -> None:
    """Write a passage of a row [T + 1] over a later place of the same length, without overlap."""
    longest = len(row) // 2
    num_tokens = round(np.exp(rng.uniform(np.log(min(MIN_PASSAGE, longest)), np.log(longest))))
    first = rng.integers(len(row) - 2 * num_tokens, endpoint=True)
    second = rng.integers(first + num_tokens, len(row) - num_tokens, endpoint=True)
    row[second : second + num_tokens] = row[first : first + num_tokens].copy()


def fill(row: np.ndarray, rng: np.random.Generator) -> None:
    """Fill a row [T + 1] with its first few tokens, again and again."""
    longest = max(2, len(row) // 3)
    num_tokens = rng.integers(min(MIN_PASSAGE // 2, longest), longest, endpoint=True)
    row[:] = np.resize(row[:num_tokens], len(row))


def renaming(vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return which token each token becomes, [vocab_size]: a permutation of the rare ones."""
    becomes = np.arange(vocab_size)
    becomes[RARE_FROM:] = rng.permutation(becomes[RARE_FROM:])
    return becomes


def loss_of(
    model: PreTrainedModel,
    ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """Mean NLL in nats of the labels of ids [B, T], each the token after; with a weight [] of
    `copy_loss`, that too.
    """
    how = {} if weight is None else {"output_attentions": True}
    out = model(input_ids=ids, position_ids=position_ids, use_cache=False, **how)
    nll = cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten())
    return nll if weight is None else nll + weight * copy_loss(out.attentions, ids, labels)


def copy_loss(attentions: tuple[Tensor, ...], ids: Tensor, labels: Tensor) -> Tensor:
    """NLL in nats of looking at the right entries, from attention weights [B, H, T, T] of each
    layer: the first heads of one layer at the token before, those of a later layer at each entry
    that a copy of the newest token came before, and that is the label.
    """
    before, after = layers_of(len(attentions))
    back = attentions[before][:, :NUM_HEADS].float().diagonal(-1, -2, -1)  # [B, H, T - 1]
    loss = -(back + _LEAST).log().mean()
    right = right_places(ids, labels)[:, None]  # [B, 1, T, T]
    weights = (attentions[after][:, :NUM_HEADS].float() * right).sum(-1)  # [B, H, T]
    counted = right.any(-1).expand_as(weights)
    return loss - ((weights + _LEAST).log() * counted).sum() / counted.sum().clamp(min=1)


def layers_of(num_layers: int) -> tuple[int, int]:
    """Layers whose first heads look at the token before, and at what came after a copy."""
    before = num_layers // 3
    return before, max(before + 1, 2 * num_layers // 3)


def right_places(ids: Tensor, labels: Tensor) -> Tensor:
    """Return which entries copy the label of each token of ids [B, T]: [B, T, T] bool, tokens by
    entries.
    """
    before = pad(ids[:, :-1], (1, 0), value=-1)
    follows = before[:, None, :] == ids[:, :, None]
    is_label = ids[:, None, :] == labels[:, :, None]
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    return follows & is_label & seen
