"""The doctor says what is missing or wrong and what to do, and fails only for what is required."""

import json
from importlib import metadata

from packaging.requirements import Requirement

from kvalign.app.cli.main import main
from kvalign.app.commands.doctor import how_to_install, requirements

EXTRAS = {extra for extra, _ in requirements() if extra}


def install(monkeypatch, versions):
    """Let packages be of these versions, None: not installed."""
    known = metadata.version

    def version(name):
        found = versions[name] if name in versions else known(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


def states(capsys, code=0):
    """The state and the words of each thing."""
    assert main(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["fit"] == (code == 0)
    return {check["name"]: (check["state"], check["about"]) for check in document["checks"]}


def test_packages_are_those_of_the_metadata(capsys):
    required = [Requirement(x) for x in metadata.requires("kvalign") if "extra ==" not in x]
    found = states(capsys)
    ours = {"kvalign", "python", "cpu", "kernel", "cuda"}
    assert found.keys() == {x.name for x in required} | ours | {f"kvalign[{x}]" for x in EXTRAS}
    assert all(found[x.name][0] == "ok" for x in required)
    assert how_to_install("nltk") == "pip install 'kvalign[eval]'"
    assert main(["doctor"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[found[x][0], x] for x in found]
    assert last == "everything required is here"


def test_an_extra_is_missing_and_what_is_required_is_wrong(monkeypatch, capsys):
    install(monkeypatch, {"nltk": None})
    state, about = states(capsys)["kvalign[eval]"]
    assert state == "missing" and "nltk" in about and "pip install 'kvalign[eval]'" in about
    (needed,) = (needed for _, needed in requirements() if needed.name == "transformers")
    bounds = {limit.operator: limit.version for limit in needed.specifier}
    for version, is_ok in {bounds[">="]: True, "4.57.1": False, bounds["<"]: False}.items():
        install(monkeypatch, {"transformers": version})
        state, about = states(capsys, int(not is_ok))["transformers"]
        assert state == ("ok" if is_ok else "wrong")
        assert is_ok or f"pip install '{needed}'" in about
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "wrong: transformers"
