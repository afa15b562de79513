"""Stream of text past the context length of your model.

python examples/stream_your_model.py HuggingFaceTB/SmolLM2-135M streaming-llm
"""

import sys

import kvalign

name = sys.argv[1] if len(sys.argv) > 1 else "gpt2-mini"  # ships with kvalign
method = sys.argv[2] if len(sys.argv) > 2 else "kvalign"

# For any other model this is AutoModelForCausalLM and AutoTokenizer.
loaded = kvalign.load_model(name)
stream = kvalign.stream(
    loaded.model,
    loaded.tokenizer,
    "The history of the island",
    method=method,
    cache_size=64,
    max_new_tokens=600,  # without it the stream has no end
)
for piece in stream:
    print(piece, end="", flush=True)
print(f"\n\n{stream.timing()['ms_per_token']:.1f} ms per token", file=sys.stderr)
