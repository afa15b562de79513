"""A stream through transformers' own `generate`, with its sampling, processors and streamers."""

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
print(
    f"{output.shape[1]} tokens from a model with {model.config.max_position_embeddings} positions"
)
