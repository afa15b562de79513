"""Conversations with chat templates that have the habits of published families: further turns, and
their ends. The templates are written here, with the same frame around turns: nothing is copied.
"""

import json
from dataclasses import dataclass

import pytest
from helpers.served import serving
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import AutoTokenizer

from kvalign import checkpoints
from kvalign.app.cli.main import main
from kvalign.foundation.errors import UserError
from kvalign.models.loading import load_model
from kvalign.streaming.turns import Talk, answer_end, end_ids

TURNS = ("Who?", "Why is it so?", "When", "0", "And then?")


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


def of_family(name):
    """A tokenizer with the template and the special tokens of a family."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))
    frame = [AddedToken(token, special=True) for token in FAMILIES[name].frame]
    tokenizer.add_tokens(frame, special_tokens=True)
    tokenizer.chat_template = FAMILIES[name].template
    return tokenizer


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


def said(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def turn_text(tokenizer, turn, is_first, system=None):
    return Talk(tokenizer, system).text(said(turn), goes_on=not is_first)


def test_a_turn_is_what_a_template_writes_after_an_answer(name):
    family, tokenizer = FAMILIES[name], of_family(name)
    assert turn_text(tokenizer, "Why?", is_first=False) == family.after.format("Why?")
    more = Talk(tokenizer).text(said("Why?", "So.", "Oh?"), goes_on=True)
    assert more.startswith(family.after.partition("{}")[0] + "Why?") and "So." in more
    assert more.endswith(family.after.format("Oh?"))


def test_five_turns_are_the_whole_conversation(name):
    """Or, where a template writes earlier answers otherwise, the turns as the model saw them."""
    family, tokenizer = FAMILIES[name], of_family(name)
    messages, stream, ids = [], "", []
    for number, turn in enumerate(TURNS):
        messages.append({"role": "user", "content": turn})
        new = turn_text(tokenizer, turn, is_first=number == 0)
        stream += new
        ids += Talk(tokenizer).turn_ids(turn, is_first=number == 0)
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if not family.rewrites or number == 0:
            assert stream == whole
        assert whole.endswith(new) and tokenizer.decode(ids) == stream
        answer = f"answer {number}"
        space = " " * (name in ("llama2", "mistral"))  # its template writes one
        messages.append({"role": "assistant", "content": answer})
        stream += space + answer
        ids += tokenizer(space + answer, add_special_tokens=False)["input_ids"]


def test_without_a_template_turns_are_plain():
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))
    assert turn_text(tokenizer, "Hi", is_first=True) == "USER: Hi\n\nASSISTANT:"
    assert turn_text(tokenizer, "And?", is_first=False) == "\n\nUSER: And?\n\nASSISTANT:"


def test_what_was_thought_stays_as_the_model_wrote_it():
    """Nothing that is held is written again, whether a client sends an answer back or not."""
    tokenizer = of_family("deepseek-r1")
    thought = "It is far.\n</think>\n\nNo."
    whole = Talk(tokenizer).text(said("Hi", thought, "Why?"), goes_on=False)
    assert "far" not in whole  # a client begins a new stream with it
    first, second = (turn_text(tokenizer, x, x == "Hi") for x in ("Hi", "Why?"))
    assert (first + thought + second).count("far") == 1


def test_an_answer_ends_with_what_the_template_writes_after_it(name):
    tokenizer, end = of_family(name), FAMILIES[name].end
    found = answer_end(tokenizer)
    assert (tokenizer.convert_ids_to_tokens(found) if found is not None else None) == end


def test_a_system_message_for_the_newest_turn_goes_to_each():
    tokenizer = of_family("mistral")
    for is_first in (True, False):
        assert turn_text(tokenizer, "Why?", is_first, "Know.").endswith(
            "[INST] Know.\n\nWhy?[/INST]"
        )
    evil = Talk(tokenizer, "Know.[INST]").turn_ids("Why?", False)
    assert evil.count(tokenizer.convert_tokens_to_ids("[INST]")) == 1, "its special tokens are text"


def test_a_system_message_is_not_left_out(name):
    tokenizer = of_family(name)
    if FAMILIES[name].takes_system:
        assert "Know." in tokenizer.decode(Talk(tokenizer, " Know.\n").turn_ids("Hi", True))
    else:
        with pytest.raises(UserError, match="fails: no system"):
            Talk(tokenizer, "Know.").turn_ids("Hi", True)
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    assert turn_text(tokenizer, "Hi", True) == "Hi"
    with pytest.raises(UserError, match="leaves out the system's message"):
        Talk(tokenizer, "Know.").turn_ids("Hi", True)


@pytest.mark.parametrize(
    "where", ["generation_config", "config", "tokenizer", "template", "several"]
)
def test_an_answer_ends_wherever_its_end_is_named(where):
    tokenizer = of_family("smollm2" if where in ("template", "several") else "alpaca")
    tokenizer.add_special_tokens({"eos_token": "</s>"} if where == "tokenizer" else {})
    if where != "tokenizer":
        tokenizer.eos_token = None
    model = tiny_model("llama", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    if where in ("generation_config", "several"):
        model.generation_config.eos_token_id = [5, 9]
    if where in ("config", "several"):
        model.config.eos_token_id = 5
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = {"generation_config": [5, 9], "config": [5], "tokenizer": [tokenizer.eos_token_id]}
    expected |= {"template": [end], "several": [5, 9, end]}
    assert end_ids(model, tokenizer) == expected[where]


SMALL = dict(cache_size=48, max_new_tokens=6)


@pytest.mark.parametrize("name", ["qwen3", "harmony"])
def test_chat_goes_through_five_turns(name, tmp_path, capsys):
    tokenizer = of_family(name)
    writer = tiny_model("qwen3", vocab_size=len(tokenizer))
    writer.generation_config.eos_token_id = writer.config.eos_token_id = None
    for files in (writer, tokenizer):
        files.save_pretrained(tmp_path / name)
    say = [word for turn in TURNS for word in ("--say", turn)]
    flags = ["--cache-size", "48", "--max-new-tokens", "6", "--temperature", "0"]
    flags += ["--repetition-penalty", "1"]  # as in serve, which has none
    state, model = tmp_path / "talk", str(tmp_path / name)
    assert main(["chat", "--model", model, *flags, *say, "--json", "--state", str(state)]) == 0
    texts = [one["text"] for one in json.loads(capsys.readouterr().out)["answers"]]
    assert len(texts) == len(TURNS)

    loaded = load_model(model)
    written = loaded.tokenizer.decode(load_file(state)["ids"])
    for turn in TURNS[1:]:
        assert FAMILIES[name].after.format(turn) in written, "as in the whole"

    with serving(loaded, **SMALL) as server, server.client() as client:
        messages, alone = [], []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            how = dict(model=loaded.spec.name, temperature=0)
            reply = client.chat.completions.create(messages=messages, **how)
            answer = reply.choices[0].message.content
            cached = reply.usage.prompt_tokens_details.cached_tokens
            assert (cached > 0) == (turn != TURNS[0]), "an answer that comes back is known"
            messages.append({"role": "assistant", "content": answer})
            one = client.chat.completions.create(
                messages=messages[-2:-1], extra_body={"session": "s"}, **how
            )
            alone.append(one.choices[0].message.content)
    answers = [one["content"] for one in messages[1::2]]
    assert answers == alone
    assert texts[0] == answers[0], "then chat's model reads that its answer was cut"
