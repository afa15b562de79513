"""Servers of `kvalign serve`, a file's own: `SERVED` are its settings, `TEMPLATE` its template."""

import pytest
from helpers.served import serving


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
