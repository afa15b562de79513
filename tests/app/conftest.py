"""Fixtures of several files."""

import pytest

from kvalign.models.loading import load_model


@pytest.fixture(scope="module")
def loaded():
    """The default model; a file's own, since tests change what it holds."""
    return load_model("gpt2-mini")
