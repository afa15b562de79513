"""A conversation that is edited, and goes on after a restart."""

import tempfile
from pathlib import Path

import kvalign

loaded = kvalign.load_model("gpt2-mini")
path = Path(tempfile.mkdtemp()) / "talk.safetensors"

talk = kvalign.chat(loaded.model, loaded.tokenizer, cache_size=64, max_new_tokens=40)
for turn in ("Who lived on the island?", "And before them?"):
    print(f"> {turn}\n{''.join(talk.say(turn))}\n")
print(talk.edit(2, "And after them?"))
talk.save(path)

# Later, in another process: the cache is exactly as it was.
talk = kvalign.load_chat(path, loaded.model, loaded.tokenizer)
print(f"> What became of them?\n{''.join(talk.say('What became of them?'))}\n")
stream = talk.stream
print(f"{len(stream.ids)} tokens in all, {stream.method.sizes.cache_size} in the cache")
