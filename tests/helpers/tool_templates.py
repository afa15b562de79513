"""Chat templates of the two forms that calls of tools have, and tools."""

from kvalign.app.serve.forms import HERMES, LLAMA

# As Qwen's, without its words; calls and results stand where they stand there.
HERMES_TEMPLATE = """\
{%- if tools %}system: tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}user: <tool_response>{{ m.content }}</tool_response>
{% else %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
# As Llama 3's: tools stand in the user's first message, a result is written as JSON.
LLAMA_TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}ipython: {{ m.content | tojson }}
{% elif m.tool_calls %}assistant: {%- set f = m.tool_calls[0].function %}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{% else %}{{ m.role }}: {% if tools and loop.first %}{{ tools | tojson }} {% endif %}{{ m.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
TEMPLATES = {HERMES: HERMES_TEMPLATE, LLAMA: LLAMA_TEMPLATE}
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
