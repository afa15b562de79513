"""A stream that takes more input in the middle, and a conversation that goes on after a restart."""

import tempfile
from pathlib import Path

import kvalign
from kvalign.streaming.turns import Talk

loaded = kvalign.load_model("gpt2-mini")
path = Path(tempfile.mkdtemp()) / "talk.safetensors"

talk = kvalign.stream(loaded.model, loaded.tokenizer, cache_size=64, max_new_tokens=40)
turn_ids = Talk(loaded.tokenizer).turn_ids  # by the chat template of a model that has one
for number, turn in enumerate(["Who lived on the island?", "And before them?"]):
    talk.feed(turn_ids(turn, is_first=number == 0))  # `feed` also takes plain text
    print(f"> {turn}\n{''.join(talk)}\n")
talk.save(path)

# Later, in another process: the cache is exactly as it was.
talk = kvalign.load_stream(path, loaded.model, loaded.tokenizer)
talk.feed(turn_ids("What became of them?", is_first=False))
print(f"> What became of them?\n{''.join(talk)}\n")
print(f"{len(talk.ids)} tokens in all, {talk.method.sizes.cache_size} in the cache")
