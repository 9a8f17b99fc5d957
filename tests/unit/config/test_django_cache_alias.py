"""A Redis by its alias in Django's CACHES: what is taken over, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("django")

from django.core.cache.backends.redis import RedisCache

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.store.connect import connect
from support import django_project

REDISPY = "django_redis.cache.RedisCache"


class Derived(RedisCache):
    """A project's own cache."""


def told(params, alias="locks", **more):
    """The options of a worker's connections, with this cache."""
    settings = parsed(params, alias, **more)
    client = connect(settings.address(), settings.backend_options, patience=0.5)
    return client.connection_pool.connection_kwargs


def parsed(params, alias="locks", **more):
    """Settings with the backend ``django-cache://locks``."""
    given = {"singleton_lock_backend": f"django-cache://{alias}", **more}
    with django_project.project(
        CACHES={"default": {"BACKEND": django_project.MEMORY}, "locks": params}
    ):
        return parse_settings(given.get)


def where(found):
    """Which server, database and user."""
    names = ("host", "port", "db", "username", "password")
    return {name: found[name] for name in names if name in found}


@pytest.mark.parametrize("backend", [django_project.REDIS, REDISPY, f"{__name__}.Derived"])
@pytest.mark.parametrize(
    "location", ["redis://u:p@h:7/2", ["redis://u:p@h:7/2", "redis://replica"]], ids=["one", "list"]
)
def test_an_alias_leads_to_the_server_that_the_cache_writes_to(backend, location):
    """Django's own cache, django-redis, and what is derived from either."""
    found = told({"BACKEND": backend, "LOCATION": location})
    assert where(found) == {"host": "h", "port": 7, "db": 2, "username": "u", "password": "p"}


@pytest.mark.parametrize("between", [",", ";", "; "])
def test_of_several_servers_in_one_text_the_first_counts(between):
    location = f"redis://h:7{between}redis://replica"
    assert where(told({"BACKEND": django_project.REDIS, "LOCATION": location}))["host"] == "h"


@pytest.mark.parametrize(
    ("location", "options", "found"),
    [
        ("redis://h", {"db": "3", "username": "u", "password": "p@:/"}, (3, "u", "p@:/")),
        ("redis://v:w@h/0", {"db": 3, "username": "u", "password": "p"}, (0, "v", "w")),
        ("redis://h?db=4", {"db": 3, "password": None}, (4, None, None)),
        ("redis://:w@h/", {"db": 3}, (3, None, "w")),
    ],
)
def test_what_the_url_does_not_say_is_taken_from_the_options(location, options, found):
    """As redis-py does for the cache: the URL wins."""
    told_ = told({"BACKEND": django_project.REDIS, "LOCATION": location, "OPTIONS": options})
    assert (told_["db"], told_.get("username"), told_.get("password")) == found


def test_how_to_get_in_is_taken_over_and_how_patient_to_be_is_not():
    """TLS and keep-alive; not time-outs, retries, pools and serializers."""
    options = {
        "ssl_ca_certs": "/ca.pem",
        "socket_keepalive": True,
        "health_check_interval": 7,
        "socket_timeout": 60,
        "retry_on_timeout": True,
        "max_connections": 1,
        "pool_class": "redis.BlockingConnectionPool",
        "timeout": 9,
        "serializer": "json",
        "decode_responses": True,
    }
    found = told({"BACKEND": django_project.REDIS, "LOCATION": "rediss://h", "OPTIONS": options})
    assert (found["ssl_ca_certs"], found["socket_keepalive"]) == ("/ca.pem", True)
    assert (found["health_check_interval"], found["socket_timeout"]) == (7, 0.5)
    assert not found.get("decode_responses")
    assert "timeout" not in found


def test_the_backend_options_of_the_locks_win():
    found = told(
        {
            "BACKEND": django_project.REDIS,
            "LOCATION": "redis://h",
            "OPTIONS": {"socket_keepalive": True},
        },
        singleton_lock_backend_options={"socket_keepalive": False, "socket_timeout": 3},
    )
    assert (found["socket_keepalive"], found["socket_timeout"]) == (False, 3)


def test_a_socket_is_understood():
    settings = parsed({"BACKEND": django_project.REDIS, "LOCATION": "unix:///run/redis.sock?db=1"})
    assert (settings.address().path, settings.address().db) == ("/run/redis.sock", 1)


def test_django_redis_options_are_understood():
    """In capitals, with a dict for the pool; what is about values and time-outs is left."""
    options = {
        "CLIENT_CLASS": "django_redis.client.HerdClient",
        "PASSWORD": "p",
        "SOCKET_TIMEOUT": 60,
        "COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor",
        "CONNECTION_POOL_KWARGS": {"max_connections": 100, "ssl_cert_reqs": None},
    }
    found = told({"BACKEND": REDISPY, "LOCATION": "rediss://h/1", "OPTIONS": options})
    assert where(found) == {"host": "h", "port": 6379, "db": 1, "password": "p"}
    assert (found["socket_timeout"], found["ssl_cert_reqs"]) == (0.5, None)


def test_django_redis_sentinels_are_asked_for_the_master():
    """LOCATION has the master's name for a host."""
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "SENTINELS": [("s1", 26379), ("s2", "26380")],
        "SENTINEL_KWARGS": {"password": "q"},
        "PASSWORD": "p",
    }
    location = "redis://mymaster/3?is_master=1"
    settings = parsed({"BACKEND": REDISPY, "LOCATION": location, "OPTIONS": options})
    address = settings.address()
    assert address.sentinels == (("s1", 26379), ("s2", 26380))
    assert (address.db, address.password) == (3, "p")
    assert settings.backend_options["master_name"] == "mymaster"
    assert settings.backend_options["sentinel_kwargs"] == {"password": "q"}


def test_the_source_of_the_address_is_named_without_credentials():
    settings = parsed({"BACKEND": django_project.REDIS, "LOCATION": "redis://u:secret@h"})
    assert settings.backend_source == "CACHES['locks']"
    assert "secret" not in f"{settings} {settings.address()}"


REDIS_AT = {"BACKEND": django_project.REDIS, "LOCATION": "redis://h"}


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"BACKEND": django_project.MEMORY},
            "CACHES['locks'] is a django.core.cache.backends.locmem",
        ),
        (
            {"BACKEND": "no.such.Cache"},
            "CACHES['locks'] is a no.such.Cache, and locks need a Redis",
        ),
        ({"BACKEND": "os.path"}, "CACHES['locks'] is an os.path, and locks need a Redis"),
        ({"BACKEND": django_project.REDIS}, "CACHES['locks'] has the LOCATION ''. Use redis://"),
        (
            {**REDIS_AT, "LOCATION": "u:secret@h:6379"},
            "CACHES['locks'] has the LOCATION '***@h:6379'",
        ),
        (
            {**REDIS_AT, "LOCATION": "redis://h?sure=yes"},
            "the LOCATION of CACHES['locks'] is 'redis://h?sure=yes': its option 'sure'",
        ),
        ({**REDIS_AT, "OPTIONS": {"db": "one"}}, "db='one': it must be the number of a database"),
        ({**REDIS_AT, "OPTIONS": {"colour": 1}}, "the option 'colour', which is unknown"),
        (
            {
                **REDIS_AT,
                "BACKEND": REDISPY,
                "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
            },
            "distributes keys over servers",
        ),
        (
            {
                **REDIS_AT,
                "BACKEND": REDISPY,
                "OPTIONS": {"REDIS_CLIENT_CLASS": "redis.cluster.RedisCluster"},
            },
            "distributes keys over servers",
        ),
    ],
)
def test_a_cache_that_is_no_redis_of_its_own_is_refused(params, says):
    """The error names the cache, and no password."""
    with pytest.raises(ConfigurationError) as caught:
        parsed(params)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("alias", "says"),
    [
        ("lokcs", "singleton_lock_backend is 'django-cache://lokcs': CACHES has no 'lokcs'. Did"),
        ("lokcs", 'Did you mean "locks"?'),
        ("qqq", "There are: default, locks."),
        ("", "CACHES has no ''"),
    ],
)
def test_an_alias_that_is_missing_is_refused_with_the_one_that_was_meant(alias, says):
    with pytest.raises(ConfigurationError) as caught:
        parsed(REDIS_AT, alias)
    assert says in str(caught.value)
