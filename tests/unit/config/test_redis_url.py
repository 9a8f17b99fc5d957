"""URLs: what is taken from which part, and which brokers are one."""

from __future__ import annotations

import pytest

from celery_singleton_lock.config.redis_url import BackendAddress, parse_backend_url
from celery_singleton_lock.config.url_text import realm_of, scheme_of
from celery_singleton_lock.errors import ConfigurationError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (
            "redis://h?username=u&password=p",
            BackendAddress(host="h", username="u", password="p"),
        ),
        (
            "redis://v:q@h?username=u&password=p",
            BackendAddress(host="h", username="u", password="p"),
        ),
        ("redis://h?client_name=", BackendAddress(host="h", options={"client_name": ""})),
        (
            "redis://h?client_name=CERT_Mine",
            BackendAddress(host="h", options={"client_name": "CERT_Mine"}),
        ),
        (
            "rediss://h?ssl_cert_reqs=CERT_REQUIRED",
            BackendAddress("rediss", "h", options={"ssl_cert_reqs": "required"}),
        ),
        (
            "unix:///s?db=3&client_name=me",
            BackendAddress("unix", "", 0, "/s", 3, options={"client_name": "me"}),
        ),
        ("unix:///X", BackendAddress("unix", "", 0, "/X")),
        ("redis://h/2147483647", BackendAddress(host="h", db=2147483647)),
    ],
)
def test_each_part_of_a_url_has_its_meaning(url, address):
    """Behind the ? as well; what stands there counts more."""
    assert parse_backend_url(url) == address


@pytest.mark.parametrize(
    "url", ["unix:///s?db=x", "redis://h/X", "redis://h/X1X", "redis://h?db=-1"]
)
def test_a_database_that_is_no_number_is_refused_by_its_setting(url):
    """The error says which setting, wherever in the URL the number stood."""
    with pytest.raises(ConfigurationError, match=r"^broker_url is .*the database is not a number"):
        parse_backend_url(url, "broker_url")


@pytest.mark.parametrize(
    "url",
    [
        "redis://a:6379,b:6379/0",
        "redis://a:6379;b:6379",
        "redis://a,b",
        "rediss://user:pass,word@a:1,[::1]:2,c?db=1",
        "redis://a:6379/0,redis://b:6379/0",
    ],
)
def test_the_error_of_several_servers_in_one_url_says_how_to_write_them(url):
    """A Cluster, Sentinels, a quorum; and what may be a password is not shown."""
    with pytest.raises(ConfigurationError, match="it names several servers") as caught:
        parse_backend_url(url)
    said = str(caught.value)
    for way in ("redis+cluster://", "sentinel://host1:26379;sentinel://", "list of three or more"):
        assert way in said
    assert "pass" not in said


@pytest.mark.parametrize("url", ["redis://:s3,cret@a:6379/0", "redis://u:a:1,b:2@h", "unix:///a,b"])
def test_a_comma_in_a_password_or_a_path_is_one(url):
    """Or a semicolon."""
    parse_backend_url(url)
    parse_backend_url(url.replace(",", ";"))


@pytest.mark.parametrize("url", ["unix:///", "unix://", "unix://host/s"])
def test_a_socket_needs_a_path_and_no_host(url):
    """What redis-py would make of it is another server."""
    with pytest.raises(ConfigurationError, match="a socket has a path and no host"):
        parse_backend_url(url)


def test_several_servers_are_refused_whole_and_without_passwords():
    """The shown list is all that was given."""
    with pytest.raises(ConfigurationError) as caught:
        parse_backend_url("redis://:s3cret@a;redis://:s3cret@b", "broker_url")
    assert str(caught.value).startswith("broker_url is 'redis://***@a;redis://***@b': ")


def test_the_realm_of_a_broker_is_the_same_in_every_version():
    """It is part of keys: a worker of the next version must find what this one has parked."""
    assert realm_of("redis://h") == "65c484631093"
    assert realm_of("redis://h", {"visibility_timeout": 1}) == realm_of("redis://h")
    assert realm_of("amqp://u:p@h:5672//") == "398375849e92"
    assert realm_of(["sentinel://a", "sentinel://b:1/2"], {"master_name": "mine"}) == "366278ee8112"
    assert realm_of("sqs://h/x") == "83544446fbb3"
    assert realm_of("redis+socket:///s?virtual_host=1") == "5d1d5064785b"
    assert realm_of("redis+socket:///s?db=1") == "5d1d5064785b"
    assert realm_of("redis://\ud800") == "3acb3fbfd7c7"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("amqp://h", "amqp://h/X"),
        ("redis+socket:///s?db=1", "redis+socket:///s?db=2"),
        ("sqs://h", "sqs://i"),
        ("redis://h/1", "redis://h/2?x=y"),
    ],
)
def test_brokers_that_differ_in_what_matters_are_two(one, other):
    """Host, port, database or virtual host."""
    assert realm_of(one) != realm_of(other)


def test_of_a_brokers_options_only_those_count_that_name_the_database():
    """Whatever looks like an address in the others."""
    assert realm_of("redis://h?db=1&x=redis://y/2") == realm_of("redis://h/1")


def test_of_sentinels_the_masters_name_counts_as_well():
    """They may watch several."""
    names = ("", "mine", "yours")
    assert len({realm_of("sentinel://a", {"master_name": name}) for name in names}) == 3


@pytest.mark.parametrize("option", ["global_keyprefix", "queue_name_prefix"])
def test_a_prefix_of_all_queues_makes_another_broker(option):
    """Of Redis, and of SQS and others: queues of one name are two queues."""
    realms = {realm_of("redis://h", {option: prefix}) for prefix in ("", "staging:", "prod:")}
    assert len(realms) == 3
    assert realm_of("redis://h") in realms


def test_an_address_without_a_scheme_has_none():
    """An empty text, not a guess."""
    assert (scheme_of("host:6379"), scheme_of("REDIS://h")) == ("", "redis")
