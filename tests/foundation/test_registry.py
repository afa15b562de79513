"""Names first, imports later; an unknown name is answered with the nearest."""

import pytest

from kvalign.aligners.kinds import KINDS
from kvalign.foundation.errors import UserError
from kvalign.foundation.registry import Registry
from kvalign.methods.registry import METHODS


@pytest.mark.parametrize("registry", [METHODS, KINDS], ids=lambda registry: registry.what)
def test_every_name_is_that_of_its_class(registry):
    for name, cls in registry.items():
        assert name in (getattr(cls, "name", None), getattr(cls, "kind", None))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown fruit 'aple'; did you mean apple\? \(known: "):
        Registry("fruit", {"apple": "fruits:Apple", "pear": "fruits:Pear"}).find("aple")


def test_a_notebook_adds_and_removes(models):
    fruits = Registry("fruit", {})
    fruits["fig"] = Registry
    assert fruits.find("fig") is Registry and list(fruits) == ["fig"]
    del fruits["fig"]
    assert "fig" not in fruits and len(fruits) == 0
