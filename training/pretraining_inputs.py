"""Tokenizer and model that pretraining begins with, new or those of another model, and its rows of
text of corpora with shares, in token files.
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
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvalign import checkpoints
from kvalign.data_gen.corpora import texts, token_pieces
from kvalign.data_gen.facts import END, recall_tokenizer
from kvalign.foundation import progress
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import write_together, write_whole
from kvalign.models.input_ids import num_ids
from kvalign.models.loading import load_model
from kvalign.training.settings import HEAD_DIM, PretrainSettings

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
    elif settings.arch == "opt":
        config = transformers.OPTConfig(
            **common,
            ffn_dim=4 * hidden,
            word_embed_proj_dim=hidden,
            dropout=0.0,
            attention_dropout=0.0,
            pad_token_id=None,
        )
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
    weights = load_model(settings.init).model.state_dict()
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
