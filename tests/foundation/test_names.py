"""Which name is meant by one that is nearly right."""

import pydoc

import pytest

import kvalign
from kvalign.foundation.names import nearest

KNOWN = ["max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "cache_size", "seed"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "max_new_tokens"),
        ("max_length", "max_new_tokens"),
        ("topk", "top_k"),
        ("greedy", "do_sample"),
        ("window", "cache_size"),
        ("temprature", "temperature"),
        ("num_beams", None),
    ],
)
def test_other_programs_names_and_misspellings(name, meant):
    assert nearest(name, KNOWN) == meant


def test_a_signature_is_readable_and_names_every_setting():
    own = pydoc.plain(pydoc.render_doc(kvalign.stream)).splitlines()[2]
    assert "temperature: float = ..., top_k: int = ..., top_p" in own
    assert own.count("**config: StreamConfig)") == 1 and "ForwardRef" not in own
