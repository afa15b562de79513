"""The threat model names all who have a part, and nothing that is not there."""

import re
from pathlib import Path

from kvalign.app.commands.serve import ServeSettings
from kvalign.streaming import turns

TEXT = (Path(__file__).parents[2] / "SECURITY.md").read_text()


def test_the_threat_model_says_who_is_trusted_with_what():
    model = TEXT.partition("## Threat model")[2].partition("\n## ")[0]
    assert model and model.count("\n") <= 60
    for who in ("Folders of models", "Files of streams", "Prompts, messages", "Clients"):
        assert f"**{who}" in model
    assert model.count("Promised: ") >= 3 and model.count("Not promised: ") >= 2
    flags = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert flags and flags <= ServeSettings.flags()
    assert f"{turns.SECONDS} s and {turns.MOST_BYTES >> 30} GB" in model
