"""Perplexity of every method on the same labels of one text, like `kvalign eval perplexity`."""

import torch

import kvalign
from kvalign.data_gen.corpora import token_pieces

CACHE_SIZE, NUM_LABELS = 64, 2000

loaded = kvalign.load_model("gpt2-mini")
# The documentation inside Python, its test part; "text:PATH" reads a file of yours.
ids = torch.tensor([next(token_pieces("python-docs", loaded.tokenizer, "test"))])
ids = ids[:, : CACHE_SIZE + 1 + NUM_LABELS]

for name in kvalign.METHODS:
    if name == "dense":
        continue  # it stops at the context length
    method = kvalign.make_method(name, loaded.model, cache_size=CACHE_SIZE)
    nll = kvalign.score(method, ids)  # nats, one for each label: ids[0, CACHE_SIZE + 1:]
    assert len(nll) == NUM_LABELS
    print(f"{method.title:20} {method.sizes.num_sinks} sinks  perplexity {nll.mean().exp():6.1f}")
