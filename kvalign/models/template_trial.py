"""Trial of chat templates. A template is a program from outside. It is tried once, in its own
process with little time and memory, before it runs in this process, where nothing could stop
9^(9^9).
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache

SECONDS, MOST_BYTES, MOST_CHARACTERS = 3, 1 << 30, 10**6
_REFUSED = 3  # an exit code

# A template that fails there fails in time, which is all that is asked of it.
_PROGRAM = f"""
import json, sys, time
from transformers.utils.chat_template_utils import render_jinja_template

try:
    import resource
    seconds = int(time.process_time()) + 1 + {SECONDS}
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, ({MOST_BYTES}, {MOST_BYTES}))
except (ImportError, OSError, ValueError):
    pass

template, values = json.load(sys.stdin)
system, user, answer, result = (
    dict(role=r, content="?") for r in ("system", "user", "assistant", "tool")
)
tool = dict(type="function", function=dict(name="f", description="?", parameters={{}}))
call = dict(type="function", function=dict(name="f", arguments={{}}))
calls = dict(role="assistant", content="", tool_calls=[call])
talks = ([user], [system, user], [user, answer, user])
of_tools = ([user], [system, user], [user, calls, result])
for messages, tools in [*((one, None) for one in talks), *((one, [tool]) for one in of_tools)]:
    for to_answer in (True, False):
        try:
            (text,), _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=to_answer,
                **values,
            )
        except MemoryError:
            sys.exit({_REFUSED})
        except Exception:
            continue
        if len(text) > {MOST_CHARACTERS}:
            sys.exit({_REFUSED})
"""


def fault_of(template: object, values: Mapping[str, object]) -> str:
    """Reason not to run a template here: its time, its memory or the length of its output; "" if
    there is none.

    Args:
        template: as a tokenizer has it, several by name; anything but text is ignored.
        values: special tokens, by their names in templates.
    """
    templates = template.values() if isinstance(template, dict) else [template]
    requests = [json.dumps([one, dict(values)]) for one in templates if isinstance(one, str)]
    if all(map(_is_small, requests)):
        return ""
    most = f"{SECONDS} s, {MOST_BYTES >> 30} GB or {MOST_CHARACTERS} characters"
    return f"it needs over {most} for a word"


@lru_cache(maxsize=16)
def _is_small(request: str) -> bool:
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            input=request,
            encoding="utf-8",
            capture_output=True,
            timeout=20 * SECONDS,  # of a clock: a busy machine is slow, and loading takes its time
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # NumPy takes memory for each
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError:  # no such process can be started: nothing is known
        return True
    return 0 <= process.returncode != _REFUSED  # below: killed by a limit
