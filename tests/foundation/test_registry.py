"""Names first, imports later; an unknown name is answered with the nearest."""

import pytest

from kvalign.aligners.kinds import KINDS
from kvalign.foundation.errors import UserError
from kvalign.foundation.registry import Registry
from kvalign.methods.registry import METHODS
from kvalign.policies import POLICIES


@pytest.mark.parametrize("registry", [METHODS, KINDS], ids=lambda registry: registry.what)
def test_every_name_is_that_of_its_class(registry):
    for name, cls in registry.items():
        assert name in (getattr(cls, "name", None), getattr(cls, "kind", None))


@pytest.mark.parametrize("registry", [METHODS, POLICIES], ids=lambda registry: registry.what)
def test_what_a_class_is_about_is_read_without_importing_it(registry):
    places = {name: f"{cls.__module__}:{cls.__name__}" for name, cls in registry.items()}
    unread = Registry(registry.what, places)
    assert all(unread.about(name) == cls.about for name, cls in registry.items())
    assert unread.data == places
    assert [*map(registry.about, registry)] == [cls.about for cls in registry.values()]


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown fruit 'aple'; did you mean apple\? \(known: "):
        Registry("fruit", {"apple": "fruits:Apple", "pear": "fruits:Pear"}).find("aple")


def test_a_notebook_adds_and_removes(models):
    fruits = Registry("fruit", {})
    fruits["fig"] = Registry
    assert fruits.find("fig") is Registry and list(fruits) == ["fig"]
    del fruits["fig"]
    assert "fig" not in fruits and len(fruits) == 0
