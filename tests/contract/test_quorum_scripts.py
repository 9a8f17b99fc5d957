"""The scripts of one server of a quorum, on a real Redis whose clock the tests set."""

from __future__ import annotations

import random
import re
from contextlib import closing

import pytest
from redis.exceptions import ResponseError

from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.keys import Keyspace
from celery_singleton_lock.model import new_token
from celery_singleton_lock.store.ballot import Bid
from celery_singleton_lock.store.quorum import RedisNode
from celery_singleton_lock.store.scripts import (
    QUORUM_VERBS,
    assemble,
    load_quorum_scripts,
    load_scripts,
    read,
)
from support.quorum_world import Server

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("run ids in scripts")]

CLOCK = "local function server_time() return tonumber(redis.call('GET', 'clock')) end"
NEW_FOR = 12.0
FOR_EVER = 10.0**6
KEYSPACE = Keyspace()


class Clocked:
    """A real server whose clock says what the model's says."""

    def __init__(self, client):
        self.client = client
        self.time = 1000.0
        self.model = Server(lambda: self.time)
        self.node = RedisNode(client, scripts={**load_scripts(), **load_quorum_scripts(CLOCK)})
        self.advance(0)

    def advance(self, seconds):
        self.time = round(self.time + seconds, 3)
        self.client.set("clock", round(self.time * 1e6))

    def restart(self, *, lose):
        self.model.restart(lose=lose)
        if lose:
            self.client.flushdb()
            self.advance(0)
        else:
            self.client.hset(KEYSPACE.quorum, "run", "another")

    def both(self, call):
        """The real answer, which must be the model's."""
        real, model = call(self.node), call(self.model)
        if hasattr(real, "run"):
            real, model = real._replace(run=""), model._replace(run="")
        assert repr(_rounded(real)) == repr(_rounded(model))
        return real


def _rounded(answer):
    if isinstance(answer, float):
        return round(answer, 3) + 0.0
    if isinstance(answer, (tuple, list)):
        return [_rounded(each) for each in answer]
    return answer


@pytest.fixture
def server(redis_client):
    server = Clocked(redis_client)
    with closing(server.node):
        yield server


@pytest.fixture
def bid(server):
    """Make a bid for a lock, at the server's time."""

    def make(token, round_=1, *, lease=10.0, fence=0, late=1.0):
        return Bid("a", token, round_, lease, fence, server.time + late, NEW_FOR)

    return make


def a_move(server, bid, chance, step):
    """Have both do the same."""
    token, round_ = chance.choice("xyz"), chance.randint(max(0, step - 3), step + 1)
    asked = bid(token, round_, fence=chance.choice([0, 7, 99]), late=chance.choice([-1, 1, 1]))
    calls = [
        lambda node: node.vote(asked),
        lambda node: node.withdraw("a", token, round_, FOR_EVER),
        lambda node: node.prolong([("a", token, 5.0), ("b", token, 5.0)]),
        lambda node: node.greet("a", NEW_FOR),
    ]
    server.both(chance.choices(calls, [6, 3, 2, 1])[0])


def test_the_scripts_do_what_the_simulated_servers_do(server, bid):
    """So that what the state machine shows of those holds for these."""
    for seed in range(12):
        chance = random.Random(seed)
        server.restart(lose=True)
        for step in range(40):
            a_move(server, bid, chance, step)
            if step % 6 == 5:
                server.advance(6)
            if step == 15:
                server.restart(lose=False)
            if step == 27 and seed % 2:
                server.node.admit()
                server.model.admit()


def test_a_server_that_lost_its_data_gives_no_vote_for_one_longest_lease(server, bid):
    """And tells for how long."""
    assert server.node.vote(bid("x")) == ("new", 0, NEW_FOR, server.time, server.node.admit())
    server.node.admit()
    assert server.node.vote(bid("x")).verdict == "yes"
    server.restart(lose=True)
    server.node.greet("a", NEW_FOR)
    server.advance(NEW_FOR - 0.001)
    assert server.node.vote(bid("y")).verdict == "new"
    server.advance(0.001)
    assert server.node.vote(bid("y")).verdict == "yes"


def test_a_server_that_was_restarted_with_its_data_votes_for_nobody_new(server, bid):
    """It may have forgotten the last second; whom it remembers, it still knows."""
    server.node.admit()
    server.node.vote(bid("x", lease=20.0))
    server.restart(lose=False)
    assert server.node.vote(bid("x")).verdict == "yes"
    assert server.node.prolong([("a", "x", 5.0)])[0][0]
    server.node.withdraw("a", "x", 9, 1.0)
    assert server.node.vote(bid("y")).verdict == "new"


def test_l23_a_renewal_gives_no_vote_and_revives_none(server, bid):
    """Neither to who never had it, nor to whose lease has ended."""
    server.node.admit()
    assert server.node.prolong([("a", "x", 5.0)]) == [(False, 0)]
    assert server.node.greet("a", NEW_FOR).token == ""
    server.node.vote(bid("x"))
    server.advance(10)
    assert not server.node.prolong([("a", "x", 5.0)])[0][0]
    assert server.node.greet("a", NEW_FOR).token == ""


def test_l32_a_vote_that_comes_late_is_not_given(server, bid):
    """Neither after its time, nor after it was taken back."""
    server.node.admit()
    assert server.node.vote(bid("x", late=-0.001)).verdict == "late"
    server.node.withdraw("a", "x", 5, 4.0)
    assert server.node.vote(bid("x", 5)).verdict == "gone"
    assert server.node.vote(bid("x", 6)).verdict == "yes"
    server.node.withdraw("a", "x", 5, 4.0)
    assert server.node.greet("a", NEW_FOR).token == "x", "the end of one try leaves the next alone"


def test_l32_what_is_kept_of_a_lock_ends(server, redis_client, bid):
    """All but our mark on the server has an expiry."""
    server.node.admit()
    server.node.vote(bid("x"))
    server.node.prolong([("a", "x", 5.0)])
    server.node.withdraw("a", "x", 5, 4.0)
    server.node.withdraw("a", "y", 5, 4.0)
    kept = set(redis_client.keys()) - {b"clock", KEYSPACE.quorum.encode()}
    assert KEYSPACE.vote("a").encode() in kept
    assert {key for key in kept if redis_client.pttl(key) <= 0} == set()


def test_t39_votes_are_renewed_and_taken_back_on_a_full_server(make_redis):
    """What must work when Redis takes no more data."""
    with make_redis().client() as client, closing(RedisNode(client)) as node:
        node.admit()
        token = new_token()
        asked = Bid("a", token, 1, 10.0, 0, node.time() + 5, NEW_FOR)
        assert node.vote(asked).verdict == "yes"
        client.config_set("maxmemory", 1)
        with pytest.raises(BackendRefused, match="maxmemory"):
            node.vote(asked._replace(name="b"))
        assert node.prolong([("a", token, 5.0)])[0][0]
        assert node.withdraw("a", token, 2, 1.0)


def test_keys_of_another_type_are_refused_before_anything_is_written(server, redis_client, bid):
    """Another program uses our names."""
    redis_client.set(KEYSPACE.vote("a"), "theirs")
    server.node.admit()
    for call in (
        lambda: server.node.vote(bid("x")),
        lambda: server.node.withdraw("a", "x", 1, 1.0),
        lambda: server.node.prolong([("a", "x", 1.0)]),
    ):
        with pytest.raises((BackendRefused, ResponseError), match="WRONGTYPE"):
            call()
    assert redis_client.get(KEYSPACE.vote("a")) == b"theirs"


@pytest.mark.parametrize("verb", QUORUM_VERBS)
def test_a_server_that_tells_no_run_id_is_refused(redis_client, verb):
    """It could be restarted, and forget its votes, and nobody would know."""
    before = f"{CLOCK}\n{read('_node.lua')}".replace("run_id:", "no_such_field:")
    redis_client.set("clock", 1)
    with pytest.raises(ResponseError, match="cannot be one of a quorum"):
        redis_client.eval(assemble(verb, before, "", read(f"{verb}.lua")).text, 0)
    assert redis_client.keys() == [b"clock"]


@pytest.mark.parametrize("verb", QUORUM_VERBS)
def test_the_headers_of_the_quorum_scripts_say_what_they_take(verb):
    """The first line names the verb; each argument is used."""
    text = read(f"{verb}.lua")
    assert re.match(rf"-- {verb}: \w.*\.\n-- KEYS: .*\n-- ARGV: ", text)
    script, code = load_quorum_scripts()[verb], re.sub(r"--.*", "", text)
    for name in script.arguments:
        assert re.search(rf"\b{name}\b", code), f"{verb}.lua does not use {name}"
