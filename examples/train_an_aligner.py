"""Position tables for a model, from text in a minute; then what they are worth."""

import tempfile
from pathlib import Path

import torch

import kvalign
from kvalign.app.commands.train import TrainSettings
from kvalign.data_gen.corpora import token_pieces
from kvalign.training.table_run import train

CACHE_SIZE, NUM_LABELS = 64, 2000

folder = Path(tempfile.mkdtemp()) / "kvalign-gpt2-mini-table"  # kvalign-<base>-<kind>
settings = TrainSettings(
    aligner_kind="table",
    model="gpt2-mini",  # or a hub id, or a folder
    corpus=("python-docs",),
    num_tokens=100_000,
    out=folder,
)
train(settings)
aligner = kvalign.Aligner.from_pretrained(folder)  # aligner.push_to_hub("me/kvalign-...") shares it

loaded = kvalign.load_model("gpt2-mini")
ids = torch.tensor([next(token_pieces("python-docs", loaded.tokenizer, "test"))])
ids = ids[:, : CACHE_SIZE + 1 + NUM_LABELS]
for name, options in {
    "streaming-llm": {"num_sinks": 0},
    "kvalign": {"aligner": aligner},
    "recompute": {},
}.items():
    method = kvalign.make_method(name, loaded.model, cache_size=CACHE_SIZE, **options)
    print(f"{method.title:20} perplexity {method.score(ids).mean().exp():6.1f}")
