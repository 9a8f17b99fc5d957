"""Lock name -> Redis keys."""

from __future__ import annotations

import dataclasses
import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock.core.redis_keys import (
    BUCKETS,
    LONGEST_NAME,
    Keyspace,
    LockKeys,
    bucket_of,
    key_name,
)
from celery_singleton_lock.errors import ConfigurationError

names = st.text(st.characters(codec="utf-8"), min_size=1)


def hash_tag(key):
    """What Redis Cluster hashes of a key: the text in the first braces."""
    return re.search(r"\{(.+?)\}", key)[1]


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("holders", "csl:{b41}:account:42:holders"),
        ("queue", "csl:{b41}:account:42:queue"),
        ("record", "csl:{b41}:account:42:record"),
        ("meta", "csl:{b41}:account:42:meta"),
        ("bodies", "csl:{b41}:account:42:bodies"),
        ("deadlines", "csl:{b41}:account:42:deadlines"),
        ("adrift", "csl:{b41}:account:42:adrift"),
        ("done", "csl:{b41}:account:42:done"),
        ("due", "csl:{b41}:due"),
        ("index", "csl:{b41}:index"),
        ("fleet", "csl:fleet"),
    ],
)
def test_the_keys_of_a_lock(part, key):
    """A worker of another release finds the same keys: this table may not change."""
    assert getattr(Keyspace().lock("account:42"), part) == key


def test_the_keys_outside_of_a_lock():
    """Wake lists, indexes, inboxes, and the schema."""
    keys = Keyspace("app")
    assert keys.wake("account:42", "tok.0") == "app:{b41}:account:42:wake:tok.0"
    assert keys.attempts("account:42") == "app:{b41}:account:42:attempts"
    assert keys.due(7) == "app:{b07}:due"
    assert keys.index(7) == "app:{b07}:index"
    assert keys.inbox("w1") == "app:fleet:inbox:w1"
    assert keys.schema == "app:schema"
    assert keys.observed(7, "tasks") == "app:{b07}:observed:tasks"


@given(names)
def test_all_keys_of_a_lock_live_in_one_cluster_slot(name):
    """One hash tag, whatever braces the name holds, so that each verb stays one script."""
    keys = Keyspace()
    bucketed = [key for key in keys.lock(name) if key != keys.fleet]
    tags = {hash_tag(key) for key in [*bucketed, keys.wake(name, "t")]}
    assert tags == {f"b{bucket_of(name):02d}"}
    assert 0 <= bucket_of(name) < BUCKETS


@given(names, names)
def test_two_locks_share_no_key_of_their_own(one, other):
    """Only what belongs to a bucket, or to the fleet, is shared."""
    if one == other:
        return
    shared = set(Keyspace().lock(one)) & set(Keyspace().lock(other))
    bucket = Keyspace().lock(one)
    assert shared <= {bucket.due, bucket.index, bucket.fleet}


def test_keys_are_given_to_scripts_in_the_order_of_their_declaration():
    """The scripts' KEYS count on it."""
    keys = Keyspace().lock("a")
    assert list(keys) == [getattr(keys, field.name) for field in dataclasses.fields(LockKeys)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("a" * LONGEST_NAME, True),
        ("a" * (LONGEST_NAME + 1), False),
        ("é" * (LONGEST_NAME // 2), True),
        ("é" * (LONGEST_NAME // 2) + "a", False),
    ],
    ids=["200 bytes", "201 bytes", "200 bytes of two-byte letters", "201 bytes of them"],
)
def test_a_name_of_over_200_bytes_is_keyed_by_its_digest(name, short):
    """Bytes, not letters."""
    digest = "sha256-" + hashlib.sha256(name.encode()).hexdigest()
    assert key_name(name) == (name if short else digest)


def test_long_names_with_a_common_start_are_different_locks():
    """The digest is of the whole name."""
    assert key_name("a" * 500 + "1") != key_name("a" * 500 + "2")


@pytest.mark.parametrize("prefix", ["", "{csl}", "a{", "a}", "a\0"])
def test_a_prefix_that_would_move_the_hash_tag_is_refused(prefix):
    """The error names the setting."""
    with pytest.raises(ConfigurationError, match=r"singleton_lock_prefix is .* and colons\.$"):
        Keyspace(prefix)


def test_a_prefix_may_have_any_letter():
    assert Keyspace("eXtra:x").schema == "eXtra:x:schema"
