"""Servers of `kvalign serve`, a file's own: `SERVED` are its settings, `TEMPLATE` its template."""

import functools
import ssl

import pytest
from helpers.served import serving
from helpers.tiny_models import first_layers


@pytest.fixture(scope="module", autouse=True)
def started_at_once():
    """Certificates, which no client here needs, are read once a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="module")
def loaded(request, loaded):
    """Of two layers, but where a command in the same file takes the whole model."""
    names = ("serve", "chat_edits")
    return first_layers(loaded, 2) if any(x in request.module.__name__ for x in names) else loaded


@pytest.fixture(scope="module")
def server(loaded, request):
    if template := getattr(request.module, "TEMPLATE", None):
        loaded.tokenizer.chat_template = template
    with serving(loaded, **request.module.SERVED) as one:
        yield one


@pytest.fixture
def client(server):
    with server.client() as one:
        yield one
