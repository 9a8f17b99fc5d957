"""A key of ``@locked`` or ``@cache_locked`` that is valid, and probably not what was meant."""

from __future__ import annotations

import warnings

import pytest

from celery_singleton_lock import locked
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.django import cache_locked
from celery_singleton_lock.testing import memory_client


def test_the_name_of_an_argument_without_braces_is_told():
    """All calls shared one lock."""
    told = r"report: the key is 'month', the same text for all calls.* write \"month:{month}\"; if"
    with pytest.warns(ConfigurationWarning, match=told) as warned:

        @locked("month", memory_client())
        def report(month): ...

    assert [each.filename for each in warned] == [__file__]


def test_other_keys_are_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigurationWarning)
        for key in ("report", "month:{month}", None, lambda month: "month"):

            @locked(key, memory_client())
            def report(month): ...


def test_the_name_of_an_argument_without_braces_is_told_for_a_cache():
    """All calls shared one lock."""
    with pytest.warns(ConfigurationWarning, match='write "month:{month}"') as warned:

        @cache_locked("month", cache="memory")
        def report(month): ...

    assert [each.filename for each in warned] == [__file__]
