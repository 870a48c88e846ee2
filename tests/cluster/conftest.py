"""Ports of this machine that are free."""

import socket

import pytest


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
