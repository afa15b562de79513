"""Perplexity of every method on the same labels of one text."""

import torch

import kvalign
from kvalign.data_gen.corpora import texts

CACHE_SIZE, NUM_LABELS = 64, 2000

loaded = kvalign.load_model("gpt2-mini")
text = "\n".join(next(texts("python-docs")) for _ in range(1))
ids = loaded.tokenizer(text, return_tensors="pt", verbose=False).input_ids
ids = ids[:, : CACHE_SIZE + 1 + NUM_LABELS]

for name in kvalign.METHODS:
    if name == "dense":
        continue  # it stops at the context length
    method = kvalign.make_method(name, loaded.model, cache_size=CACHE_SIZE)
    nll = method.score(ids)  # nats, one for each label: ids[0, CACHE_SIZE + 1:]
    print(f"{method.title:24} {method.num_sinks} sinks  perplexity {nll.mean().exp():7.1f}")
print(f"{len(nll)} labels; uniform over the vocabulary: {torch.tensor(ids.max() + 1).item()}")
