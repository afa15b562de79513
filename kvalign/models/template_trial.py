"""A chat template is a program from outside: it is tried out once, in a process of its own with
little time and memory, before it runs in this one, where nothing could stop 9^(9^9).
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache

SECONDS, MOST_BYTES, MOST_CHARACTERS = 3, 1 << 29, 10**6
_TOO_LONG = 3  # an exit code

# What the process runs: jinja2's sandbox, as transformers sets it up. A template that fails there
# fails in time, which is all that is asked of it.
_PROGRAM = f"""
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
    resource.setrlimit(resource.RLIMIT_AS, ({MOST_BYTES}, {MOST_BYTES}))
except (ImportError, OSError, ValueError):
    pass
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

class Generation(Extension):
    tags = {{"generation"}}
    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_whole"), [], [], body).set_lineno(line)
    def _whole(self, caller):
        return caller()

def refuse(said):
    raise ValueError(said)

template, values = json.load(sys.stdin)
env = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
)
env.filters["tojson"] = lambda x, **how: json.dumps(x, **how)
env.globals |= {{"raise_exception": refuse, "strftime_now": str}}
user, answer = {{"role": "user", "content": "?"}}, {{"role": "assistant", "content": "!"}}
system = {{"role": "system", "content": "."}}
for messages in ([user], [system, user], [user, answer, user]):
    for asked in (True, False):
        try:
            made = env.from_string(template).render(
                messages=messages, add_generation_prompt=asked, **values
            )
        except MemoryError:
            raise
        except Exception:
            continue
        if len(made) > {MOST_CHARACTERS}:
            sys.exit({_TOO_LONG})
"""


def fault_of(template: object, values: Mapping[str, object]) -> str:
    """Why a template cannot be run here: the time, the memory or the text that it makes of a word;
    "" where nothing is known against it.

    Args:
        template: as a tokenizer has it, several by name; what is no text is not tried.
        values: special tokens, by the names that templates have for them.
    """
    templates = template.values() if isinstance(template, dict) else [template]
    asked = [json.dumps([one, dict(values)]) for one in templates if isinstance(one, str)]
    return next(filter(None, map(_fault_of, asked)), "")


@lru_cache(maxsize=16)
def _fault_of(asked: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            input=asked,
            encoding="utf-8",
            capture_output=True,
            timeout=2 * SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it takes over {SECONDS} s"
    except OSError:  # no such process can be started: nothing is known
        return ""
    if done.returncode < 0:  # killed by the limit
        return f"it takes over {SECONDS} s"
    if done.returncode == _TOO_LONG:
        return f"it makes over {MOST_CHARACTERS} characters of a word"
    return "it needs too much memory" if "MemoryError" in done.stderr else ""
