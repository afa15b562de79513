"""A loop of your own. The cache evicts and realigns by itself; the model needs no change."""

import torch

import kvalign

loaded = kvalign.load_model("gpt2-mini")
cache = kvalign.make_cache(loaded.model, cache_size=64)

ids = loaded.tokenizer("The history of the island", return_tensors="pt").input_ids
generated = []
with torch.no_grad():
    for _ in range(600):
        # No attention mask or position ids are needed: the model asks the cache for its length.
        logits = loaded.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        top = logits.topk(20)
        choice = torch.multinomial(top.values.softmax(-1), 1)
        ids = top.indices.gather(-1, choice)
        generated.append(int(ids))

print(loaded.tokenizer.decode(generated))
index = cache.index()
print(f"\nin the cache: tokens {index[0]} to {index[-1]} of {cache.seen[0]}")
