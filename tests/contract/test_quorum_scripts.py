"""The scripts of one server of a quorum, on a real Redis with a clock that the tests set."""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial

import pytest
from redis.exceptions import ResponseError

from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.store.quorum.sync import RedisNode
from celery_singleton_lock.store.quorum.values import Bid
from celery_singleton_lock.store.scripts import (
    QUORUM_VERBS,
    assemble,
    file_of,
    load_quorum_scripts,
    read,
)
from support.quorum_comparison import CLOCK, KEYSPACE, NEW_FOR, Twin, bid_at

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("run ids in scripts")]


@pytest.fixture
def server(redis_client):
    server = Twin(redis_client)
    with closing(server.node):
        yield server


@pytest.fixture
def bid(server):
    """Make a bid for a lock, at the server's time."""
    return partial(bid_at, server)


def test_a_server_that_lost_its_data_gives_no_vote_for_one_longest_lease(server, bid):
    """With the remaining time."""
    assert server.node.vote(bid("x")) == ("new", 0, NEW_FOR, server.time, server.node.admit_voter())
    server.node.admit_voter()
    assert server.node.vote(bid("x")).verdict == "yes"
    server.restart(lose=True)
    server.node.server_state("a", NEW_FOR)
    server.advance(NEW_FOR - 0.001)
    assert server.node.vote(bid("y")).verdict == "new"
    server.advance(0.001)
    assert server.node.vote(bid("y")).verdict == "yes"


def test_a_server_restarted_with_its_data_votes_for_no_new_bidder(server, bid):
    """It may have lost the last second; older votes are valid."""
    server.node.admit_voter()
    server.node.vote(bid("x", lease=20.0))
    server.restart(lose=False)
    assert server.node.vote(bid("x")).verdict == "yes"
    assert server.node.renew_votes([("a", "x", 5.0)])[0][0]
    server.node.withdraw_vote("a", "x", 9, 1.0)
    assert server.node.vote(bid("y")).verdict == "new"


def test_l23_a_renewal_gives_no_vote_and_revives_none(server, bid):
    """Neither for a token that never held it, nor for an expired one."""
    server.node.admit_voter()
    assert server.node.renew_votes([("a", "x", 5.0)]) == [(False, 0)]
    assert server.node.server_state("a", NEW_FOR).token == ""
    server.node.vote(bid("x"))
    server.advance(10)
    assert not server.node.renew_votes([("a", "x", 5.0)])[0][0]
    assert server.node.server_state("a", NEW_FOR).token == ""


def test_l32_a_vote_that_comes_late_is_not_given(server, bid):
    """Neither after its expiry, nor after its removal."""
    server.node.admit_voter()
    assert server.node.vote(bid("x", late=-0.001)).verdict == "late"
    server.node.withdraw_vote("a", "x", 5, 4.0)
    assert server.node.vote(bid("x", 5)).verdict == "gone"
    assert server.node.vote(bid("x", 6)).verdict == "yes"
    server.node.withdraw_vote("a", "x", 5, 4.0)
    assert server.node.server_state("a", NEW_FOR).token == "x", (
        "the end of one try leaves the next alone"
    )


def test_l32_what_is_kept_of_a_lock_ends(server, redis_client, bid):
    """Every key except the mark of the server expires."""
    server.node.admit_voter()
    server.node.vote(bid("x"))
    server.node.renew_votes([("a", "x", 5.0)])
    server.node.withdraw_vote("a", "x", 5, 4.0)
    server.node.withdraw_vote("a", "y", 5, 4.0)
    kept = set(redis_client.keys()) - {b"clock", KEYSPACE.quorum.encode()}
    assert KEYSPACE.vote("a").encode() in kept
    assert {key for key in kept if redis_client.pttl(key) <= 0} == set()


def test_t39_votes_are_renewed_and_taken_back_on_a_full_server(make_redis):
    """What must work when Redis takes no more data."""
    with make_redis().client() as client, closing(RedisNode(client)) as node:
        node.admit_voter()
        token = new_token()
        asked = Bid("a", token, 1, 10.0, 0, node.time() + 5, NEW_FOR)
        assert node.vote(asked).verdict == "yes"
        client.config_set("maxmemory", 1)
        with pytest.raises(BackendRefused, match="maxmemory"):
            node.vote(asked._replace(name="b"))
        assert node.renew_votes([("a", token, 5.0)])[0][0]
        assert node.withdraw_vote("a", token, 2, 1.0)


def test_keys_of_another_type_are_refused_before_anything_is_written(server, redis_client, bid):
    """Another program uses the same key names."""
    redis_client.set(KEYSPACE.vote("a"), "theirs")
    server.node.admit_voter()
    for call in (
        lambda: server.node.vote(bid("x")),
        lambda: server.node.withdraw_vote("a", "x", 1, 1.0),
        lambda: server.node.renew_votes([("a", "x", 1.0)]),
    ):
        with pytest.raises((BackendRefused, ResponseError), match="WRONGTYPE"):
            call()
    assert redis_client.get(KEYSPACE.vote("a")) == b"theirs"


@pytest.mark.parametrize("verb", QUORUM_VERBS)
def test_a_server_without_a_run_id_is_refused(redis_client, verb):
    """A restart, which loses its votes, would not be detected."""
    before = f"{CLOCK}\n{read('quorum/_server.lua')}".replace("run_id:", "no_such_field:")
    redis_client.set("clock", 1)
    with pytest.raises(ResponseError, match="cannot be one of a quorum"):
        redis_client.eval(assemble(verb, before, "", read(file_of(verb))).text, 0)
    assert redis_client.keys() == [b"clock"]


@pytest.mark.parametrize("verb", QUORUM_VERBS)
def test_the_headers_of_the_quorum_scripts_say_what_they_take(verb):
    """The first line names the verb; each argument is used."""
    text = read(file_of(verb))
    assert re.match(rf"-- {verb}: \w.*\.\n-- KEYS: .*\n-- ARGV: ", text)
    script, code = load_quorum_scripts()[verb], re.sub(r"--.*", "", text)
    for name in script.arguments:
        assert re.search(rf"\b{name}\b", code), f"{verb}.lua does not use {name}"
    used = {int(number) for number in re.findall(r"KEYS\[(\d)\]", code)}
    assert max(used or {1}) <= len(script.keys.split())
