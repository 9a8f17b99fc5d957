"""Fixtures of the tests that play histories."""

from __future__ import annotations

import pytest

TIMEOUT = 600
"""Seconds after which such a test counts as hanging. A busy machine delays it."""


def pytest_collection_modifyitems(items):
    """Give the tests of this folder that time, unless they have their own."""
    for item in items:
        if "property" in item.keywords and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture
def redis_client(redis_client):
    """The shared server, which a history that ended badly may have left full."""
    yield redis_client
    redis_client.config_set("maxmemory", 0)
