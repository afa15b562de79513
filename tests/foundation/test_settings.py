"""Settings: from keywords and from the command line alike."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import Settings, keywords_of, option


@dataclass(frozen=True, kw_only=True)
class BakeSettings(Settings):
    out: Path = option(help="where it goes", writes="folder")
    photo: Path | None = option(None, help="of the loaves", writes="file")
    sizes: tuple[int, ...] = option((1, 2), help="of each loaf", at_least=1)
    kind: str = option("rye", help="of flour", choices=("rye", "wheat"))


@keywords_of(BakeSettings)
def bake(settings: BakeSettings, *, oven: str = "hot") -> tuple[BakeSettings, str]:
    """Bake loaves."""
    return settings, oven


def test_keywords_make_the_settings():
    expected = BakeSettings(out=Path("loaf"), sizes=(3,))
    assert bake(out="loaf", sizes=[3]) == (expected, "hot")
    assert bake(out="loaf", sizes=3, oven="cold") == (expected, "cold")
    assert bake(expected) == (expected, "hot")


def test_signature_and_help_name_every_field():
    parameters = inspect.signature(bake).parameters
    assert list(parameters) == ["out", "photo", "sizes", "kind", "oven"]
    assert parameters["out"].default is inspect.Parameter.empty
    assert parameters["sizes"].default == (1, 2)
    assert inspect.getdoc(bake).startswith("Bake loaves.") and "kind: of flour" in bake.__doc__


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(out="x", sizes=[0]), "--sizes must be at least 1, got 0"),
        (dict(out="x", sizes=[]), "--sizes needs at least one value"),
        (dict(out="x", kind="oat"), "--kind must be one of rye, wheat, got 'oat'"),
    ],
)
def test_values_out_of_range_are_refused(keywords, message):
    with pytest.raises(UserError, match=message):
        bake(**keywords)


def test_what_cannot_be_written_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loaf").write_text("")
    with pytest.raises(UserError, match="--out loaf cannot be written: .*loaf is a file"):
        bake(out="loaf")
    with pytest.raises(UserError, match=r"--photo loaf/a.png cannot be written: .*loaf is a file"):
        bake(out="new", photo="loaf/a.png")
    with pytest.raises(UserError, match=r"--photo \. is a folder: name a file in it"):
        bake(out="new", photo=".")
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=PermissionError))
    with pytest.raises(UserError, match="--out new/er cannot be written: .* not writable for you"):
        bake(out="new/er")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    bake(out="new/er", photo="new/photos/a.png")
    assert not Path("new").exists()


def test_the_command_line_that_makes_them():
    settings = BakeSettings(out=Path("a loaf"), sizes=(3, 4))
    assert settings.command_line("bake") == "kvalign bake --out 'a loaf' --sizes 3,4"
