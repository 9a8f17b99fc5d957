"""Credential providers: given, named, made; and what is said where that cannot be."""

from __future__ import annotations

import pytest
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.config.credentials import provider_of
from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.config.url_text import safe_url
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.store.connect import connect

HERE = "unit.config.test_credentials"


class Vault(CredentialProvider):
    def get_credentials(self):
        return ("jane", "from the vault")


def make():
    return UsernamePasswordCredentialProvider("jane", "made")


def broken():
    raise OSError("no route to the vault")


VAULT, NO_PROVIDER = Vault(), 7


@pytest.mark.parametrize(
    "value", [VAULT, Vault, make, f"{HERE}:VAULT", f"{HERE}:Vault", f"{HERE}:make", f"{HERE}.make"]
)
def test_a_provider_is_given_or_named_or_made(value):
    assert provider_of(value, "s").get_credentials()[0] == "jane"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (7, "is an int: that is an int, not a redis.CredentialProvider"),
        (f"{HERE}:NO_PROVIDER", "that is an int, not"),
        (f"{HERE}:missing", "cannot be imported"),
        ("no.such.module:name", "cannot be imported"),
        ("word", 'write "package.module:name"'),
        (f"{HERE}:", 'write "package.module:name"'),
        (broken, "no route to the vault"),
    ],
)
@pytest.mark.parametrize("how", ["option", "URL"])
def test_a_provider_that_cannot_be_used_is_refused_before_anything_is_sent(value, says, how):
    """By name of the setting, and with what to write instead: at the start of a worker."""
    if how == "URL" and not isinstance(value, str):
        return  # a URL can only name one
    given = {"singleton_lock_backend": "redis://h"}
    if how == "option":
        given["singleton_lock_backend_options"] = {"credential_provider": value}
    else:
        given["singleton_lock_backend"] += f"?credential_provider={value}"
    with pytest.raises(ConfigurationError, match="singleton_lock_backend") as refused:
        parse_settings(given.get).address()
    assert says in str(refused.value)


def test_a_password_beside_a_provider_is_refused_and_not_shown():
    given = {
        "singleton_lock_backend": "redis://:s3cret@h",
        "singleton_lock_backend_options": {"credential_provider": VAULT},
    }
    with pytest.raises(ConfigurationError, match="Leave one out") as refused:
        parse_settings(given.get).address()
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://h", {}),
        ("unix:///run/redis.sock", {}),
        ("sentinel://h", {"master_name": "m"}),
    ],
)
def test_each_connection_asks_the_provider(url, options):
    address = parse_backend_url(f"{url}?credential_provider={HERE}:VAULT")
    client = connect(address, options, patience=1.0)
    assert (
        client.connection_pool.connection_kwargs["credential_provider"].get_credentials()[0]
        == "jane"
    )
    assert "credential_provider" not in address.url
    assert "VAULT" not in safe_url(f"{url}?credential_provider={HERE}:VAULT")
