"""Which name is meant by one that is nearly right; names first, imports later."""

import pydoc

import pytest

import kvalign
from kvalign.aligners.kinds import KINDS
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import Registry, nearest
from kvalign.methods.registry import METHODS

KNOWN = ["max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "cache_size", "seed"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_length", "max_new_tokens"),
        ("topk", "top_k"),
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


@pytest.mark.parametrize("registry", [METHODS, KINDS], ids=lambda registry: registry.what)
def test_every_name_is_that_of_its_class(registry):
    for name, cls in registry.items():
        assert name in (getattr(cls, "name", None), getattr(cls, "kind", None))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown fruit 'aple'; did you mean apple\? \(known: "):
        Registry("fruit", {"apple": "fruits:Apple", "pear": "fruits:Pear"}).find("aple")
