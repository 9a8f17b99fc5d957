"""Who may change locks from Flower's page, and who is named in the audit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.flower import needs_flower


@pytest.fixture
def module():
    needs_flower()
    from celery_singleton_lock.flower import operator_handler  # noqa: PLC0415  # may be missing

    return operator_handler


def handler(**options):
    given = SimpleNamespace(**{"basic_auth": None, "auth": "", **options})
    return SimpleNamespace(application=SimpleNamespace(options=given))


@pytest.mark.parametrize(
    ("options", "variable", "told"),
    [
        ({"basic_auth": ["jane:pw"]}, "", ""),
        ({"auth": ".*@example.com"}, "", ""),
        ({}, "true", ""),
        ({}, "", "This Flower has no login (--basic_auth or --auth)"),
        ({}, "false", "This Flower has no login"),
        ({"auth": ".*@example.com", "read_only": True}, "", "runs with --read_only"),
        ({"read_only": True}, "true", "runs with --read_only"),
    ],
)
def test_the_page_says_which_setting_of_flower_forbids_changes(
    module, monkeypatch, options, variable, told
):
    """Flower before 2.2 has no ``--read_only``."""
    monkeypatch.setenv("FLOWER_UNAUTHENTICATED_API", variable)
    found = module.why_no_changes(handler(**options))
    assert told in found
    assert bool(told) is bool(found)


@pytest.mark.parametrize(
    ("header", "user"),
    [("Basic amFuZTpwdw==", "jane"), ("Bearer x", ""), ("", "")],
)
def test_the_audit_names_the_user_of_a_basic_login(module, header, user):
    assert module.basic_user(header) == user
