"""The client for the locks' Redis: options from the URL, from the user, and our own."""

from __future__ import annotations

import pytest
import redis
from redis.sentinel import SentinelConnectionPool

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.store.connect import connect, for_cluster, for_sentinels


def told(url, options=None, patience=0.5):
    """The options of each connection to the server, or to the master."""
    client = connect(parse_backend_url(url), options or {}, patience=patience)
    return client.connection_pool.connection_kwargs


def test_a_server_has_as_long_to_answer_as_we_are_patient():
    """To connect as well."""
    options = told("redis://h/2", patience=0.7)
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.7, 0.7)
    assert (options["host"], options["port"], options["db"]) == ("h", 6379, 2)


def test_a_connection_that_was_closed_is_tried_once_more_at_once():
    """Without a pause, and for a lost connection only: a time-out has cost the patience already."""
    retry = told("redis://h")["retry"]
    calls = []

    def fail(error):
        calls.append(error)
        raise error

    for error, tries in ((redis.ConnectionError("gone"), 2), (redis.TimeoutError("late"), 1)):
        calls.clear()
        with pytest.raises(type(error)):
            retry.call_with_retry(lambda error=error: fail(error), lambda _error: None)
        assert len(calls) == tries


def test_user_options_override_defaults_and_library_options_are_not_passed_on():
    """``allow_eviction`` is no option of redis-py, nor are those that speak of Sentinels."""
    given = {"socket_timeout": 9, "allow_eviction": True, "master_name": "m", "sentinel_kwargs": {}}
    options = told("redis://u:p@h", {**given, "min_other_sentinels": 1, "client_name": "me"})
    assert (options["socket_timeout"], options["client_name"]) == (9, "me")
    assert (options["username"], options["password"]) == ("u", "p")
    assert not {"allow_eviction", "master_name", "sentinel_kwargs", "min_other_sentinels"} & {
        *options
    }


@pytest.mark.parametrize("scheme", ["redis", "sentinel", "redis+cluster"])
def test_decode_responses_does_not_destroy_parked_messages_that_are_no_text(scheme):
    """The reply with such a message could not be read: it was lost, and granted again for ever."""
    address = parse_backend_url(f"{scheme}://h:1")
    options = {"decode_responses": True, "encoding": "utf-16", "encoding_errors": "ignore"}
    if scheme == "redis+cluster":
        made = for_cluster(address, options, patience=1.0).__closure__
        given = next(cell.cell_contents for cell in made if isinstance(cell.cell_contents, dict))
    else:
        client = connect(address, {**options, "master_name": "m"}, patience=1.0)
        given = client.connection_pool.connection_kwargs
    assert not given.get("decode_responses")
    assert given.get("encoding", "utf-8") == "utf-8"


SENTINELS = "sentinel://u:p@a:1/3;sentinel://b:2;sentinel://c"


def master(options=None, url=SENTINELS, patience=0.6):
    client = connect(
        parse_backend_url(url), {"master_name": "mine", **(options or {})}, patience=patience
    )
    assert isinstance(client.connection_pool, SentinelConnectionPool)
    return client.connection_pool


def test_sentinels_resolve_the_master_by_name_and_the_url_options_apply_to_the_master():
    """User, password and database are the master's, the addresses the Sentinels'."""
    pool = master({"min_other_sentinels": "2", "client_name": "me"})
    assert pool.service_name == "mine"
    options = pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("u", "p", 3)
    assert (options["socket_timeout"], options["client_name"]) == (0.6, "me")
    assert "master_name" not in options
    manager = pool.sentinel_manager
    assert manager.min_other_sentinels == 2
    asked = [each.connection_pool.connection_kwargs for each in manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 1), ("b", 2), ("c", 26379)]
    assert [each["socket_timeout"] for each in asked] == [pytest.approx(0.2)] * 3
    assert master().sentinel_manager.min_other_sentinels == 0


def test_the_connections_end_with_their_client():
    """Nobody else has them."""
    client = connect(parse_backend_url(SENTINELS), {"master_name": "m"}, patience=0.5)
    assert client.auto_close_connection_pool is True


def test_what_a_sentinel_url_does_not_say_is_left_to_redis_py():
    """No user, no password and database 0 are nothing said."""
    options = master(url="sentinel://a").connection_kwargs
    assert not {"username", "password", "db", "ssl"} & {*options}


def test_options_behind_a_sentinel_url_are_read_as_redis_py_reads_a_servers():
    """Numbers are numbers, and one option of TLS switches it on."""
    options = master(url="sentinel://a?socket_timeout=7&ssl_cert_reqs=CERT_NONE").connection_kwargs
    assert options["socket_timeout"] == 7.0
    assert options["ssl_cert_reqs"] == "none"
    assert options.get("ssl", True) is True
    secure = master(url="sentinel://a?ssl_cert_reqs=none").connection_class
    assert issubclass(secure, redis.SSLConnection)


def test_all_sentinels_together_get_the_time_of_one_server_and_are_asked_once():
    """A dead one must not use up the patience; 0.1 s is the least that each gets."""
    two = parse_backend_url("sentinel://a;sentinel://b")
    options = for_sentinels(two, {}, 0.5)
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.25, 0.25)
    calls = []

    def fail():
        calls.append(1)
        raise redis.ConnectionError

    with pytest.raises(redis.ConnectionError):
        options["retry"].call_with_retry(fail, lambda _error: None)
    assert len(calls) == 1
    assert for_sentinels(two, {}, 0.1)["socket_timeout"] == 0.1


def test_the_users_options_for_sentinels_count_more():
    """Such as their password; None is none."""
    one = parse_backend_url("sentinel://a")
    options = for_sentinels(one, {"sentinel_kwargs": {"password": "s", "socket_timeout": 3}}, 0.5)
    assert (options["password"], options["socket_timeout"]) == ("s", 3)
    assert for_sentinels(one, {"sentinel_kwargs": None}, 0.5)["socket_timeout"] == 0.5


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://h", {"socket_timout": 1}),
        ("rediss://h", {"socket_timout": 1}),
        ("unix:///run/redis.sock", {"socket_timout": 1}),
        ("sentinel://h", {"socket_timout": 1, "master_name": "m"}),
    ],
)
def test_an_option_that_no_connection_takes_is_refused_before_one_is_made(url, options):
    """redis-py would raise a TypeError with the first command."""
    with pytest.raises(
        ConfigurationError, match=r"options has 'socket_timout', .*Did you mean 'socket_timeout'\?"
    ):
        connect(parse_backend_url(url), options, patience=0.5)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://h?ssl_cert_reqs=none", {}),
        ("redis://h", {"ssl_cert_reqs": "none"}),
        ("redis://h", {"ssl": True}),
        ("rediss://h", {"ssl": True}),
    ],
)
def test_an_option_of_tls_without_tls_says_what_the_url_must_be(url, options):
    with pytest.raises(ConfigurationError, match=r"has 'ssl\w*', .*for TLS write rediss://\.$"):
        connect(parse_backend_url(url), options, patience=0.5)


def test_an_option_that_no_client_of_a_cluster_takes_is_refused():
    """redis-py would let it pass, without effect, and nobody would learn of it."""
    address = parse_backend_url("redis+cluster://h")
    with pytest.raises(
        ConfigurationError, match=r"options has 'socket_timout', .*Did you mean 'socket_timeout'\?"
    ):
        for_cluster(address, {"socket_timout": 1}, patience=0.5)


def test_what_a_client_of_a_cluster_takes_is_let_pass():
    """Its own options and those of its connections; none is asked for a layout yet."""
    given = {"client_name": "me", "ssl_ca_certs": "ca.pem", "reinitialize_steps": 5}
    for_cluster(parse_backend_url("rediss+cluster://u:p@h:1,i"), given, patience=0.5)


def test_an_option_that_no_connection_to_a_sentinel_takes_is_refused():
    """With the option that holds it."""
    with pytest.raises(ConfigurationError) as caught:
        master({"sentinel_kwargs": {"pasword": "x"}})
    assert str(caught.value) == (
        "singleton_lock_backend_options[\"sentinel_kwargs\"] has 'pasword', which redis-py does "
        "not take. Did you mean 'password'?"
    )


def test_numbers_and_switches_may_be_given_as_text():
    """As a command line and an environment give them."""
    given = {"socket_timeout": "1.5", "health_check_interval": "3", "socket_keepalive": "no"}
    options = told("redis://h", {**given, "max_connections": "7", "socket_connect_timeout": None})
    assert options["socket_timeout"] == 1.5
    assert options["health_check_interval"] == 3
    assert options["socket_keepalive"] is False
    assert options["socket_connect_timeout"] is None
    kwargs = '{"password": "p", "socket_timeout": "2"}'
    asked = master({"sentinel_kwargs": kwargs, "min_other_sentinels": "1"}).sentinel_manager
    about = asked.sentinels[0].connection_pool.connection_kwargs
    assert (asked.min_other_sentinels, about["password"], about["socket_timeout"]) == (1, "p", 2)


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("socket_timeout", "abc", "'abc': it must be a number of seconds, more than 0, or None"),
        ("socket_timeout", 0, "0: it must be a number of seconds"),
        ("socket_connect_timeout", True, "True: it must be a number of seconds"),
        ("health_check_interval", [], "a list: it must be a number of seconds, 0 for never"),
        ("max_connections", 1.5, "1.5: it must be a whole number"),
        ("min_other_sentinels", "two", "'two': it must be a whole number"),
        ("socket_keepalive", "perhaps", "'perhaps': it must be True or False"),
        ("sentinel_kwargs", "s3cret", "a str: it must be a dict of options, or JSON of one"),
    ],
)
def test_an_option_that_is_no_number_is_refused_before_a_connection_is_made(name, value, takes):
    """Where the settings are read, and by who makes a client without them."""
    with pytest.raises(ConfigurationError) as caught:
        connect(parse_backend_url("redis://h"), {name: value}, patience=0.5)
    said = f'singleton_lock_backend_options["{name}"] is {takes}'
    assert str(caught.value).startswith(said)
    given = {"singleton_lock_backend_options": {name: value}}
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(given.get)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis+cluster://h", ["redis://a", "redis://b", "redis://c"]]
)
def test_sentinel_options_with_another_kind_of_url_give_a_warning(url):
    """Who wrote them may believe that a failover is followed."""
    given = {
        "singleton_lock_backend": url,
        "singleton_lock_backend_options": {"master_name": "m"},
    }
    with pytest.warns(ConfigurationWarning, match="'master_name', which has no effect"):
        parse_settings(given.get)


def test_a_slip_in_the_name_of_the_master_option_is_named():
    """It stands beside the words that one is missing."""
    given = {
        "singleton_lock_backend": "sentinel://a",
        "singleton_lock_backend_options": {"master_nam": "m"},
    }
    settings = parse_settings(given.get)
    with pytest.raises(
        ConfigurationError, match="options has 'master_nam': did you mean 'master_name'"
    ):
        settings.address()


def test_a_misspelt_tls_option_of_a_url_is_refused_with_its_place():
    """redis-py raises an error of its own for a value, and of Python for a name."""
    with pytest.raises(ConfigurationError, match=r"^The URL of the locks' Redis has .*requird"):
        told("rediss://h?ssl_cert_reqs=requird")
    with pytest.raises(ConfigurationError, match=r"^The URL .*Did you mean 'ssl_ca_certs'\?"):
        told("rediss://h?ssl_ca_cert=ca.pem")
    with pytest.raises(ConfigurationError, match=r"^singleton_lock_backend_options has .*requird"):
        told("rediss://h", {"ssl_cert_reqs": "requird"})
