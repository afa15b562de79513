"""Chat templates with the habits of published families, and what is said with them.

Each is written here, in a few lines, with the same frame around turns as its family and the same
way with what came before: nothing is copied.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A template, and what it writes.

    Attributes:
        template: jinja.
        frame: special tokens that it writes.
        end: the token with which it ends an answer, or begins what follows.
        after: what stands between an answer and the model's next one, `{}` for what the user says.
        takes_system: whether it writes a system message.
        rewrites: whether it writes earlier answers in another way than the model did.
    """

    template: str
    frame: tuple[str, ...]
    end: str | None
    after: str
    takes_system: bool = True
    rewrites: bool = False


_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CHATML = f"{{% for m in messages %}}{_TURN}{{% endfor %}}{_ASK}"
_AFTER_CHATML = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_LAST_QUERY = (
    "{% set at = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
)
_SPLIT = "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"

FAMILIES = {
    # An empty frame for what was thought stands before the last answer alone.
    "qwen3": Family(
        _LAST_QUERY
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + _SPLIT
        + "<|im_start|>"
        "assistant\n{% if loop.index0 > at.last %}<think>\n\n</think>\n\n{% endif %}{{ said }}"
        "<|im_end|>\n{% else %}" + _TURN + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        _AFTER_CHATML + "<think>\n\n</think>\n\n",
        rewrites=True,
    ),
    "smollm2": Family(_CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", _AFTER_CHATML),
    "llama2": Family(
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} </s>"
        "{% elif m.role == 'user' %}<s>[INST] {% if loop.index0 == 1 and messages[0].role == "
        "'system' %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}"
        "{{ m.content | trim }} [/INST]{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        "</s>",
        " </s><s>[INST] {} [/INST]",
    ),
    # The system message goes to the newest turn, and from those before it.
    "mistral": Family(
        _LAST_QUERY
        + "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}"
        "</s>{% elif m.role == 'user' %}[INST] {% if loop.index0 == at.last and messages[0].role "
        "== 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]{% endif %}"
        "{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
        "</s>[INST] {}[/INST]",
        rewrites=True,
    ),
    "gemma": Family(
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "<end_of_turn>\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        takes_system=False,
    ),
    # What was thought stays out of earlier answers; the model is asked to think.
    "deepseek-r1": Family(
        "<bos>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}" + _SPLIT + "<|Assistant|>{{ said }}<|eos|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ("<bos>", "<|User|>", "<|Assistant|>", "<|eos|>"),
        "<|eos|>",
        "<|eos|><|User|>{}<|Assistant|><think>\n",
        rewrites=True,
    ),
    # Parts of an answer end with one token, the whole one with another, which only the last has.
    "harmony": Family(
        "{% for m in messages %}{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>"
        "{{ m.content }}<|end|>{% else %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' "
        "}}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|return|>",
        "<|end|><|start|>user<|message|>{}<|end|><|start|>assistant",
        rewrites=True,
    ),
    # Nothing ends an answer: who speaks next does.
    "glm": Family(
        "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("[gMASK]", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|user|>",
        "<|user|>\n{}<|assistant|>\n",
    ),
    "alpaca": Family(
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == "
        "'user' %}### Instruction:\n{{ m.content }}\n\n{% else %}### Response:\n{{ m.content }}\n\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}",
        (),
        None,
        "\n\n### Instruction:\n{}\n\n### Response:\n",
    ),
}
