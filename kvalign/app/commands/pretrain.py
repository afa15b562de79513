"""`kvalign pretrain`: train a small reference language model from scratch."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(Settings):
    """Train a small reference language model from scratch; run the same command again to resume.

    Example:
        kvalign pretrain --arch gpt2 --out my-gpt2 --num-tokens 4096 --vocab-size 512
    """

    arch: str = option("gpt2", help="architecture", choices=("gpt2", "llama"))
    corpus: tuple[str, ...] = option(
        ("python-docs",), help="corpora to mix, each SPEC or SPEC@WEIGHT (share of the tokens)"
    )
    out: Path = option(help="folder of the model")
    tokenizer: Path | None = option(
        None, help="folder of a tokenizer to share (default: train one)"
    )
    vocab_size: int = option(8192, help="tokens of a new tokenizer", at_least=257)
    context_len: int = option(512, help="context length in tokens", at_least=16)
    num_layers: int = option(6, help="transformer layers", at_least=1)
    hidden_size: int = option(256, help="hidden size; heads have 64 dimensions", at_least=64)
    num_tokens: int = option(8_000_000, help="tokens to train on", at_least=1)
    batch_size: int = option(4, help="sequences of the full context length a step", at_least=1)
    lr: float = option(
        2e-3, help="peak learning rate of AdamW (embeddings, norms, biases)", above=0
    )
    matrix_lr: float = option(4e-3, help="peak learning rate of Muon (weight matrices)", above=0)
    decay_share: float = option(
        0.5, help="last share of the steps, with the rate falling to 0", above=0, at_most=1
    )
    short_share: float = option(
        0.4, help="first share of the steps, at half the context length", at_least=0, at_most=1
    )
    save_minutes: float = option(4.0, help="minutes between checkpoints", above=0)
    eval_corpus: str | None = option(
        None, help="report bits per byte on the first 60 blocks of this corpus"
    )
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0)
    compile: bool = option(False, help="use torch.compile (needs a C++ compiler; faster)")
    device: str = option("cpu", help="cpu or cuda")
    seed: int = option(0, help="random seed")


def run(settings: PretrainSettings) -> None:
    import json

    from kvalign.training.lm_run import pretrain

    print(json.dumps(pretrain(settings)))
