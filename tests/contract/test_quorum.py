"""Locks on five real servers. Some are killed, paused and restarted."""

from __future__ import annotations

import asyncio
import gc
import re
import runpy
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
import redis.asyncio

from celery_singleton_lock.core import loop_tasks
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.errors import (
    BackendUnreachable,
    ConfigurationError,
    LockLost,
    LockNotOwned,
    LockTimeout,
    LockUnusable,
)
from celery_singleton_lock.lock.aio import AsyncLock
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.quorum.aio import AsyncQuorumStore
from celery_singleton_lock.store.quorum.coordinators import ranked
from celery_singleton_lock.store.quorum.sync import QuorumStore
from celery_singleton_lock.store.quorum.values import Each
from support.garbage import no_earlier_garbage
from support.granted_tokens import queue_server
from support.waiting import eventually

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("five servers")]

LEASE = 30.0
TIMEOUT = 5.0  # a busy machine may stand still for seconds
IMPATIENT = 2.5  # where a server is silent, and calls take as long
KEYSPACE = Keyspace()
EXAMPLES = Path(__file__).parents[2] / "examples"


class Servers(list):
    """Some Redis servers."""

    @property
    def urls(self):
        return [server.url for server in self]

    def heal(self):
        """Restart all servers without data."""
        for server in self:
            if not server.is_running:
                server.restart(keep_data=False)
            with server.client() as client:
                client.flushall()

    def votes(self, name):
        """Return the votes by server."""
        found = []
        for server in self:
            if server.is_running:
                with server.client(decode_responses=True) as client:
                    found.append(client.hget(KEYSPACE.vote(name), "token") or "")
        return found


@pytest.fixture(scope="module")
def five_servers(redis_provider):
    with ExitStack() as stack:
        yield Servers(stack.enter_context(RedisServer(redis_provider)) for _ in range(5))


@pytest.fixture
def servers(five_servers):
    five_servers.heal()
    return five_servers


@pytest.fixture
def store(servers):
    """A store on all five servers, which are admitted as voters."""
    with closing(QuorumStore(servers.urls, timeout=TIMEOUT, longest_lease=LEASE)) as store:
        eventually(lambda: admitted(store), 20)
        yield store


def admitted(store):
    """Whether all servers vote."""
    with suppress(BackendUnreachable):
        store.admit()
        return True
    return False


def kill(servers, store, *, name, how_many):
    """Kill servers, the coordinators of a lock first."""
    for number in ranked(store.operations.addresses, name)[:how_many]:
        servers[number].kill()


def test_l32_a_quorum_lock_is_owned_by_one_and_leaves_no_vote(servers, store):
    """All five vote for the owner and refuse others; after the release there is no vote."""
    mine, other = Lock(store, "a", lease=LEASE), Lock(store, "a", lease=LEASE, blocking=False)
    with mine:
        eventually(lambda: servers.votes("a") == [mine.token] * 5)
        assert not other.acquire()
        assert mine.locked()
        assert mine.owned()
        assert mine.owner().token == mine.token
        assert servers.votes("a") == [mine.token] * 5
    assert servers.votes("a") == [""] * 5
    first = other.acquire() and other.fencing_token
    other.release()
    with mine:
        assert mine.fencing_token > first > 0


@pytest.mark.usefixtures("patient_quorums")
def test_a_list_of_urls_is_a_quorum(servers, store):
    """The same servers are one store, however often they are listed."""
    one, other = Lock(servers.urls, "a", lease=LEASE), Lock(servers.urls, "a", lease=LEASE)
    assert one._store is other._store
    with one:
        assert not other.acquire(blocking=False)
    assert other.acquire(blocking=False)
    other.release()


def test_with_two_of_five_servers_killed_locks_work(servers, store):
    """With the queue's server dead the holder keeps the lock, and the waiter gets it."""
    mine, other = Lock(store, "a", lease=LEASE), Lock(store, "a", lease=LEASE)
    taken = []
    with mine:
        waits = threading.Thread(target=lambda: taken.append(other.acquire()))
        waits.start()
        eventually(lambda: store.inspect("a").waiting)
        kill(servers, store, name="a", how_many=2)
        mine.ensure_held()
        assert mine.owned()
        assert not Lock(store, "a", lease=LEASE).acquire(blocking=False)
    waits.join(60)
    assert taken == [True]


def test_a_dead_server_is_reported_once_and_again_when_it_votes(servers, store, caplog):
    """The locks went on without a word, and the next death ended them."""

    def told(sentence):
        return [each for each in caplog.messages if sentence in each]

    with Lock(store, "a", lease=LEASE):
        pass
    assert told("quorum") == []
    servers[0].kill()
    for _ in range(3):
        with Lock(store, "a", lease=LEASE):
            pass
    (warning,) = told("does not vote")
    assert f"server 1 of the quorum (127.0.0.1:{servers[0].port})" in warning
    assert "Locks work as long as 3 of 5 servers do" in warning
    servers.heal()
    eventually(lambda: admitted(store), 20)
    with Lock(store, "a", lease=LEASE):
        pass
    (again,) = told("votes again")
    assert f"server 1 of the quorum (127.0.0.1:{servers[0].port})" in again


@pytest.mark.full
def test_three_of_five_servers_are_killed_and_nothing_is_granted(servers, store):
    """The error comes within the timeouts; the holder gets "unknown" first, then the loss."""
    mine = Lock(store, "a", lease=LEASE)
    mine.acquire()
    kill(servers, store, name="a", how_many=3)
    with pytest.raises(BackendUnreachable, match="3 are needed"):
        mine.ensure_held()
    began = time.monotonic()
    with pytest.raises(BackendUnreachable, match="of the lock's 5 servers did not answer") as told:
        Lock(store, "b", lease=LEASE).acquire()
    assert time.monotonic() - began < 10 * TIMEOUT
    dead = ", ".join(f"127.0.0.1:{server.port}" for server in servers if not server.is_running)
    assert f"({dead}), and 3 are needed. The first error: The locks' Redis" in str(told.value)
    eventually(lambda: mine.lost)
    with pytest.raises(BackendUnreachable, match="3 are needed"):
        mine.release()


@pytest.mark.full
def test_servers_that_do_not_answer_cost_a_time_out_not_the_lock(servers, store):
    """Two are paused: connections open, but no reply comes."""
    with Lock(store, "a", lease=LEASE):
        pass
    frozen = [servers[n] for n in ranked(store.operations.addresses, "a")[:2]]
    with closing(QuorumStore(servers.urls, timeout=IMPATIENT, longest_lease=LEASE)) as impatient:
        for server in frozen:
            server.pause()
        try:
            began = time.monotonic()
            with Lock(impatient, "a", lease=LEASE) as lock:
                assert time.monotonic() - began < 8 * IMPATIENT
                assert lock.held
        finally:
            for server in frozen:
                server.resume()
    # What they had not answered they do now, late: and keep nothing of it.
    eventually(lambda: servers.votes("a") == [""] * 5)


def test_a_server_that_lost_its_data_does_not_help_a_second_owner(servers, store):
    """One of three votes is forgotten; with the two that never voted it would be a majority."""
    votes_later = closing(QuorumStore(servers.urls, timeout=TIMEOUT, longest_lease=120.0))
    with votes_later as patient:
        lose_a_vote(servers, patient)


def lose_a_vote(servers, store):
    """Have three servers forget their votes, and ask for a majority again."""
    mine = Lock(store, "a", lease=LEASE, renew=False)
    order = ranked(store.operations.addresses, "a")
    for number in order[:2]:
        servers[number].kill()
    assert mine.acquire()
    for number in order[:3]:
        servers[number].restart(keep_data=False)
    with pytest.raises(BackendUnreachable, match="were restarted, or lost their data"):
        Lock(store, "a", lease=LEASE).acquire(blocking=False)
    with pytest.raises((LockLost, BackendUnreachable)):
        mine.ensure_held()


def test_a_returning_server_gets_the_present_votes(servers, store):
    """The owner's renewal has it vote, once it may."""
    servers[0].kill()
    with Lock(store, "a", lease=LEASE) as lock:
        servers[0].restart(keep_data=False)
        eventually(lambda: admitted(store), 20)
        lock.ensure_held()
        eventually(lambda: servers.votes("a") == [lock.token] * 5)


def test_a_lease_ends_that_is_not_renewed(store):
    """And the next one has the lock, with a higher number."""
    mine, other = Lock(store, "a", lease=0.6, renew=False), Lock(store, "a", lease=LEASE)
    mine.acquire()
    number = mine.fencing_token
    with other:
        assert not mine.held
        assert other.fencing_token > number
        with pytest.raises(LockNotOwned):
            mine.release()


def test_waiters_are_granted_once_and_in_order(servers, store, full):
    """Eight threads and a plain counter."""
    counter, fences, rounds = {"n": 0}, [], 25 if full else 5
    patient = QuorumStore(servers.urls, timeout=TIMEOUT, longest_lease=120.0)

    def work():
        for _ in range(rounds):
            with Lock(patient, "a", lease=100) as lock:
                n = counter["n"]
                time.sleep(0.001)  # widens the window in which two would meet
                counter["n"] = n + 1
                fences.append(lock.fencing_token)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    patient.close()
    assert counter["n"] == 8 * rounds
    assert fences == sorted(set(fences))


def test_a_wait_ends_in_time_and_names_the_holder(store):
    """LockTimeout, and the waiter leaves the queue."""
    with Lock(store, "a", lease=LEASE):
        with pytest.raises(LockTimeout, match="is held by"):
            Lock(store, "a", lease=LEASE, blocking_timeout=0.1).__enter__()
        assert store.inspect("a").waiting == 0


def test_reset_takes_the_lock_from_its_owner(servers, store):
    """On all servers."""
    mine = Lock(store, "a", lease=LEASE)
    mine.acquire()
    assert Lock(store, "a", lease=LEASE).reset() == 1
    assert servers.votes("a") == [""] * 5
    with pytest.raises(LockLost):
        mine.ensure_held()


def test_refusing_servers_are_not_reported_as_unreachable(servers, store):
    """Waiting does not help; and no grant is left behind."""
    for server in servers[:3]:
        with server.client() as client:
            client.set(KEYSPACE.vote("a"), "theirs")
    for call in (Lock(store, "a", lease=LEASE).acquire, partial(store.inspect, "a")):
        with pytest.raises(
            LockUnusable, match=r"3 of the lock's 5 servers refused \(.*, .*, .*\), and .*prefix"
        ):
            call()
    with servers[0].client() as client:
        client.delete(KEYSPACE.vote("a"))
    with Lock(store, "a", lease=LEASE, blocking=False):
        pass


class Meanwhile(QuorumStore):
    """Calls a function once before servers are asked for their votes."""

    meanwhile = None

    def do(self, wish):
        if isinstance(wish, Each) and self.meanwhile is not None:
            self.meanwhile, act = None, self.meanwhile
            act()
        return super().do(wish)


def test_t35_a_grant_of_the_queue_without_votes_ends_no_attempt(servers, store):
    """A copy of its message comes meanwhile: that is not the copy of one that has ended."""

    def attempt(where):
        claim = Claim("a", LEASE, copy=True)
        return where.acquire(Owner(new_token(), "id/0/0"), claim).verdict

    with closing(Meanwhile(servers.urls, timeout=TIMEOUT, longest_lease=LEASE)) as first:
        holder = Lock(store, "a", lease=LEASE)
        assert holder.acquire()
        queue_server(store, "a").reset("a")  # holds the votes, and not the turn
        copies = []
        first.meanwhile = lambda: copies.append(attempt(queue_server(store, "a")))
        assert attempt(first) is Verdict.BLOCKED
        assert copies == [Verdict.TWIN]
        holder.release()
        assert attempt(first) is Verdict.GRANTED


class Young(SystemClock):
    """The clock of a machine that was started a moment ago."""

    def __init__(self):
        self._start = super().monotonic()

    def monotonic(self):
        return super().monotonic() - self._start


def test_reset_does_not_depend_on_whose_machine_runs_longer(servers, store):
    """Attempts are numbered by the owner's clock; an operator's machine may have another one."""
    mine = Lock(store, "a", lease=LEASE)
    mine.acquire()
    with closing(QuorumStore(servers.urls, timeout=TIMEOUT, clock=Young())) as young:
        assert young.reset("a") == 1
    assert servers.votes("a") == [""] * 5


class Counting(QuorumStore):
    """Counts how often it asks servers."""

    asked = 0

    def do(self, wish):
        self.asked += 1
        return super().do(wish)


def test_a_restarted_server_gets_missing_votes_in_one_round(servers, store):
    """Of all leases at once: one after another, a server that is slow could end the others."""
    leases = [(f"lock {number}", new_token(), LEASE) for number in range(20)]
    with closing(Counting(servers.urls, timeout=TIMEOUT, longest_lease=LEASE)) as counting:
        for name, token, lease in leases:
            owned = counting.acquire(Owner(token), Claim(name, lease))
            assert owned.verdict is Verdict.GRANTED
        servers[0].restart(keep_data=False)
        eventually(lambda: admitted(store), 20)
        before = counting.asked
        assert counting.extend(leases) == [True] * len(leases)
        assert counting.asked == before + 2
    for name, token, _ in leases[::7]:
        assert servers.votes(name) == [token] * 5


@pytest.mark.usefixtures("patient_quorums")
def test_the_example_runs_with_a_server_dead(servers, store, monkeypatch, capsys):
    """examples/redlock.py, as its first line says."""
    servers[0].kill()
    monkeypatch.setattr(sys, "argv", ["redlock.py", *servers.urls])
    runpy.run_path(str(EXAMPLES / "redlock.py"), run_name="__main__")
    assert re.fullmatch(r"writing with fence \d{16}\n", capsys.readouterr().out)
    assert len((EXAMPLES / "redlock.py").read_text().splitlines()) < 20


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_quorum_has_an_odd_number_of_servers_three_or_more(count):
    """The error says what to give."""
    with pytest.raises(ConfigurationError, match="an odd number of servers, 3 or more"):
        QuorumStore([f"redis://h{n}" for n in range(count)])


def test_a_server_given_twice_is_refused(servers):
    """By its address at once, by another host name at the first call."""
    urls = servers.urls
    with pytest.raises(ConfigurationError, match="given twice"):
        QuorumStore([urls[0], urls[1], f"{urls[0].rsplit('/', 1)[0]}/1"])
    alias = urls[0].replace("127.0.0.1", "localhost")
    with (
        closing(QuorumStore([urls[0], urls[1], alias])) as store,
        pytest.raises(ConfigurationError, match=r"Servers 1 and 3 .* are one server"),
    ):
        store.check()


def test_more_permits_than_one_are_refused(store):
    """Two majorities need not name the same holders."""
    with pytest.raises(ConfigurationError, match="limit=2"):
        Lock(store, "a", lease=LEASE, limit=2).acquire()


def test_a_lease_beyond_the_longest_is_refused(servers, store):
    """A restarted server would vote again before it is over; no turn is left behind."""
    with pytest.raises(ConfigurationError, match="longest_lease of at least 31 s"):
        Lock(store, "a", lease=31.0).acquire()
    assert not store.inspect("a").holders
    with Lock(store, "a", lease=LEASE):
        pass


# --- asyncio --------------------------------------------------------------------------------------


def stores(servers):
    return AsyncQuorumStore(servers.urls, timeout=TIMEOUT, longest_lease=LEASE)


def test_tasks_and_threads_want_the_same_quorum_lock(servers, store):
    """Two of five dead: a task holds, a thread does not get it; then the other way round."""
    kill(servers, store, name="a", how_many=2)
    thread = Lock(store, "a", lease=LEASE)

    async def scene():
        async with stores(servers) as tasks:
            lock = AsyncLock(tasks, "a", lease=LEASE)
            async with lock:
                await lock.ensure_held()
                assert not thread.acquire(blocking=False)
            assert thread.acquire(blocking=False)
            assert not await lock.acquire(blocking=False)
            waits = asyncio.ensure_future(AsyncLock(tasks, "a", lease=LEASE, renew=False).acquire())
            await asyncio.to_thread(eventually, lambda: store.inspect("a").waiting)
            thread.release()
            assert await waits

    asyncio.run(scene())


def test_a_cancelled_task_leaves_no_vote(servers, store):
    """Wherever it is cancelled."""

    async def scene():
        async with stores(servers) as tasks:
            for pause in (0, 0.001, 0.002, 0.004, 0.008, 0.012):
                lock = AsyncLock(tasks, "a", lease=LEASE, task_local=False)
                task = asyncio.ensure_future(lock.acquire())
                await asyncio.sleep(pause)  # somewhere on the way
                if task.cancel():
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    await lock.release()
                while loop_tasks.tasks:  # a cancelled request may still be on its way
                    await asyncio.wait(loop_tasks.tasks)
                assert not (await tasks.inspect("a")).holders

    asyncio.run(scene())
    assert not any(servers.votes("a"))


def test_a_loop_that_ends_while_a_server_is_silent_leaves_no_task(servers, store, monkeypatch):
    """Formerly Ctrl-C under a lock gave ``Task was destroyed but it is pending`` and tracebacks."""
    others = Servers(servers[1:])
    for kind in (QuorumStore, AsyncQuorumStore):
        monkeypatch.setitem(kind.__init__.__kwdefaults__, "timeout", IMPATIENT)

    async def work():
        async with AsyncLock(clients, "a", lease=LEASE):
            servers[0].pause()
            await asyncio.Event().wait()

    async def make_clients():
        return [redis.asyncio.Redis.from_url(url) for url in servers.urls]

    async def close():
        for client in clients:
            await client.aclose()

    with closing(asyncio.new_event_loop()) as loop:
        clients = loop.run_until_complete(make_clients())
        held = loop.create_task(work())
        holds = asyncio.to_thread(eventually, lambda: any(others.votes("a")))
        loop.run_until_complete(holds)
        held.cancel()  # and what follows, as asyncio.run does
        loop.run_until_complete(asyncio.wait({held}))
        loop.run_until_complete(loop.shutdown_asyncgens())
        left = asyncio.all_tasks(loop)
        servers[0].resume()
        loop.run_until_complete(close())
        loop.run_until_complete(loop.shutdown_default_executor())
    assert not left
    assert not any(others.votes("a"))


def test_an_unexpected_error_is_reported_once(servers, store, caplog):
    """Formerly the log had ``Task exception was never retrieved``."""
    no_earlier_garbage(caplog)

    async def broken(*_):
        raise RuntimeError("attached to a different loop")

    async def scene():
        async with stores(servers) as tasks:
            for node in tasks.nodes:
                node.server_state = broken
            with pytest.raises(BackendUnreachable, match="different loop"):
                await tasks.check()

    asyncio.run(scene())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_asyncio_is_not_given_urls(servers):
    """Their connections would never be closed."""
    with pytest.raises(ConfigurationError, match="AsyncQuorumStore"):
        AsyncLock(servers.urls, "a")
