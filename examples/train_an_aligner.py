"""Position tables for a model, trained on text in a minute, and their benefit."""

import tempfile
from pathlib import Path

import kvalign

folder = Path(tempfile.mkdtemp()) / "kvalign-gpt2-mini-table"  # kvalign-<base>-<kind>
loaded = kvalign.load_model("gpt2-mini")  # or a hub id, or a folder
kvalign.training.train_table(
    loaded=loaded,
    corpus="python-docs",  # "text:PATH" reads a file of yours
    num_tokens=100_000,
    out=folder,
)
# kvalign.Aligner.from_pretrained(folder).push_to_hub("me/kvalign-gpt2-mini-table") shares it

result = kvalign.eval.perplexity(
    loaded=loaded,
    methods=["streaming-llm", "kvalign", "recompute"],
    aligner=str(folder),
    num_sinks=0,  # the same for all three
    cache_sizes=64,
    num_tokens=2000,
)
for row in result["rows"]:
    print(f"{row['method']:15} perplexity {row['perplexity']:6.1f}")
