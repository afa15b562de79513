"""A stream in code of your own: transformers' `generate`, with its sampling and streamers, and a
loop over the model, which needs no change: the cache evicts and realigns by itself.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import kvalign
from kvalign import checkpoints

folder = checkpoints.model_path("gpt2-mini")  # or a hub id
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer("The history of the island", return_tensors="pt")

output = model.generate(
    **inputs,
    custom_generate=kvalign.stream_generate,
    method="kvalign",
    cache_size=64,
    max_new_tokens=600,
    do_sample=True,
    top_k=20,
    streamer=TextStreamer(tokenizer),
)
longest = model.config.max_position_embeddings
print(f"{output.shape[1]} tokens from a model with {longest} positions\n")

cache, ids, generated = kvalign.make_cache(model, cache_size=64), inputs.input_ids, []
with torch.no_grad():
    for _ in range(600):
        # No attention mask or position ids are needed: the model asks the cache for its length.
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        top = logits.topk(20)
        ids = top.indices.gather(-1, torch.multinomial(top.values.softmax(-1), 1))
        generated.append(int(ids))
print(tokenizer.decode(generated))
index = cache.index()
print(f"\nin the cache: tokens {index[0]} to {index[-1]} of {cache.seen[0]}")
