"""The clients that are light enough for every run, as their authors ship them, against the whole server."""

import gc

import pytest

from bench.correctness.clients.catalog import CLIENTS
from bench.correctness.clients.checks import ServedModel
from bench.correctness.clients.one import checks_of

from .conftest import Whole

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_features(whole: Whole, client: str) -> None:
    found = list(checks_of(CLIENTS[client]).run(ServedModel(whole.url, whole.service.model)))
    assert {each.feature: each.error for each in found if each.error} == {}
    assert len(found) > 10
    gc.collect()  # clients close their connections when they go
    whole.settled()
