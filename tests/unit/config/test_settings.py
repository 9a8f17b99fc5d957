# the number of a trap is part of its test's name
"""Settings of an app and options of a task."""

from __future__ import annotations

import dataclasses
import decimal
import warnings

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.redis_url import BackendAddress, parse_backend_url
from celery_singleton_lock.config.settings import LockOptions, Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.config.unknown_names import check_unknown, check_unknown_settings
from celery_singleton_lock.config.url_text import realm_of, safe_url
from celery_singleton_lock.errors import ConfigurationError


def parsed(conf=None, **values):
    conf = {**(conf or {}), **{f"singleton_lock_{name}": value for name, value in values.items()}}
    return parse_settings(conf.get)


def resolved(settings=None, **attributes):
    return resolve_options("shop.settle", attributes, settings or Settings())


# --- defaults -------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_table_in_the_docs():
    """An app that says nothing gets a lock that parks, for 30 seconds, and enforces."""
    settings = parsed()
    assert dataclasses.replace(settings, backend_source="", backend_options={}) == Settings()
    assert (settings.lease, settings.on_conflict, settings.wait_timeout) == (30.0, "park", None)
    assert (settings.max_waiting, settings.on_full, settings.on_retry) == (None, "fail", "release")
    assert (settings.on_lost, settings.on_backend_error) == ("report", "retry")
    assert (settings.prefix, settings.eager, settings.mode) == ("csl", False, "enforce")
    assert resolved(settings) == LockOptions()


def test_a_task_overrides_the_settings_and_leaves_the_rest_to_them():
    """None is a value: it waits for ever, whatever the settings say."""
    settings = parsed(lease=60, wait_timeout=10, max_waiting=5, on_full="skip")
    options = resolved(settings, lock_lease=5, lock_wait_timeout=None, lock_limit=3)
    assert options == LockOptions(
        lease=5.0, limit=3, wait_timeout=None, max_waiting=5, on_full="skip"
    )


def test_attributes_of_other_kinds_are_left_to_others():
    """The lock's name is no business of the options, nor is what does not begin with lock_."""
    assert resolved(lock_key="a:{b}", lock_args=None, name="x") == LockOptions()


def test_values_are_frozen():
    """Nobody changes settings after they were checked."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed().lease = 5
    with pytest.raises(TypeError):
        parsed(backend_options={"a": 1}).backend_options["a"] = 2


# --- values ---------------------------------------------------------------------------------------

NOT_A_DURATION = [
    0,
    0.0,
    -1,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e300,
    10**400,
    True,
    False,
    "30",
    b"30",
    decimal.Decimal(30),
    [30],
]


@pytest.mark.parametrize("value", [*NOT_A_DURATION, None, 0.999, 86_400 * 7 + 1], ids=repr)
def test_L24_a_lease_that_is_no_lease_is_refused(value):
    """0, negative, NaN, infinite, huge, bool, text, None: never a sentinel, always an error."""
    with pytest.raises(ConfigurationError, match=r"task shop.settle: lock_lease is "):
        resolved(lock_lease=value)
    with pytest.raises(ConfigurationError, match=r"^singleton_lock_lease is "):
        parsed(lease=value)


@pytest.mark.parametrize("value", NOT_A_DURATION, ids=repr)
def test_L24_a_wait_that_is_no_wait_is_refused(value):
    """Only None is no limit."""
    with pytest.raises(ConfigurationError, match=r"task shop.settle: lock_wait_timeout is "):
        resolved(lock_wait_timeout=value)


def test_L24_the_error_says_what_the_watchdog_needs():
    """Below a second there is no time to try a renewal again."""
    with pytest.raises(ConfigurationError, match=r"is 0\.5: a lease below 1 s cannot be renewed"):
        resolved(lock_lease=0.5)
    assert resolved(lock_lease=1).lease == 1.0


def test_a_long_lease_gives_a_warning_with_the_reason():
    """Once, where it is declared: the lease is renewed, so it need not be long."""
    with pytest.warns(
        ConfigurationWarning, match="task shop.settle: lock_lease is 301 s: .*renewed"
    ):
        assert resolved(lock_lease=301).lease == 301.0
    with pytest.warns(ConfigurationWarning, match="singleton_lock_lease is 3600"):
        settings = parsed(lease=3600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolved(settings).lease == 3600.0
        assert resolved(lock_lease=300).lease == 300.0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("lock_limit", value) for value in (0, -1, True, 1.0, "1", 2**31)),
        *(("lock_max_waiting", value) for value in (-1, True, 1.0, "1", 2**31, float("inf"))),
    ],
    ids=repr,
)
def test_counts_are_whole_numbers(option, value):
    """A bool is none, and neither is 1.0."""
    with pytest.raises(ConfigurationError, match=f"task shop.settle: {option} is "):
        resolved(**{option: value})


def test_a_bound_of_no_waiters_is_valid():
    """lock_max_waiting=0."""
    assert resolved(lock_max_waiting=0).max_waiting == 0


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"lock_on_conflict": "wait"}, "Add lock_wait_timeout=60"),
        ({"lock_on_conflict": "wait", "lock_wait_timeout": None}, "Add lock_wait_timeout=60"),
        ({"lock_on_full": "replace", "lock_max_waiting": 0}, "Use 1"),
        (
            {
                "lock_on_conflict": "wait",
                "lock_wait_timeout": 5,
                "lock_on_full": "replace",
                "lock_max_waiting": 1,
            },
            'Use "skip"',
        ),
        (
            {
                "lock_on_conflict": "requeue",
                "lock_requeue_delay": 5,
                "lock_requeue_max": 2,
            },
            r"longer than lock_requeue_max \(2\)",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, remedy):
    """With what to write instead."""
    with pytest.raises(ConfigurationError, match=remedy):
        resolved(**options)


def test_the_deadline_of_a_wait_may_come_from_the_settings():
    """So a declaration alone is not refused before they are known; None, declared, is."""
    settings = parsed(wait_timeout=5)
    assert resolved(settings, lock_on_conflict="wait").wait_timeout == 5.0
    resolve_options("shop.settle", {"lock_on_conflict": "wait"}, None)
    with pytest.raises(ConfigurationError, match="lock_wait_timeout"):
        resolve_options(
            "shop.settle", {"lock_on_conflict": "wait", "lock_wait_timeout": None}, None
        )


@pytest.mark.parametrize(
    "options",
    [
        {"lock_requeue_delay": 2},
        {"lock_on_conflict": "skip", "lock_requeue_max": 2},
        {"lock_on_conflict": "requeue", "lock_max_waiting": 2},
    ],
)
def test_options_of_another_policy_are_warned_of(options):
    """They are accepted, and do nothing."""
    with pytest.warns(ConfigurationWarning, match="has no effect"):
        resolved(**options)


@pytest.mark.parametrize("mode", ["enforce", "observe", "off"])
def test_a_task_may_have_a_mode_of_its_own(mode):
    """The setting is the default of ``lock_mode``."""
    assert resolved(settings=parsed(mode=mode)).mode == mode
    assert resolved(settings=parsed(mode="off"), lock_mode=mode).mode == mode


def test_what_is_no_mode_is_refused():
    """The message says which there are."""
    with pytest.raises(ConfigurationError, match='it must be "enforce" or "observe" or "off"'):
        parsed(mode="dry-run")


def test_eager_is_a_bool():
    """Neither a number nor a text, which an environment variable would give."""
    assert parsed(eager=False).eager is False
    assert parsed(eager=True).eager is True
    for wrong in (1, "true", None):
        with pytest.raises(ConfigurationError, match=r"singleton_lock_eager is .*True or False"):
            parsed(eager=wrong)


@pytest.mark.parametrize("value", ["parc", "", None, 5, ["park"], True], ids=repr)
def test_a_policy_that_does_not_exist_is_refused(value):
    """The error lists what there is."""
    with pytest.raises(
        ConfigurationError, match='"park" or "skip" or "fail" or "wait" or "requeue"'
    ):
        resolved(lock_on_conflict=value)


def test_a_misspelt_policy_is_recognised():
    """With the one that was meant."""
    with pytest.raises(ConfigurationError, match=r'Did you mean "skip"\?$'):
        resolved(lock_on_conflict="skipp")
    with pytest.raises(ConfigurationError, match=r'Did you mean "until_done"\?$'):
        resolved(lock_unique="until_don")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix", ""),
        ("prefix", "a{b}"),
        ("prefix", None),
        ("backend", 5),
        ("backend", ""),
        ("backend_options", None),
        ("backend_options", [("a", 1)]),
        ("backend_options", {1: 2}),
        ("max_body_bytes", 0),
        ("max_parked", 0),
        ("max_parked", "many"),
        ("max_parked", True),
        ("max_parked_bytes", -1),
        ("max_parked_bytes", 2**53 + 1),
        ("max_parked_bytes", 1e9),
    ],
)
def test_other_settings_are_checked_too(name, value):
    """Each error begins with the setting."""
    with pytest.raises(ConfigurationError, match=f"^singleton_lock_{name} is "):
        parsed(**{name: value})


@pytest.mark.parametrize("option", ["lock_wait_timeout", "lock_max_waiting"])
def test_an_option_that_can_never_matter_earns_a_warning(option):
    """A task that is skipped never waits."""
    with pytest.warns(ConfigurationWarning, match=f"{option} is 5, .*no effect: .*it never waits"):
        resolved(lock_on_conflict="skip", **{option: 5})
    with pytest.warns(ConfigurationWarning, match="lock_on_full is 'skip', .*no effect: without"):
        resolved(lock_on_full="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved(parsed(wait_timeout=5), lock_on_conflict="skip")
        resolved(lock_on_full="skip", lock_max_waiting=1)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (None, 3600.0),
        ({}, 3600.0),
        ({"visibility_timeout": 60}, 60.0),
        ({"visibility_timeout": 43200.5}, 43200.5),
        ({"visibility_timeout": 0}, 3600.0),
        ({"visibility_timeout": float("nan")}, 3600.0),
        ({"visibility_timeout": "60"}, 3600.0),
        ({"visibility_timeout": 10**400}, 366 * 86_400.0),
    ],
)
def test_the_visibility_timeout_is_that_of_the_broker(options, seconds):
    """A message that has waited for a part of it may have a copy."""
    assert parsed({"broker_transport_options": options}).visibility_timeout == seconds


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (None, 2 * 3600.0),
        ({"visibility_timeout": 401}, 802.0),
        ({"visibility_timeout": 60}, 60.0 + 10 * 10 + 300),
        (
            {"visibility_timeout": 8, "unacked_restore_interval": 1, "unacked_restore_throttle": 2},
            310.0,
        ),
        ({"visibility_timeout": 8, "unacked_mutex_expire": 5}, 113.0),
        ({"visibility_timeout": 8, "unacked_mutex_expire": "5"}, 408.0),
        ({"visibility_timeout": 10**400}, 366 * 86_400.0),
    ],
)
def test_ends_are_remembered_until_a_late_broker_has_sent_its_copies(options, seconds):
    """It looks for messages to send again every 100 s: a copy may come that much later."""
    assert parsed({"broker_transport_options": options}).done_for == seconds


# --- unknown names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lock_leese", "Did you mean lock_lease?"),
        ("lock_expiry", "Did you mean lock_lease?"),
        ("lock_ttl", "Did you mean lock_lease?"),
        ("lock_rate_limit", "Did you mean lock_rate?"),
        ("lock_policy", "Did you mean lock_on_conflict?"),
        ("lock_concurrency", "Did you mean lock_limit?"),
        ("lockkey", "Write 'lock_key'."),
        ("LOCK_KEY", "Write 'lock_key'."),
        ("singleton_lock_on_conflict", "Write 'lock_on_conflict'."),
        ("lock_onconflict", "Write 'lock_on_conflict'."),
        ("lock_qqqqqqqq", "There are: lock_key, lock_keys, lock_args"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(name, says):
    """A typo would lock nothing."""
    with pytest.raises(ConfigurationError) as caught:
        check_unknown("shop.settle", ["name", "lock_limit", name])
    assert str(caught.value).startswith(f"task shop.settle: there is no option {name!r}. ")
    assert says in str(caught.value)


def test_known_options_and_other_attributes_pass():
    """Every option of the table, and whatever else a task class has."""
    options = [f"lock_{field.name}" for field in dataclasses.fields(LockOptions)]
    check_unknown("t", ["lock_key", "lock_args", "lock", "locked", "rate_limit", *options])
    check_unknown("t", ["lock_lease", "LOCK_LEASE", "_lock_limit", "_T__lock_args"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("singleton_lock_leas", "Did you mean singleton_lock_lease?"),
        ("CELERY_SINGLETON_LOCK_LEAS", "Did you mean CELERY_SINGLETON_LOCK_LEASE?"),
        ("singleton_lock_backend_url", "Did you mean singleton_lock_backend?"),
        ("singleton_lock_qqqqqqqq", "There are: singleton_lock_backend, "),
        ("singleton_lock_limit", "There is no setting 'singleton_lock_limit'"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_one_that_was_meant(name, says):
    """In the spelling of the mistake, Django's namespace included."""
    with pytest.raises(ConfigurationError) as caught:
        check_unknown_settings(["broker_url", name], "CELERY")
    assert says in str(caught.value)


def test_known_settings_and_celery_singletons_pass():
    """`singleton_lock_expiry` is celery-singleton's, and left alone."""
    check_unknown_settings(
        [
            "singleton_lock_expiry",
            "singleton_backend_url",
            "CELERY_SINGLETON_LOCK_LEASE",
            "task_acks_late",
            *(f"singleton_lock_{name}" for name in ("backend", "mode", "max_body_bytes", "eager")),
        ],
        "CELERY",
    )


# --- where the locks live -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "url", "source"),
    [
        ({"broker_url": "redis://b/1"}, "redis://b/1", "broker_url"),
        ({"broker_url": "rediss://b"}, "rediss://b", "broker_url"),
        (
            {"broker_url": "amqp://b", "result_backend": "redis://r/2"},
            "redis://r/2",
            "result_backend",
        ),
        (
            {"broker_url": "redis://a;redis://b", "result_backend": "redis://r/2"},
            "redis://r/2",
            "result_backend",
        ),
        (
            {"broker_url": "redis://b", "singleton_lock_backend": "redis://l/3"},
            "redis://l/3",
            "singleton_lock_backend",
        ),
        (
            {"broker_url": "redis://b", "singleton_lock_backend": None},
            "redis://b",
            "broker_url",
        ),
        ({"broker_url": "redis+socket:///s"}, "redis+socket:///s", "broker_url"),
    ],
)
def test_locks_live_in_the_brokers_redis_or_in_the_result_backends(conf, url, source):
    """Unless a setting says where."""
    settings = parsed(conf)
    assert (settings.backend, settings.backend_source) == (url, source)
    assert settings.address()


def test_tls_of_the_broker_is_taken_over():
    """A lock must not go in clear where the broker does not."""
    settings = parsed(
        {"broker_url": "redis://b", "broker_use_ssl": {"ssl_ca_certs": "/ca"}},
        backend_options={"socket_timeout": 1},
    )
    assert settings.backend == "rediss://b"
    assert settings.backend_options == {"ssl_ca_certs": "/ca", "socket_timeout": 1}


@pytest.mark.parametrize(
    "conf",
    [
        {},
        {"broker_url": "amqp://guest:s3cret@b//", "result_backend": "rpc://"},
        {"broker_url": ["redis://:s3cret@a", "redis://b"]},
        {"broker_url": "sentinel://:s3cret@a;redis://b", "result_backend": "db+sqlite:///x"},
    ],
)
def test_no_redis_is_an_error_only_when_there_is_a_lock(conf):
    """An app without locked tasks needs none; the error says what to set."""
    settings = parsed(conf)
    with pytest.raises(
        ConfigurationError, match=r'Set singleton_lock_backend, for .*"redis://'
    ) as e:
        settings.address()
    assert "s3cret" not in str(e.value)


@pytest.mark.parametrize(
    ("url", "address", "spelt"),
    [
        ("redis://", BackendAddress(), "redis://localhost:6379/0"),
        ("REDIS://h", BackendAddress(host="h"), "redis://h:6379/0"),
        ("redis://h:7/3", BackendAddress(host="h", port=7, db=3), "redis://h:7/3"),
        ("redis://h/?db=4", BackendAddress(host="h", db=4), "redis://h:6379/4"),
        (
            "redis://:p%40ss@h",
            BackendAddress(host="h", password="p@ss"),
            "redis://:p%40ss@h:6379/0",
        ),
        (
            "rediss://u%3A:p@[::1]:7/3?ssl_cert_reqs=CERT_NONE&socket_timeout=2",
            BackendAddress(
                "rediss", "::1", 7, "", 3, "u:", "p",
                {"ssl_cert_reqs": "none", "socket_timeout": "2"},
            ),
            "rediss://u%3A:p@[::1]:7/3?ssl_cert_reqs=none&socket_timeout=2",
        ),
        (
            "unix://u:p@/run/r.sock?db=2",
            BackendAddress("unix", "", 0, "/run/r.sock", 2, "u", "p"),
            "unix://u:p@/run/r.sock?db=2",
        ),
        (
            "redis+socket:///run/r.sock?virtual_host=2",
            BackendAddress("unix", "", 0, "/run/r.sock", 2),
            "unix:///run/r.sock?db=2",
        ),
    ],
)  # fmt: skip
def test_the_parts_of_a_backend_url(url, address, spelt):
    """ACL users, databases, sockets, TLS; and the URL as redis-py reads it."""
    found = parse_backend_url(url)
    assert found == address
    assert found.url == spelt
    assert parse_backend_url(found.url) == found


def test_redis_py_reads_the_url_as_we_do():
    """Host, port, database and login are the same to it."""
    redis = pytest.importorskip("redis")
    address = parse_backend_url("redis://us%40er:p%2F%23ss@h:7/3?socket_timeout=2.5")
    found = redis.ConnectionPool.from_url(address.url).connection_kwargs
    expected = {"host": "h", "port": 7, "db": 3, "username": "us@er", "password": "p/#ss"}
    assert expected.items() <= found.items()
    assert found["socket_timeout"] == 2.5
    address = parse_backend_url("redis+socket://:p@/run/a b.sock?virtual_host=2")
    found = redis.ConnectionPool.from_url(address.url).connection_kwargs
    assert {"path": "/run/a b.sock", "db": 2, "password": "p"}.items() <= found.items()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sentinel://:s3cret@h;redis://i", "write each of its addresses as sentinel://host:port"),
        ("sentinel://:s3cret@h:1;i:2", "write each of its addresses as sentinel://host:port"),
        ("sentinel://:s3cret@h/1;sentinel://i/2", "its addresses differ in db"),
        ("sentinel://:s3cret@h;sentinel://:other@i", "its addresses differ in password"),
        ("redis+cluster://:s3cret@h/1", "a Cluster has only database 0"),
        ("redis+cluster://:s3cret@h;redis://i", "write each of its addresses as redis+cluster://"),
        ("redis+cluster://:s3cret@h;redis+cluster://:other@i", "its addresses differ in password"),
        ("redis://:s3cret@h?credential_provider=a:b", "Leave one out"),
        (
            "amqp://u:s3cret@h",
            "Use redis://, rediss:// (TLS), unix://, sentinel:// or redis+cluster",
        ),
        ("memory://u:s3cret@h", "locks in memory have only a name"),
        ("h:6379", "Use redis://, rediss:// (TLS), unix://, sentinel:// or redis+cluster"),
        ("redis://:s3cret@h;redis://i", "it names several servers"),
        ("redis://:s3cret@h,redis://i", "it names several servers"),
        ("redis://:s3cret@h,i", "it names several servers"),
        ("redis://:s3#cret@h", "Percent-encode"),
        ("redis://:s3/s3cret@h", "Percent-encode"),
        ("redis://:s3cret@h:x", "its port is not a number"),
        ("redis://:s3cret@h:99999", "its port is not a number up to 65535"),
        ("redis://:s3cret@[::1", "cannot be read"),
        ("redis://:s3cret@h/mydb", "the database is not a number"),
        ("redis://:s3cret@h/-1", "the database is not a number"),
        ("redis://:s3cret@h?ssl=1", "its option 'ssl' is unknown"),
        ("unix://:s3cret@", "three slashes"),
        ("unix://run/redis.sock", "three slashes"),
    ],
)
def test_a_backend_url_that_would_be_misread_is_refused(url, says):
    """The error names the setting and the remedy, and hides the password."""
    with pytest.raises(ConfigurationError) as caught:
        parsed(backend=url)
    assert str(caught.value).startswith("singleton_lock_backend is '")
    assert says in str(caught.value)
    assert "cret" not in str(caught.value)


def test_sentinel_urls_name_several_sentinels_and_one_master():
    """Port 26379 if none is said; login and database are the master's, wherever they stand."""
    found = parse_backend_url("sentinel://a; sentinel://:p%40ss@b:7/3")
    assert found == BackendAddress(
        "sentinel", "a", 26379, db=3, password="p@ss", sentinels=(("a", 26379), ("b", 7))
    )
    assert parse_backend_url(found.url) == found
    assert str(found) == "sentinel://***@a:26379/3;sentinel://***@b:7/3"
    assert "p@ss" not in repr(found)


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("broker_url", "broker_transport_options"),
        ("result_backend", "result_backend_transport_options"),
    ],
)
@pytest.mark.parametrize("url", ["sentinel://a;sentinel://b:7", ["sentinel://a", "sentinel://b:7"]])
def test_celerys_sentinels_serve_with_their_options(setting, options, url):
    """``master_name``, ``sentinel_kwargs`` and TLS come along; ours win."""
    theirs = {"master_name": "m", "sentinel_kwargs": {"password": "s3cret"}, "unrelated": 1}
    tls = "broker_use_ssl" if setting == "broker_url" else "redis_backend_use_ssl"
    conf = {setting: url, options: theirs, tls: {"ssl_ca_certs": "/ca"}}
    settings = parsed(conf, backend_options={"master_name": "other"})
    assert settings.backend_source == setting
    assert settings.address().sentinels == (("a", 26379), ("b", 7))
    assert settings.backend_options == {
        "master_name": "other",
        "sentinel_kwargs": {"password": "s3cret"},
        "ssl": True,
        "ssl_ca_certs": "/ca",
    }
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"broker_url": "sentinel://:s3cret@a"}, "broker_transport_options"),
        ({"result_backend": "sentinel://:s3cret@a"}, "result_backend_transport_options"),
        ({"singleton_lock_backend": "sentinel://:s3cret@a"}, "singleton_lock_backend_options"),
    ],
)
def test_a_sentinel_url_without_master_name_is_refused(conf, says):
    """The error names the setting that lacks it, and hides the password."""
    with pytest.raises(ConfigurationError, match=says) as caught:
        parsed(conf).address()
    assert "cret" not in str(caught.value)


def test_nothing_that_is_shown_holds_the_password():
    """Neither by repr nor by str, of settings and of addresses."""
    settings = parsed(backend="redis://us3r:s3cret@h/1", backend_options={"password": "s3cret"})
    shown = f"{settings!r}{settings.address()!r}{settings.address()}"
    assert "s3cret" not in shown
    assert "us3r" not in shown
    assert str(settings.address()) == "redis://***@h:6379/1"


# --- URLs, leniently ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:s3cret@h:6379/0", "redis://***@h:6379/0"),
        ("redis://user:s3cret@h", "redis://***@h"),
        ("redis://s3cret@h", "redis://***@h"),
        ("redis://:s3@cret@h", "redis://***@h"),
        ("redis://:s3/c#re?t@h", "redis://***@h"),
        ("redis://:a,b;c@h/1", "redis://***@h/1"),
        ("redis://[::1]:7/1", "redis://[::1]:7/1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix://:s3cret@/run/redis.sock?db=1", "unix://***@/run/redis.sock?db=1"),
        ("redis://h?password=s3cret&db=1", "redis://h?password=***&db=1"),
        ("unix:///s?db=1&USERNAME=me", "unix:///s?db=1&USERNAME=***"),
        ("amqp://u:p@a//;amqp://v:q@b//", "amqp://***@a//;amqp://***@b//"),
        ("sentinel://:p@a:1, sentinel://b:2/x", "sentinel://***@a:1, sentinel://b:2/x"),
        ("redis://:half,x://b@h", "redis://***,x://***@h"),
        ("user:p@h", "***@h"),
        ("h:6379", "h:6379"),
        ("", ""),
        (None, ""),
        (["redis://:p@a", None, "redis://b"], "redis://***@a,,redis://b"),
        (5, "<int>"),
        (b"redis://:p@h", "<bytes>"),
        ("redis://:\ud800@h", "redis://***@h"),
    ],
)
def test_a_url_is_shown_without_secrets(url, shown):
    """Lists, sockets, query strings and passwords that nobody has encoded included."""
    assert safe_url(url) == shown


@hypothesis_settings(deadline=None)
@given(secret=st.text(min_size=1).map(lambda text: f"s3{text}cret"), user=st.text())
def test_no_password_is_ever_shown(secret, user):
    """Whatever characters it has, encoded or not."""
    for url in (f"redis://{user}:{secret}@host:6379/0", f"amqp://{secret}@host//"):
        shown = safe_url(url)
        assert secret not in shown
        assert "cret" not in shown


@hypothesis_settings(deadline=None)
@given(st.text() | st.text(alphabet=":/@?#[];,=&%a0").map(lambda text: f"redis://{text}"))
def test_urls_of_any_shape_are_shown_hashed_or_refused(url):
    """safe_url and realm_of never raise; parse_backend_url raises nothing but its own error."""
    assert isinstance(safe_url(url), str)
    assert len(realm_of(url)) == 12
    try:
        address = parse_backend_url(url)
    except ConfigurationError:
        return
    assert parse_backend_url(address.url) == address


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://h", "redis://u:p@H:6379/0"),
        ("redis://h/1", "rediss://:p%40@h/1?ssl_cert_reqs=none"),
        ("redis://", "redis://localhost:6379/0"),
        ("amqp://u:p@h//", "pyamqp://h"),
        ("amqp://h/my%2Fhost", "amqp://u:p@h:5672/my/host"),
        (None, "amqp://"),
        ("redis://a;redis://:p@b", ["redis://b", "redis://a"]),
        ("redis+socket:///s?virtual_host=1", "redis+socket://:p@/s?virtual_host=1&x=y@z"),
    ],
)
def test_one_broker_is_one_realm(one, other):
    """Whatever the credentials, the order, and what is left out as default."""
    assert realm_of(one) == realm_of(other)


def test_other_brokers_are_other_realms():
    """Two applications with two brokers on one Redis do not take each other's tasks."""
    urls = [
        "redis://h/0",
        "redis://h/1",
        "redis://i/0",
        "redis://h:7/0",
        "redis://h?virtual_host=5",
        "amqp://h//",
        "amqp://h/other",
        "amqps://h/other",
        "redis+socket:///s?virtual_host=1",
        "redis+socket:///s?virtual_host=2",
        "redis+socket:///t?virtual_host=1",
        "sqs://",
        ["redis://h/0", "redis://i/0"],
        "",
    ]
    assert len({realm_of(url) for url in urls}) == len(urls)
