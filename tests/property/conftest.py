"""Fixtures of the tests that play histories."""

from __future__ import annotations

import pytest


@pytest.fixture
def redis_client(redis_client):
    """The shared server, which a history that ended badly may have left full."""
    yield redis_client
    redis_client.config_set("maxmemory", 0)
