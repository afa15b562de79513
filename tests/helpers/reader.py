"""A method that does what a good model would: it answers from the text that it still has."""

import torch

from kvalign.cache.sizes import CacheSizes
from kvalign.methods.base import Method


class Reader(Method):
    """Keeps its last `memory_len` tokens; `answer` puts the next token of their text, if it knows
    it, into logits [V].
    """

    name, takes_policy, tokens_left = "reader", False, None

    def __init__(self, loaded, memory_len):
        self.model, self.tokenizer, self.memory_len = loaded.model, loaded.tokenizer, memory_len
        self.sizes, self.aligner_name, self.num_fed = CacheSizes(40, 0, 1), None, 0

    def reset(self):
        self.memory = []

    def state(self):
        return {"memory": torch.tensor(self.memory)}

    def restore(self, state):
        self.memory = state["memory"].tolist()

    def feed(self, ids):
        self.num_fed += ids.shape[1]
        self.memory = (self.memory + ids[0].tolist())[-self.memory_len :]
        logits = torch.zeros(1, self.model.config.vocab_size)
        self.answer(self.tokenizer.decode(self.memory), logits[0])
        return logits

    def ids_of(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
