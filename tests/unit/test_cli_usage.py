"""What ``celery-singleton-lock`` says of a URL or an option that it cannot use: asks nobody."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli import main

NOBODY = "redis://localhost:1/0"
SENTINEL = "sentinel://localhost:1"


def said(url, *options):
    """What is said of wrong usage, which is told by the exit status."""
    given = [each for option in options for each in ("--option", option)]
    ran = CliRunner().invoke(main, ["--backend", url, *given, "list"])
    assert ran.exit_code == 2, ran.output
    return ran.output.partition("Error: ")[2]


@pytest.mark.parametrize(
    ("url", "option", "says"),
    [
        (NOBODY, "socket_timeout=abc", "--option socket_timeout is 'abc': it must be a number"),
        (NOBODY, "socket_timout=1", "--option has 'socket_timout', which redis-py does not take"),
        (NOBODY, "master_name=m", "--option has 'master_name', which has no effect"),
        (SENTINEL, "master_nam=m", "did you mean 'master_name'?"),
        (SENTINEL, "client_name=me", "Give --option master_name=mymaster"),
        ("redis://localhost:17x/0", "client_name=me", "--backend is 'redis://***': its port is"),
        ("amqp://localhost", "client_name=me", "--backend is 'amqp://localhost': locks live in"),
    ],
)
def test_what_cannot_be_used_is_wrong_usage_of_an_option_of_the_command_line(url, option, says):
    """Settings have other names, which nobody wrote here."""
    told = said(url, option)
    assert says in told
    assert "singleton_lock_" not in told


def test_options_for_sentinels_may_be_json():
    """A slip in them is named."""
    told = said(SENTINEL, "master_name=m", 'sentinel_kwargs={"pasword": "s3cret"}')
    assert told.startswith("--option sentinel_kwargs has 'pasword'")
    assert "Did you mean 'password'?" in told
    assert "s3cret" not in told


def test_a_number_on_the_command_line_is_read_as_one():
    """The client takes it, and asks a server that is not there."""
    ran = CliRunner().invoke(main, ["--backend", NOBODY, "--option", "socket_timeout=1", "list"])
    assert ran.exit_code == 3
    assert "did not answer (ConnectionError: Connection refused)" in ran.output
