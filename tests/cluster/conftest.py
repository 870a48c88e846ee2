"""Ports of this machine that are free, and logs as they were."""

import logging
import socket
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Takes back what a router or a replica in this process sets up for its logs."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def free_port() -> int:
    return find_port()


@pytest.fixture(scope="session")
def session_port() -> int:
    return find_port()


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
