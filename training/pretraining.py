"""Recipe of the reference language models: GPT-2 and Llama shapes small enough to train on a
laptop.

Weight matrices are trained with Muon (Jordan 2024, `torch.optim.Muon`), the rest with AdamW. The
rate is constant, then falls linearly. So a run can be extended before the fall by asking for more
tokens. With `--max-minutes` all this goes by the clock. The first steps have short rows. The input
of a step depends only on the seed and the step, so a resumed run gives the same result.
What some reference models have beyond it is in `pretraining_inputs.py`.
"""

import logging
import math
import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.data_gen.corpora import some_ids, text_sha256
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import (
    locked,
    read_json,
    write_json,
    write_text,
    write_together,
    write_whole,
)
from kvalign.foundation.machine import check_room, resolved
from kvalign.foundation.runs import ResumableRun, defer_signals, keeping
from kvalign.foundation.settings import keywords_of
from kvalign.models.identity import identity_of
from kvalign.models.input_ids import num_ids, prefix_ids, with_prefix
from kvalign.models.loading import check_device
from kvalign.models.model_folder import quiet
from kvalign.training.aligner_folder import BYTES_A_WEIGHT
from kvalign.training.pretraining_inputs import (
    ContextRows,
    RecallRows,
    TokenMix,
    accuracy_by_age,
    decay,
    first_model,
    loss_of,
    open_mix,
    open_tokenizer,
    parse_mix,
)
from kvalign.training.pretraining_settings import PretrainSettings

log = logging.getLogger(__name__)

WARMUP_STEPS, WARMUP_SHARE = 100, 0.05  # the share is of --max-minutes: whichever ends first
EVAL_BLOCKS = 60
MUON_DECAY, ADAMW_DECAY = 0.05, 0.01
FACTS = "pretrain.json"
_CARDS = jinja2.Environment(
    loader=jinja2.PackageLoader("kvalign.training"),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
)
_TEXTS = "text_sha256.json"
_PROGRESS = ("step", "smooth_loss", "seconds")
# Settings that may differ when a run goes on: they change where it stops and how it runs, not what
# it learns.
_FREE = (
    "out",
    "num_tokens",
    "max_minutes",
    "save_minutes",
    "eval_corpus",
    "num_threads",
    "compile",
    "device",
)


@keywords_of(PretrainSettings)
@progress.shown_as("pretrain")
def pretrain(settings: PretrainSettings) -> dict[str, Any]:
    """Train a small language model from scratch, or continue to train the one in `out`.

    Returns:
        the content of `pretrain.json` and the card: settings, tokens seen, training loss, and, with
        an evaluation corpus, bits per byte.

    Raises:
        ExistsError: `out` has a run of other settings.
        UserError: a corpus that is too short, a device that this machine does not have.
    """
    parse_mix(settings.corpus)
    check_device(resolved(settings.device))
    hidden, num_rows = settings.hidden_size, settings.vocab_size + settings.context_len
    num_weights = hidden * (12 * hidden * settings.num_layers + num_rows)  # in round numbers
    check_room(BYTES_A_WEIGHT * num_weights, "the weights of a model of these sizes")
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    torch.manual_seed(settings.seed)
    with locked(settings.out):
        return _pretrain(settings)


def _pretrain(settings: PretrainSettings) -> dict[str, Any]:
    work_dir = settings.out / "training"
    first = {"init_identity": settings.init and identity_of(str(settings.init))}
    resumable = ResumableRun(
        work_dir / "run", {"settings": settings.as_dict(), **first}, free=_FREE
    )
    if resumable.state() == "new":
        resumable.begin()  # before a tokenizer is there, and tokens, which are of these settings
    tokenizer = open_tokenizer(settings)
    mix: RecallRows | TokenMix | ContextRows
    if settings.is_recall:
        mix = RecallRows(settings.context_len)
    else:
        mix = open_mix(settings, tokenizer, work_dir)
        if settings.repeat_share or settings.rename_share:
            mix = ContextRows(mix, settings, num_ids(tokenizer))
    if settings.eval_corpus:  # what is wrong with it is said before the work, not after
        eval_blocks(tokenizer, settings.eval_corpus, settings.context_len)
    if not (work_dir / _TEXTS).exists():  # a run that goes on has its tokens and needs no text
        write_json(work_dir / _TEXTS, text_sha256(list(parse_mix(settings.corpus))))
    model = first_model(settings, tokenizer).to(resolved(settings.device))
    run = Pretraining(settings, model, resumable.folder / "checkpoint.pt", mix.short_by)
    run.restore()
    if settings.copy_weight:
        model.set_attn_implementation("eager")  # which returns its weights
    loss_here = torch.compile(loss_of, dynamic=False) if settings.compile else loss_of
    opening = prefix_ids(tokenizer)
    progress.expect(settings.num_steps * settings.tokens_a_step, "tokens")
    progress.skip(run.step * settings.tokens_a_step)
    progress.phase("training")
    with keeping(run.summary), defer_signals() as interrupted:
        while run.share < 1:
            row_len = run.row_len
            num_rows = settings.batch_size * settings.context_len // row_len
            rows = mix.batch(settings.seed, run.step, num_rows, row_len)
            rows = replace(rows, ids=with_prefix(rows.ids, opening))
            is_fast = has_bfloat16(model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=is_fast):
                loss = loss_here(model, *rows.on(model.device), *run.copy_weight())
            run.update(loss)
            progress.advance(settings.tokens_a_step, loss=f"{run.smooth_loss:.3f}")
            if interrupted.is_set() or time.monotonic() - run.saved_at > 60 * settings.save_minutes:
                run.save()
            if interrupted.is_set():
                raise KeyboardInterrupt
    if run.saved_step < run.step:
        run.save()
    return _publish(settings, model, tokenizer, run)


def eval_blocks(tokenizer: PreTrainedTokenizerBase, corpus: str, context_len: int) -> Tensor:
    """First blocks of a corpus's test part: [at most 60, context_len] int64.

    Raises:
        UserError: it is shorter than one block.
    """
    ids = some_ids(corpus, tokenizer, EVAL_BLOCKS * context_len, split="test")
    num_blocks = len(ids) // context_len
    if num_blocks == 0:
        raise UserError(
            f"corpus {corpus!r} is too short: it has {len(ids)} tokens, {context_len} are needed "
            "(--context-len): name a longer --eval-corpus"
        )
    blocks = torch.tensor(ids[: num_blocks * context_len]).view(num_blocks, context_len)
    return with_prefix(blocks, prefix_ids(tokenizer))


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: str, context_len: int
) -> float:
    """NLL in bits per byte of the labels, in the first 60 blocks of `context_len` tokens, each read
    separately.
    """
    blocks, nll = eval_blocks(tokenizer, corpus, context_len), 0.0
    for block in blocks.to(model.device).split(4):
        logits = model(input_ids=block, use_cache=False).logits[:, :-1].float()
        labels = block[:, 1:].flatten()
        nll += cross_entropy(logits.flatten(0, 1), labels, reduction="sum").item()
    num_bytes = sum(len(tokenizer.decode(row).encode()) for row in blocks[:, 1:].tolist())
    return nll / math.log(2) / num_bytes


def has_bfloat16(device: torch.device) -> bool:
    """Return whether products in bfloat16 are fast on a device."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with products in float32, and the rate of `match_rms_adamw`: for a CPU
    without instructions for bfloat16, on which torch's takes many times as long.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            momentum, lr = group["momentum"], group["lr"]
            for weight in group["params"]:
                mean = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - momentum)
                update = orthogonal(weight.grad.lerp(mean, momentum), group["ns_coefficients"])
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-lr * 0.2 * math.sqrt(max(weight.shape)))


def orthogonal(update: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Matrix nearest to an update [M, N] whose rows or columns are orthonormal, roughly: the
    Newton-Schulz iteration of Jordan 2024.
    """
    a, b, c = coefficients
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.shape[0] > update.shape[1] else x


class Pretraining:
    """Model, optimisers and progress of one training run, and their checkpoint file."""

    def __init__(
        self, settings: PretrainSettings, model: PreTrainedModel, path: Path, short_by: int
    ):
        self.settings, self.model, self.path, self.short_by = settings, model, path, short_by
        self.step, self.smooth_loss, self.seconds = 0, math.nan, 0.0
        self.saved_at, self.saved_step = time.monotonic(), 0
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
        others = [p for p in model.parameters() if p.ndim != 2 or id(p) in embeddings]
        kind = torch.optim.Muon if has_bfloat16(model.device) else Float32Muon
        muon = kind(
            matrices, lr=settings.matrix_lr, weight_decay=MUON_DECAY, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(
            others, lr=settings.lr, betas=(0.9, 0.95), weight_decay=ADAMW_DECAY
        )
        self.optimizers = {muon: settings.matrix_lr, adamw: settings.lr}

    @property
    def share(self) -> float:
        """Share of the run that is done: of its steps, or of its minutes."""
        return max(self.step / self.settings.num_steps, self.share_of_time)

    @property
    def share_of_time(self) -> float:
        seconds = self.seconds + time.monotonic() - self.saved_at
        return seconds / (60 * self.settings.max_minutes) if self.settings.max_minutes else 0.0

    @property
    def row_len(self) -> int:
        short = self.share < self.settings.short_share
        return self.settings.context_len // (self.short_by if short else 1)

    def rate(self) -> float:
        """Share of the peak rate at this step: a short warm-up, a constant, a line down to 0."""
        fall = max(0.0, 1 - self.share) / self.settings.decay_share
        rise = (self.step + 1) / min(WARMUP_STEPS, self.settings.num_steps)
        return min(1.0, max(rise, self.share_of_time / WARMUP_SHARE), fall)

    def copy_weight(self) -> tuple[Tensor, ...]:
        """Weight of the loss of copies at this step, if there is such a loss."""
        weight = self.settings.copy_weight * decay(self.step, self.settings.num_steps)
        return (torch.tensor(weight, dtype=torch.float32),) if self.settings.copy_weight else ()

    def update(self, loss: Tensor) -> None:
        """Step of both optimisers; `smooth_loss` is averaged over about 50 steps."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * self.rate()
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        value = loss.item()
        self.smooth_loss = value if self.step == 1 else 0.98 * self.smooth_loss + 0.02 * value

    def save(self) -> None:
        now = time.monotonic()
        self.seconds, self.saved_at = self.seconds + now - self.saved_at, now
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            **{name: getattr(self, name) for name in _PROGRESS},
        }
        write_whole(self.path, lambda partial: torch.save(state, partial))
        self.saved_step = self.step

    def summary(self) -> str:
        summary = f"{self.path} has step {self.saved_step} of {self.settings.num_steps}"
        return summary if self.saved_step else ""

    def restore(self) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name in _PROGRESS:
            setattr(self, name, state[name])
        self.saved_step = self.step
        log.info("resumed at step %d", self.step)


def _publish(
    settings: PretrainSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: Pretraining,
) -> dict[str, Any]:
    """Write model, tokenizer, facts and card; facts are measured on the weights as written."""
    progress.phase("saving")
    if settings.copy_weight:
        model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16)

    def write(folder: Path) -> None:
        with quiet():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    write_together(settings.out, write, last="config.json")
    model.float().eval()
    tokens_seen = run.step * settings.tokens_a_step
    # After how many tokens the rate had fallen to 0 before it rose again: what was published here
    # was then asked for more.
    before = read_json(settings.out / FACTS) if (settings.out / FACTS).exists() else {}
    ended = [*before.get("ended_before", ()), before.get("tokens_seen", tokens_seen)]
    facts: dict[str, Any] = {
        "settings": settings.as_dict(),
        "tokens_seen": tokens_seen,
        "ended_before": [n for n in ended if n < tokens_seen],
        "train_loss_nats": run.smooth_loss,
        "train_seconds": round(run.seconds),
        "num_parameters": model.num_parameters(),
        "text_sha256": read_json(settings.out / "training" / _TEXTS),
    }
    if settings.is_recall:
        progress.phase("asking for facts of every age")
        facts["accuracy_by_age"] = accuracy_by_age(model, settings.context_len)
    elif settings.eval_corpus:
        progress.phase(f"evaluating on {settings.eval_corpus}")
        corpus, context_len = settings.eval_corpus, settings.context_len
        facts["bits_per_byte"] = bits_per_byte(model, tokenizer, corpus, context_len)
    write_json(settings.out / FACTS, facts)
    card = _CARDS.get_template("lm_card.md.jinja")
    values = dict(settings=settings, facts=facts, machine=platform.machine(), version=version)
    write_text(settings.out / "README.md", card.render(values))
    return facts
