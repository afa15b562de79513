"""DynamicCache of transformers on a model with a sliding window, tested with `kvalign verify`. The
model has llama-mini's weights, as a Mistral with a window of 64.
"""

from transformers import DynamicCache, MistralConfig, MistralForCausalLM

import kvalign
from kvalign.app.commands.verify import show

llama = kvalign.load_model("llama-mini").model
config = llama.config.to_dict() | {"model_type": "mistral", "sliding_window": 64}
model = MistralForCausalLM(MistralConfig(**config)).eval()
model.load_state_dict(llama.state_dict())

show(kvalign.verify(model, lambda model: DynamicCache(config=model.config), num_steps=1000))
