"""The whole text of each error about an option, setting or argument.

An error names where the value stands, the value, and what to write instead; a change of any of the
three should be seen here and be meant.
"""

from __future__ import annotations

import datetime as dt
import decimal

import pytest

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.config.argument_checks import (
    checked_bool,
    checked_limit,
    checked_name,
    checked_seconds,
    checked_timeout,
    checked_token,
)
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.config.unknown_names import check_unknown, check_unknown_settings
from celery_singleton_lock.core.lock_name_template import OF_FUNCTION, compile_name
from celery_singleton_lock.errors import ConfigurationError


def settle(account_id, amount=1):
    """A task."""


def nothing():
    """A task without arguments."""


class Broken:
    """What a user sends, and cannot be written."""

    def __json__(self):
        raise OSError("disk")


def parsed(conf=None, **values):
    return parse_settings(
        {**(conf or {}), **{f"singleton_lock_{name}": value for name, value in values.items()}}.get
    )


def resolved(**attributes):
    return resolve_options("shop.settle", attributes, Settings())


def named(run=settle, args=(), **how):
    return compile_name("shop.settle", run, **how).name(args)


def of_function(key, args=()):
    return named(settle, args, lock_key=key, wording=OF_FUNCTION)


SENTENCES = [
    (
        lambda: resolved(lock_lease="30"),
        "task shop.settle: lock_lease is '30': it must be a number of seconds, not str: use 30.",
    ),
    (
        lambda: resolved(lock_lease="half an hour"),
        (
            "task shop.settle: lock_lease is 'half an hour': it must be a number of seconds, "
            "not str."
        ),
    ),
    (
        lambda: resolved(lock_wait_timeout="5 minutes"),
        (
            "task shop.settle: lock_wait_timeout is '5 minutes': it must be a number of "
            "seconds, not str: use 300."
        ),
    ),
    (
        lambda: resolved(lock_lease=dt.timedelta(minutes=5)),
        (
            "task shop.settle: lock_lease is datetime.timedelta(seconds=300): it must be a "
            "number of seconds, not timedelta: use its .total_seconds(), 300."
        ),
    ),
    (
        lambda: resolved(lock_lease=0),
        (
            "task shop.settle: lock_lease is 0: it must be above 0, and at most 604800 "
            "seconds; it is renewed while the task runs, so use 30."
        ),
    ),
    (
        lambda: resolved(lock_lease=0.5),
        (
            "task shop.settle: lock_lease is 0.5: a lease below 1 s cannot be renewed in time: "
            "the watchdog renews after a third of it, and needs time for a second attempt. Use "
            "30; the lock is released when the task ends, before its lease does."
        ),
    ),
    (
        lambda: resolved(lock_wait_timeout=0),
        (
            "task shop.settle: lock_wait_timeout is 0: it must be above 0, and at most "
            "31622400 seconds; None is no limit."
        ),
    ),
    (
        lambda: resolved(lock_requeue_delay=901),
        (
            "task shop.settle: lock_requeue_delay is 901: it must be above 0, and at "
            "most 900 seconds; the broker may redeliver a message that is held back longer."
        ),
    ),
    (
        lambda: parsed(requeue_max=0),
        (
            "singleton_lock_requeue_max is 0: it must be above 0, and at most 900 "
            "seconds; the broker may redeliver a message that is held back longer."
        ),
    ),
    (
        lambda: resolved(lock_limit=1.0),
        "task shop.settle: lock_limit is 1.0: it must be a whole number, not float: use 1.",
    ),
    (
        lambda: resolved(lock_limit=0),
        (
            "task shop.settle: lock_limit is 0: it must be from 1 to 2147483647; 1 is "
            "one task at a time."
        ),
    ),
    (
        lambda: resolved(lock_max_waiting=-1),
        (
            "task shop.settle: lock_max_waiting is -1: it must be from 0 to 2147483647; "
            "with 0 no task may wait, None is no limit."
        ),
    ),
    (
        lambda: resolved(lock_max_waiting=2**31),
        (
            "task shop.settle: lock_max_waiting is 2147483648: it must be from 0 to "
            "2147483647; with 0 no task may wait, None is no limit."
        ),
    ),
    (
        lambda: parsed(max_body_bytes=0),
        (
            "singleton_lock_max_body_bytes is 0: it must be from 1 to 2147483647; the "
            "default is 16 MiB."
        ),
    ),
    (
        lambda: resolved(lock_on_conflict="replace"),
        (
            "task shop.settle: lock_on_conflict is 'replace': tasks are replaced in a full queue. "
            "To make the newest task replace the one that waits, use "
            'lock_on_conflict="park", lock_max_waiting=1 and lock_on_full="replace".'
        ),
    ),
    (
        lambda: parsed(on_conflict="replace"),
        (
            "singleton_lock_on_conflict is 'replace': tasks are replaced in a full queue. To make "
            "the newest task replace the one that waits, use "
            'singleton_lock_on_conflict="park", singleton_lock_max_waiting=1 and '
            'singleton_lock_on_full="replace".'
        ),
    ),
    (
        lambda: resolved(lock_keys={"a": 1, "b": 2}, lock_limit=3),
        (
            "task shop.settle: lock_limit is 3: each of lock_keys has a limit of its own, so this "
            "one has no effect. Leave it out, or write None in lock_keys for the locks that have "
            "this limit."
        ),
    ),
    (
        lambda: resolved(lock_keys=["a:{amount}"], lock_args=[]),
        (
            "task shop.settle: lock_args is []: lock_keys is given too, and each names all locks. "
            "Keep lock_keys, and leave lock_args out: each of lock_keys is a template of arguments."
        ),
    ),
    (
        lambda: resolved(lock_keys=["a:{amount}"], lock_key="b"),
        (
            "task shop.settle: lock_key is 'b': lock_keys is given too, and each names all locks. "
            "Keep lock_keys, and put this into it."
        ),
    ),
    (
        lambda: resolved(lock_on_conflict="parc"),
        (
            'task shop.settle: lock_on_conflict is \'parc\': it must be "park" or "skip" '
            'or "fail" or "wait" or "requeue" or "preempt". Did you mean "park"?'
        ),
    ),
    (
        lambda: resolved(lock_on_conflict=7),
        (
            'task shop.settle: lock_on_conflict is 7: it must be "park" or "skip" or '
            '"fail" or "wait" or "requeue" or "preempt".'
        ),
    ),
    (
        lambda: resolved(lock_on_full="no"),
        ('task shop.settle: lock_on_full is \'no\': it must be "fail" or "skip" or "replace".'),
    ),
    (lambda: parsed(eager=1), "singleton_lock_eager is 1: it must be True or False."),
    (
        lambda: parsed(prefix="a{b}"),
        (
            "singleton_lock_prefix is 'a{b}': it must be a text without braces and NUL, and not "
            'empty, such as "csl".'
        ),
    ),
    (
        lambda: parsed(backend_options=[("a", 1)]),
        (
            "singleton_lock_backend_options is a list: it must be a dict of arguments "
            "for redis.Redis."
        ),
    ),
    (
        lambda: parsed(backend_options={1: 2}),
        (
            "singleton_lock_backend_options is a dict: it must be a dict of arguments "
            "for redis.Redis."
        ),
    ),
    (
        lambda: parsed(backend=5),
        "singleton_lock_backend is an int: it must be a URL, or a list of URLs.",
    ),
    (
        lambda: resolved(lock_on_conflict="wait"),
        (
            "task shop.settle: lock_on_conflict is 'wait': a task that waits occupies a "
            'pool slot, so it needs a time-out. Add lock_wait_timeout=60, or use "park", which '
            "needs no slot."
        ),
    ),
    (
        lambda: resolved(lock_on_full="replace", lock_max_waiting=0),
        (
            'task shop.settle: lock_max_waiting is 0: lock_on_full="replace" replaces a task that '
            "waits, and none may wait. Use 1."
        ),
    ),
    (
        lambda: resolved(
            lock_on_conflict="wait", lock_wait_timeout=5, lock_on_full="replace", lock_max_waiting=1
        ),
        (
            "task shop.settle: lock_on_full is 'replace': it replaces parked messages, and "
            'lock_on_conflict="wait" parks none. Use "skip".'
        ),
    ),
    (
        lambda: resolved(lock_on_conflict="requeue", lock_requeue_delay=5, lock_requeue_max=2),
        (
            "task shop.settle: lock_requeue_delay is 5.0: it is longer than "
            "lock_requeue_max (2). Use at most that."
        ),
    ),
    (
        lambda: check_unknown("shop.settle", ["lock_leese"]),
        "task shop.settle: there is no option 'lock_leese'. Did you mean lock_lease?",
    ),
    (
        lambda: check_unknown_settings(["CELERY_SINGLETON_LOCK_LEAS"], "CELERY"),
        (
            "There is no setting 'CELERY_SINGLETON_LOCK_LEAS'. "
            "Did you mean CELERY_SINGLETON_LOCK_LEASE?"
        ),
    ),
    (
        lambda: check_unknown_settings(["CELERY_SINGLETON_LOCK_LEASE"], None),
        (
            "The setting 'CELERY_SINGLETON_LOCK_LEASE' has no effect: this app has no namespace "
            'for its settings. Write singleton_lock_lease, or give namespace="CELERY" to '
            "config_from_object."
        ),
    ),
    (
        lambda: check_unknown_settings(["lock_lease"], None),
        "The setting 'lock_lease' has no effect. Did you mean singleton_lock_lease?",
    ),
    (
        lambda: parsed().address(),
        (
            "There are locked tasks, and no Redis for their locks: broker_url is not set "
            "and result_backend is not set. Set singleton_lock_backend, for example to "
            '"redis://localhost:6379/0"; in tests without a Redis, to "memory://".'
        ),
    ),
    (
        lambda: parsed({"broker_url": "amqp://u:p@b//", "result_backend": "rpc://"}).address(),
        (
            "There are locked tasks, and no Redis for their locks: broker_url is "
            "'amqp://***@b//' and result_backend is 'rpc://'. Set "
            'singleton_lock_backend, for example to "redis://localhost:6379/0"; in tests without '
            'a Redis, to "memory://".'
        ),
    ),
    (
        lambda: parsed({"broker_url": "sentinel://a:1"}).address(),
        (
            "broker_url is sentinel://a:1/0: Sentinel needs the name of a master. Set "
            'broker_transport_options = {"master_name": "mymaster"}, with your '
            "master's name."
        ),
    ),
    (
        lambda: parsed({"result_backend": "sentinel://a:1"}).address(),
        (
            "result_backend is sentinel://a:1/0: Sentinel needs the name of a master. Set "
            'result_backend_transport_options = {"master_name": "mymaster"}, '
            "with your master's name."
        ),
    ),
    (
        lambda: parsed(backend="sentinel://a:1").address(),
        (
            "singleton_lock_backend is sentinel://a:1/0: Sentinel needs the name of a master. Set "
            'singleton_lock_backend_options = {"master_name": '
            '"mymaster"}, with your master\'s name.'
        ),
    ),
    (
        lambda: parsed(backend="memcache://a"),
        (
            "singleton_lock_backend is 'memcache://a': locks need a Redis. Use redis://, "
            "rediss:// (TLS), unix://, sentinel:// or redis+cluster://."
        ),
    ),
    (
        lambda: parsed(backend="redis://a;redis://b"),
        (
            "singleton_lock_backend is 'redis://a;redis://b': it names several servers, and this "
            "scheme is for one. For a Cluster write redis+cluster://host1:6379,host2:6379; for "
            "Sentinels sentinel://host1:26379;sentinel://host2:26379; for a quorum a list of "
            "three or more URLs."
        ),
    ),
    (
        lambda: parsed(backend="sentinel://:secret@a:26379,b:26379/0"),
        (
            "singleton_lock_backend is 'sentinel://***@a:26379,b:26379/0': write each of its "
            "addresses as sentinel://host:port, with ; between them."
        ),
    ),
    (
        lambda: parsed(backend="redis+cluster://a:6379;b:6379"),
        (
            "singleton_lock_backend is 'redis+cluster://***': write commas between its nodes: "
            "redis+cluster://host1:6379,host2:6379."
        ),
    ),
    (
        lambda: parsed(backend="sentinel://a;redis://b"),
        (
            "singleton_lock_backend is 'sentinel://a;redis://b': write each of its "
            "addresses as sentinel://host:port."
        ),
    ),
    (
        lambda: parsed(backend="sentinel://a/1;sentinel://b/2"),
        (
            "singleton_lock_backend is 'sentinel://a/1;sentinel://b/2': its addresses "
            "differ in db. Write the same db in all, or in one."
        ),
    ),
    (
        lambda: parsed(backend="redis://a/x"),
        (
            "singleton_lock_backend is 'redis://a/x': the database is not a number. Write "
            "redis://localhost:6379/0."
        ),
    ),
    (
        lambda: parsed(backend="redis://a?timeout=5"),
        (
            "singleton_lock_backend is 'redis://a?timeout=5': its option 'timeout' is unknown. "
            "Use singleton_lock_backend_options, with "
            "singleton_lock_backend."
        ),
    ),
    (
        lambda: parsed(backend="unix://a"),
        (
            "singleton_lock_backend is 'unix://a': a socket has a path and no host. Write "
            "unix:///run/redis.sock, with three slashes."
        ),
    ),
    (
        lambda: parsed(backend="redis://a:x"),
        (
            "singleton_lock_backend is 'redis://***': its port is not a number up to 65535, as "
            "in redis://localhost:6379/0."
        ),
    ),
    (
        lambda: parsed(backend="redis://:secret@localhost:17x/0"),
        (
            "singleton_lock_backend is 'redis://***@localhost:17x/0': its port is not a number "
            "up to 65535, as in redis://localhost:6379/0."
        ),
    ),
    (
        lambda: parsed(backend="sentinel://a:x"),
        (
            "singleton_lock_backend is 'sentinel://***': its port is not a number up to 65535, "
            "as in redis://localhost:6379/0."
        ),
    ),
    (
        lambda: parsed(backend="redis://a#b"),
        (
            "singleton_lock_backend is 'redis://a#b': it cannot be read. Percent-encode "
            "special characters of the password."
        ),
    ),
    (
        lambda: named(lock_key="{account_id}", args=[1]),
        (
            "task shop.settle: lock_key is '{account_id}': it has no literal text, so unrelated "
            'tasks would share locks. Begin with a word for what is locked: "account:{account_id}".'
        ),
    ),
    (
        lambda: named(lock_key=5),
        "task shop.settle: lock_key is 5: an int is neither a template nor a callable.",
    ),
    (
        lambda: named(lock_key=["a"]),
        (
            "task shop.settle: lock_key is ['a']: a list is neither a template nor a callable; for "
            "several locks use lock_keys."
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id!r}"),
        (
            "task shop.settle: lock_key is 'a:{account_id!r}': {account_id!r}: the only "
            "conversion is !h, for a digest. Leave !r out."
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id!h:5}"),
        (
            "task shop.settle: lock_key is 'a:{account_id!h:5}': {account_id!h:5}: a "
            "digest has no format. Leave out ':5'."
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id:%B}"),
        (
            "task shop.settle: lock_key is 'a:{account_id:%B}': {account_id:%B}: this "
            "format is nested, or depends on the locale. Use another one."
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id:{amount}}"),
        (
            "task shop.settle: lock_key is 'a:{account_id:{amount}}': "
            "{account_id:{amount}}: this format is nested, or depends on the locale. Use another "
            "one."
        ),
    ),
    (
        lambda: named(lock_key="a:{account.id}"),
        (
            "task shop.settle: lock_key is 'a:{account.id}': 'account.id' is not the "
            "name of an argument, as in account_id or order[id]. Arguments are plain data: read "
            "their parts with [ ], not with a dot. It has: account_id, amount. "
            "Use one of them."
        ),
    ),
    (
        lambda: named(lock_key="a:{0}"),
        (
            "task shop.settle: lock_key is 'a:{0}': '0' is not the name of an argument, "
            "as in account_id or order[id]. It has: account_id, amount. Use one of them."
        ),
    ),
    (
        lambda: named(lock_key="a:{accountid}"),
        (
            "task shop.settle: lock_key is 'a:{accountid}': it names the argument "
            "'accountid', which the task does not have. It has: account_id, amount. Did "
            "you mean 'account_id'?"
        ),
    ),
    (
        lambda: named(lock_key="a:{zzz}"),
        (
            "task shop.settle: lock_key is 'a:{zzz}': it names the argument 'zzz', which "
            "the task does not have. It has: account_id, amount. Use one of them."
        ),
    ),
    (
        lambda: named(nothing, lock_key="a:{zzz}"),
        (
            "task shop.settle: lock_key is 'a:{zzz}': it names the argument 'zzz', which "
            "the task does not have. The task has no arguments."
        ),
    ),
    (
        lambda: named(lock_args="account_id"),
        (
            "task shop.settle: lock_args is 'account_id': it must be a list of names: "
            'use ["account_id"].'
        ),
    ),
    (
        lambda: named(lock_args=[], lock_key="a"),
        (
            "task shop.settle: lock_key and lock_args are both given, and each names the whole "
            "lock. Keep lock_key, and put the names of lock_args into its "
            "template."
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id}", args=[None]),
        (
            "task shop.settle: argument 'account_id' is None, so all such calls would "
            "share one lock. Send a value, or use a callable lock_key that says what "
            "None means"
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id[id]}", args=[{}]),
        (
            "task shop.settle: argument 'account_id[id]' is missing from this call. Send "
            "it, or rename the field"
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id:5}", args=[[1]]),
        "task shop.settle: argument 'account_id' is a list, which '5' cannot format",
    ),
    (
        lambda: named(lock_key="a:{account_id:%d}", args=["x"]),
        "task shop.settle: argument 'account_id' is a str, which '%d' cannot format",
    ),
    (
        lambda: named(args=[object()]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: an "
            "object has no text that is the same in every process. "
            "Send plain data, or leave it out "
            "with lock_key or lock_args"
        ),
    ),
    (
        lambda: named(args=[{(1,): 2}]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: a "
            "tuple cannot be a key in JSON. Send plain data, or leave it out with "
            "lock_key or lock_args"
        ),
    ),
    (
        lambda: named(args=[{"1": 2, 1: 3}]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: two keys of "
            "its dict are the same in JSON. Send plain data, or leave it out "
            "with lock_key or lock_args"
        ),
    ),
    (
        lambda: named(args=[float("nan")]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: nan "
            "is not a finite number. Send plain data, or leave it out with "
            "lock_key or lock_args"
        ),
    ),
    (
        lambda: named(args=[decimal.Decimal("inf")]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: "
            "Infinity is not a finite number. Send plain data, or leave it out "
            "with lock_key or lock_args"
        ),
    ),
    (
        lambda: named(args=[Broken()]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: "
            "OSError while writing it. Send plain data, or leave it out with lock_key or "
            "lock_args"
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id}", args=["\ud800"]),
        ("task shop.settle: argument 'account_id' holds a lone surrogate. Send valid Unicode."),
    ),
    (
        lambda: named(lock_key=lambda account_id, amount=1: "\ud800", args=[1]),
        ("task shop.settle: its lock name holds a lone surrogate. Send valid Unicode."),
    ),
    (
        lambda: named(lock_key=lambda account_id, amount=1: 1 / 0, args=[1]),
        ("task shop.settle: the callable lock_key raised ZeroDivisionError: division by zero"),
    ),
    (
        lambda: named(lock_key=lambda account_id, amount=1: "", args=[1]),
        (
            "task shop.settle: the callable lock_key returned an empty str. It must "
            "return the name, as a str"
        ),
    ),
    (
        lambda: named(lock_key=lambda account_id, amount=1: 5, args=[1]),
        (
            "task shop.settle: the callable lock_key returned an int. It must return the "
            "name, as a str"
        ),
    ),
    (
        lambda: named(lock_key="a:{account_id}", args=[object()]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: an "
            "object has no text that is the same in every process. "
            "Send plain data, or leave it out of "
            "lock_key"
        ),
    ),
    (
        lambda: named(lock_args=["account_id"], args=[object()]),
        (
            "task shop.settle: argument 'account_id' cannot be part of a lock name: an "
            "object has no text that is the same in every process. "
            "Send plain data, or leave it out of "
            "lock_args"
        ),
    ),
    (
        lambda: of_function("a:{account_id.x}"),
        (
            "function shop.settle: the key is 'a:{account_id.x}': 'account_id.x' is not the "
            "name of an argument, as in account_id or order[id]. A template reads parts of dicts "
            "and lists, with [ ]. For an attribute use a callable key, such as lambda order: "
            "f'order:{order.id}'. It has: account_id, amount. Use one of them."
        ),
    ),
    (
        lambda: of_function(["a"]),
        (
            "function shop.settle: the key is ['a']: a list is neither a template nor a "
            "callable; a key names one lock."
        ),
    ),
    (
        lambda: of_function("a:{account_id}", [None]),
        (
            "function shop.settle: argument 'account_id' is None, so all such calls would "
            "share one lock. Send a value, or use a callable key that says what None means"
        ),
    ),
    (
        lambda: of_function(None, [object()]),
        (
            "function shop.settle: argument 'account_id' cannot be part of a lock name: an "
            "object has no text that is the same in every process. "
            "Send plain data, or leave it out with a "
            "key that names the others"
        ),
    ),
    (
        named,
        (
            "task shop.settle cannot be called with its arguments: missing a required "
            "argument: 'account_id'."
        ),
    ),
    (
        lambda: compile_name("shop.settle", 5),
        "task shop.settle: the signature of 5 cannot be read. Use a plain function.",
    ),
    (lambda: checked_name(""), "A lock's name must be a str that is not empty, not ''."),
    (lambda: checked_name("\ud800"), "A lock's name must be valid Unicode, not '\\ud800'."),
    (
        lambda: checked_seconds("lease", 0, 0.1, 5),
        "lease must be a number of seconds from 0.1 to 5, not 0.",
    ),
    (
        lambda: checked_timeout(0),
        ("blocking_timeout is 0: it must be above 0. To try without waiting, use blocking=False."),
    ),
    (
        lambda: checked_timeout(-1),
        ("blocking_timeout must be a number of seconds from 0.001 to 31622400, not -1."),
    ),
    (lambda: checked_limit(0), "limit must be a whole number from 1 to 2147483647, not 0."),
    (lambda: checked_bool("renew", 1), "renew must be True or False, not 1."),
    (
        lambda: checked_token("x"),
        ("token is 'x': it can be guessed, or used twice. Use celery_singleton_lock.new_token()."),
    ),
]


@pytest.mark.parametrize(("call", "sentence"), SENTENCES, ids=[text for _, text in SENTENCES])
def test_an_error_says_where_what_and_what_to_write_instead(call, sentence):
    """Word by word."""
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert str(caught.value) == sentence


async def coroutine(account_id, amount=1):
    """No way to name a lock."""


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            coroutine,
            "it is a coroutine function, and is not awaited. Use a plain def.",
        ),
        (
            lambda account_id: "x",
            "it cannot take the task's arguments: too many positional arguments.",
        ),
        (
            lambda amount=1, account_id=1: "x",
            "its parameter 'amount' has another position than the task's.",
        ),
    ],
)
def test_a_function_that_cannot_name_the_lock_is_refused_with_what_is_wrong_with_it(key, sentence):
    """The function is shown as Python shows it."""
    with pytest.raises(ConfigurationError) as caught:
        named(lock_key=key)
    signature = " Give it the task's signature: (account_id, amount=1)."
    remedy = "" if key is coroutine else signature
    assert str(caught.value) == f"task shop.settle: lock_key is {key!r}: {sentence}{remedy}"
