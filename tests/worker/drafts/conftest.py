"""The model of the tests of drafts."""

from pathlib import Path

import pytest

from tests.conftest import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokens are bytes."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
