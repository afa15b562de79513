"""Small chat templates of each kind that published models have, and tools."""

TURN = "{{ m.role }}: {{ m.content }}"
ASK = "{% if add_generation_prompt %}assistant: {% endif %}"
TOLD = "{% if tools %}system: tools{% for t in tools %} {{ t | tojson }}{% endfor %}\n{% endif %}"
JSON = "{{ call.function.arguments | tojson }}"


def template(calls, *, told=TOLD, turn=TURN, result="user: got {{ m.content }}\n", ask=ASK):
    """A template that writes calls in this way."""
    return (
        f"{told}{{% for m in messages %}}{{% if m.role == 'tool' %}}{result}"
        f"{{% else %}}{turn}{calls}\n{{% endif %}}{{% endfor %}}{ask}"
    )


def each(call, before="", after=""):
    """Calls of an answer, each in this way, and marks around all."""
    loop = "{% for call in m.tool_calls %}" + call + "{% endfor %}"
    return "{% if m.tool_calls %}" + before + loop + after + "{% endif %}"


MARKED = '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": %s}\n</tool_call>'
# As Qwen's and Hermes', without their words.
HERMES_TEMPLATE = template(each(MARKED % JSON))
# As Llama 3's: tools stand in the user's first message, and an answer is one call.
LLAMA_TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}ipython: {{ m.content | tojson }}
{% elif m.tool_calls %}assistant: {%- set f = m.tool_calls[0].function %}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{% else %}{{ m.role }}: {% if tools and loop.first %}{{ tools | tojson }} {% endif %}{{ m.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
BEGINS, ENDS, BEGIN, SEP, END = (
    f"<{_BAR}tool▁{name}{_BAR}>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
NAME = "{{ call.function.name }}"
ADDED = "{{ '```json\\n' + call.function.arguments + '\\n```' }}"  # fails for a mapping
TEMPLATES = {
    "hermes": HERMES_TEMPLATE,
    "llama": LLAMA_TEMPLATE,
    "functionary": template(each(f"<function={NAME}>{{{{ call.function.arguments }}}}</function>")),
    "mistral": template(
        each(
            '{% if call.id | length != 9 %}{{ raise_exception("9") }}{% endif %}'
            '{{ "" if loop.first else ", " }}{"name": "' + NAME + '", "arguments": ' + JSON + ", "
            '"id": "{{ call.id }}"}',
            "[TOOL_CALLS] [",
            "]",
        ),
        result='[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}\n',
    ),
    "mistral-v11": template(each(f"[TOOL_CALLS]{NAME}[ARGS]{JSON}")),
    # As DeepSeek-R1's: a text is written beside calls unless it is none.
    "deepseek-r1": template(
        each(f"{BEGIN}{{{{ call.type }}}}{SEP}{NAME}\n{ADDED}{END}", BEGINS, ENDS),
        turn="{% if m.content is not none %}" + TURN + "{% endif %}",
    ),
    "deepseek-v3.1": template(
        each(f"{BEGIN}{NAME}{SEP}{{{{ call.function.arguments }}}}{END}", BEGINS, ENDS)
    ),
}
# As Qwen3's: only the last answer's thoughts are written; as DeepSeek-R1's: they are in the text,
# from which they are taken, and the prompt begins one.
THINKING = {
    "field": template(
        each(MARKED % JSON),
        turn="{{ m.role }}: {% if m.reasoning_content and loop.last %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}",
    ),
    "text": template(
        each(MARKED % JSON),
        turn="{{ m.role }}: {{ m.content.split('</think>')[-1] }}",
        ask="{% if add_generation_prompt %}assistant: <think>\n{% endif %}",
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
}
TIME = {"type": "function", "function": {"name": "time"}}
