"""A stream that takes more input in the middle, and a conversation that goes on after a restart."""

import tempfile
from pathlib import Path

import kvalign
from kvalign.streaming.turns import turn_ids

loaded = kvalign.load_model("gpt2-mini")
path = Path(tempfile.mkdtemp()) / "talk.safetensors"

talk = kvalign.stream(loaded.model, loaded.tokenizer, cache_size=64, max_new_tokens=40)
for number, turn in enumerate(["Who lived on the island?", "And before them?"]):
    # `turn_ids` uses the chat template of a model that has one; `feed` also takes plain text.
    talk.feed(turn_ids(loaded.tokenizer, turn, is_first=number == 0))
    print(f"> {turn}\n{''.join(talk)}\n")
talk.save(path)

# Later, in another process: the cache is exactly as it was.
talk = kvalign.load_stream(path, loaded.model, loaded.tokenizer)
talk.feed(turn_ids(loaded.tokenizer, "What became of them?", is_first=False))
print(f"> What became of them?\n{''.join(talk)}\n")
print(f"{len(talk.ids)} tokens in all, {talk.method.sizes.cache_size} in the cache")
