"""What `kvalign train` says at the end compares streams of equal sinks only."""

import re

import pytest

from kvalign.app.commands.train import verdict_lines

BOTH = ("key", "value")


def judged(losses, parts, num_sinks):
    streams = [
        {"parts": list(parts), "num_sinks": n, "val_nll": nll} for (n, parts), nll in losses.items()
    ]
    plain = min((n for n, parts in losses if not parts), key=lambda n: losses[n, ()])
    without = {"num_sinks": plain, "val_nll": losses[plain, ()]}
    about = dict(cache_sizes=[32], num_labels=500, discard_half=1.0, streams=streams)
    about |= dict(parts=list(parts), num_sinks=num_sinks, without=without)
    return about | {"val_nll": losses[num_sinks, parts]}


# Used without sinks, where streaming-llm alone is best with four; not used with four: without sinks
# it gained, against a stream that nobody would take.
USED = {(0, ()): 4.0, (4, ()): 3.9, (0, BOTH): 3.0, (4, BOTH): 3.2}
NOT_USED = {(0, ()): 5.0, (4, ()): 3.0, (0, BOTH): 2.999, (4, BOTH): 3.2}


@pytest.mark.parametrize(
    ("losses", "chosen", "figures", "word"),
    [
        (USED, (BOTH, 0), ["54.6", "2.718", "20.09"], "used: 20.09 with keys"),
        (NOT_USED, ((), 4), ["20.09", "2.718", "24.53"], "not used: 24.53 with keys"),
    ],
)
def test_sinks_are_equal(losses, chosen, figures, word):
    said = "\n".join(verdict_lines(judged(losses, *chosen)))
    assert re.findall(r"\d+\.\d+", said) == figures
    assert f"{word} and values realigned" in said and {*re.findall(r"(\d) sinks", said)} == {
        str(chosen[1])
    }


def test_a_network_is_compared_with_its_own_sinks():
    """It is streamed with the usual ones alone, where the best may be of others."""
    losses = {(0, ()): 4.0, (4, ()): 3.0, (0, BOTH): 4.2}
    said = "\n".join(verdict_lines(judged(losses, (), 4)))
    assert "32 and 0 sinks: 54.6 with streaming-llm, 2.718 with discard-half of 4 sinks" in said
    assert "not used: 66.69 with keys and values realigned is no better" in said
    assert said.endswith("equals streaming-llm with 4 sinks")
