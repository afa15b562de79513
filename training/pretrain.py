"""The reference language models' recipe: GPT-2 and Llama shapes small enough to train on a laptop.

Matrices are trained with Muon (Jordan 2024, `torch.optim.Muon`), the rest with AdamW; the rate is constant, then falls
linearly (a trapezoid needs no length fixed ahead, so a run can be extended by asking for more tokens); the first steps
use half the context. What a step reads depends on the seed and the step's number alone, so a resumed run continues
as if it had not stopped.
"""

import json
import logging
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvalign.commands.pretrain import PretrainSettings
from kvalign.data_gen.corpora import texts, token_pieces

log = logging.getLogger(__name__)

HEAD_DIM = 64
WARMUP_STEPS = 100


def pretrain(settings: PretrainSettings) -> dict:
    """Train, or go on training, the model in `settings.out`; returns what the card states (tokens, loss, bits per byte)."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    torch.manual_seed(settings.seed)
    work_dir = settings.out / "training"
    work_dir.mkdir(parents=True, exist_ok=True)
    mix = [_parse_share(spec) for spec in settings.corpus]
    tokenizer = _tokenizer(settings, mix)
    data = [_token_file(work_dir, spec, tokenizer) for spec, _ in mix]
    shares = np.array([share for _, share in mix]) / sum(share for _, share in mix)

    model = build_model(settings, tokenizer).to(settings.device)
    run = _Run(settings, model, work_dir / "checkpoint.pt")
    run.restore()
    step_fn = torch.compile(_loss) if settings.compile else _loss
    last_save = time.monotonic()
    with tqdm(total=run.num_steps, initial=run.step, unit="step", desc=settings.arch) as bar:
        while run.step < run.num_steps:
            ids = _batch(settings, data, shares, run.step, run.seq_len).to(settings.device)
            loss = run.update(lambda ids=ids: step_fn(model, ids))
            bar.update()
            if run.step % 20 == 0:
                bar.set_postfix(loss=f"{loss:.3f}")
                log.info("step %d tokens %d loss %.4f", run.step, run.tokens_seen, loss)
            if time.monotonic() - last_save > 60 * settings.save_minutes:
                run.save()
                last_save = time.monotonic()
    run.save()
    result = {"tokens_seen": run.tokens_seen, "train_loss_nats": run.smooth_loss}
    model.eval()
    if settings.eval_corpus:
        result["eval_corpus"] = settings.eval_corpus
        result["bits_per_byte"] = bits_per_byte(model, tokenizer, settings.eval_corpus, settings.context_len)
    model.to(torch.bfloat16).save_pretrained(settings.out)
    tokenizer.save_pretrained(settings.out)
    (settings.out / "pretrain.json").write_text(
        json.dumps({"settings": settings.as_dict(), **result}, indent=1) + "\n"
    )
    return result


def build_model(settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A randomly initialised model of the asked shape, heads of 64 dimensions, Llama with half as many KV heads."""
    hidden, heads = settings.hidden_size, settings.hidden_size // HEAD_DIM
    ids = dict(bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    if settings.arch == "gpt2":
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=settings.context_len,
            n_embd=hidden,
            n_layer=settings.num_layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **ids,
        )
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=settings.context_len,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        tie_word_embeddings=True,
        **ids,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: str,
    context_len: int,
    num_blocks: int = 60,
) -> float:
    """Bits per byte of the labels in the first `num_blocks` blocks of `context_len` tokens, each read on its own."""
    ids: list[int] = []
    for piece in token_pieces(corpus, tokenizer, "test"):
        ids += piece
        if len(ids) >= num_blocks * context_len:
            break
    blocks = torch.tensor(ids[: len(ids) // context_len * context_len][: num_blocks * context_len])
    blocks = blocks.view(-1, context_len).to(model.device)
    nll = 0.0
    for block in blocks.split(4):
        logits = model(input_ids=block, use_cache=False).logits[:, :-1].float()
        nll += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), block[:, 1:].flatten(), reduction="sum"
        ).item()
    num_bytes = sum(len(tokenizer.decode(row).encode()) for row in blocks[:, 1:].tolist())
    return nll / math.log(2) / num_bytes


class _Run:
    """Model, optimisers and position of one training run, and their checkpoint file."""

    def __init__(self, settings: PretrainSettings, model: PreTrainedModel, path: Path):
        self.settings, self.model, self.path = settings, model, path
        self.num_steps = math.ceil(settings.num_tokens / (settings.batch_size * settings.context_len))
        embeddings = {model.get_input_embeddings().weight, getattr(model.transformer, "wpe", None)
                      and model.transformer.wpe.weight} if settings.arch == "gpt2" else {model.get_input_embeddings().weight}
        matrices = [p for p in model.parameters() if p.ndim == 2 and p not in embeddings]
        rest = [p for p in model.parameters() if p.ndim != 2 or p in embeddings]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=settings.matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self.peaks = [settings.matrix_lr, settings.lr]
        self.step, self.smooth_loss = 0, math.nan

    @property
    def tokens_seen(self) -> int:
        return self.step * self.settings.batch_size * self.settings.context_len

    @property
    def seq_len(self) -> int:
        short = self.step < self.settings.short_share * self.num_steps
        return self.settings.context_len // 2 if short else self.settings.context_len

    def rate(self) -> float:
        """Share of the peak rate at this step: a short warm-up, a constant, a line down to 0."""
        left = (self.num_steps - self.step) / (self.settings.decay_share * self.num_steps)
        return min(1.0, (self.step + 1) / min(WARMUP_STEPS, self.num_steps), left)

    def update(self, loss_fn) -> float:
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.rate()
        with torch.autocast(self.model.device.type, torch.bfloat16):
            loss = loss_fn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        value = loss.item()
        self.smooth_loss = value if math.isnan(self.smooth_loss) else 0.98 * self.smooth_loss + 0.02 * value
        return self.smooth_loss

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "smooth_loss": self.smooth_loss,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def restore(self) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.smooth_loss = state["step"], state["smooth_loss"]
        log.info("resumed at step %d", self.step)


def _loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Mean NLL in nats of ids [B, T] but the first of each row."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T - 1, V]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def _batch(settings: PretrainSettings, data: list[np.ndarray], shares: np.ndarray, step: int, seq_len: int) -> torch.Tensor:
    """Sequences of `seq_len` + 1 tokens from random places, corpora drawn by their shares."""
    rng = np.random.default_rng((settings.seed, step))
    num_rows = settings.batch_size * settings.context_len // seq_len
    rows = []
    for which in rng.choice(len(data), num_rows, p=shares):
        start = rng.integers(0, len(data[which]) - seq_len)
        rows.append(np.asarray(data[which][start : start + seq_len + 1], dtype=np.int64))
    return torch.from_numpy(np.stack(rows))


def _parse_share(spec: str) -> tuple[str, float]:
    name, at, share = spec.rpartition("@")
    if not at:
        return spec, 1.0
    try:
        return name, float(share)
    except ValueError:
        raise ValueError(f"--corpus takes SPEC or SPEC@WEIGHT, got {spec!r}") from None


def _tokenizer(settings: PretrainSettings, mix: list[tuple[str, float]]) -> PreTrainedTokenizerBase:
    """The shared tokenizer, the one already in `out`, or a new byte-level BPE trained on the mix."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = settings.tokenizer or settings.out
    if settings.tokenizer or (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    total, weight = 16 * 2**20, sum(share for _, share in mix)

    def sample():
        for spec, share in mix:
            wanted = int(total * share / weight)
            while wanted > 0:
                for text in texts(spec, "train"):
                    yield text[:wanted]
                    wanted -= len(text)
                    if wanted <= 0:
                        break

    bpe.train_from_iterator(sample(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        model_max_length=settings.context_len,
    )
    tokenizer.save_pretrained(settings.out)
    return tokenizer


def _token_file(work_dir: Path, spec: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The ids of a corpus, tokenised once into a memory-mapped file."""
    import hashlib

    path = work_dir / f"{hashlib.sha256(spec.encode()).hexdigest()[:12]}.npy"
    if not path.exists():
        pieces = [np.array(piece, dtype=np.uint16) for piece in token_pieces(spec, tokenizer, "train")]
        partial = path.with_suffix(".partial.npy")
        np.save(partial, np.concatenate(pieces))
        os.replace(partial, path)
    return np.load(path, mmap_mode="r")
