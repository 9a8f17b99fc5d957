"""Workers with their locks behind Sentinel, during failovers.

A failover takes two to four seconds. A replicated lease survives it.
"""

from __future__ import annotations

import pytest

from celery_singleton_lock.config.redis_url import parse_backend_url
from celery_singleton_lock.store.connect import connect
from celery_singleton_lock.store.redis.sync import RedisStore
from integration.book import Book
from support.sentinel import SentinelSet
from support.waiting import eventually, never

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.needs_real_redis("replication"),
]

LEASE = 15.0
SECRET = "p-ss-w0rd"


@pytest.fixture
def servers(make_redis, tmp_path):
    with SentinelSet(make_redis, tmp_path, SECRET) as servers:
        yield servers


@pytest.fixture
def book(redis_url, servers, tmp_path):
    conf = {
        "singleton_lock_backend": servers.url,
        "singleton_lock_backend_options": servers.options,
        "singleton_lock_lease": LEASE,
    }
    with Book(redis_url, tmp_path, conf=conf) as book:
        follow(book, servers)
        yield book


def follow(book, servers):
    """Let the test look at the locks wherever the master is."""
    book.client = connect(parse_backend_url(servers.url), servers.options, patience=1.0)
    book.store = RedisStore(book.client)


def kill(servers):
    servers.master().kill()


def order_failover(servers):
    servers.failover()


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("how", [order_failover, kill])
def test_t24_a_failover_in_mid_run(book, servers, pool, how):
    """The holder keeps its lock, the parked run after it in order, new ones too; fences grow."""
    with book.worker(pool=pool) as worker:
        first = book.start_holder("a", 1)
        parked = [book.send("act", "a", n) for n in (2, 3)]
        book.await_waiting("a", 2)
        servers.await_replicated()
        old = servers.master()
        how(servers)
        assert book.value(book.send("plain", "p", 1)) == 1
        servers.await_promotion(old)
        never(lambda: len(book.starts("a")) > 1, during=1)
        book.open("a-1")
        assert [book.value(r) for r in (first, *parked)] == [1, 2, 3]
        assert book.value(book.send("act", "a", 4)) == 4
        fences = [start["fence"] for start in book.starts("a")]
        assert (book.order("a"), book.peak("a")) == ([1, 2, 3, 4], 1)
        assert fences == sorted(set(fences))
        book.await_free("a")
        assert worker.is_running
        assert "was lost" not in worker.log()
        assert SECRET not in worker.log()


@pytest.mark.full
def test_t24_l30_a_failover_loses_only_unreplicated_writes(book, servers):
    """What the replica never got is gone, and that is all: the bound of docs/redis.md.

    Kept: what was replicated. Lost: a grant (the holder hears of it, and its fencing token is the
    lower one), a parked task, which is reported, and the end of another, which does not run again.
    """
    with book.worker(concurrency=4) as worker:
        kept = book.start_holder("kept", 1)
        kept_parked = book.send("act", "kept", 2)
        book.await_waiting("kept", 1)
        ended = book.start_holder("ended", 1)
        ended_parked = book.send("act", "ended", 2)
        book.await_waiting("ended", 1)
        servers.await_replicated()
        old = servers.master()
        new = servers.other(old)
        new.pause()
        with old.client() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "replica")
        lost = book.send("act", "lost", 1, hold="lost-1")
        fence = book.started(lost)["fence"]
        lost_parked = book.send("act", "lost", 2)
        with old.client() as admin:
            eventually(lambda: admin.keys("csl:*lost*:bodies"), 5, "the second is parked")
        eventually(lambda: book.unacked() == 0, 5, "it is acknowledged")
        book.open("ended-1")
        assert [book.value(each) for each in (ended, ended_parked)] == [1, 2]
        old.kill()
        new.resume()
        servers.await_promotion(old)
        worker.await_log("The lock 'k:lost' was lost", LEASE + 2)
        again = book.send("act", "lost", 3)
        assert book.value(again) == 3
        assert book.starts("lost", n=3)[0]["fence"] > fence
        for gate in ("kept-1", "lost-1"):
            book.open(gate)
        assert [book.value(r) for r in (kept, kept_parked, lost)] == [1, 2, 1]
        assert (book.order("kept"), book.peak("kept")) == ([1, 2], 1)
        assert book.state(lost_parked) == "PENDING"
        assert book.order("lost") == [1, 3]
        worker.await_log("has lost data", 15)
        (told,) = [line for line in worker.log().splitlines() if "has lost data" in line]
        assert "run id" in told
        assert lost_parked in told
        assert not any(each in told for each in (kept, kept_parked, lost, ended, ended_parked))
        book.await_free("lost")
        book.await_free("ended", LEASE + 5)
        assert book.order("ended") == [1, 2]
        assert "'k:kept' was lost" not in worker.log()


@pytest.mark.full("quarantine")
def test_l30_a_quarantine_keeps_the_next_task_back_until_the_lost_lease_has_ended(
    book, servers, settled
):
    """The lost grant's task has heard of it, and could have stopped, before another one starts."""
    conf = {"singleton_lock_quarantine": True, "singleton_lock_on_lost": "abort"}
    with book.worker(concurrency=4, conf=conf) as worker:
        assert book.value(book.send("act", "other", 0)) == 0
        servers.await_replicated()
        old = servers.master()
        new = servers.other(old)
        new.pause()
        with old.client() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "replica")
        lost = book.start_holder("lost", 1)
        old.kill()
        new.resume()
        servers.await_promotion(old)
        again = book.send("act", "lost", 2)
        worker.await_log("The lock 'k:lost' was lost", LEASE + 2)
        assert book.value(again, 3 * LEASE) == 2
        since = book.starts("lost", n=2)[0]["t"] - book.starts("lost", n=1)[0]["t"]
        assert since > LEASE
        assert book.peak("lost") == 1 or book.state(lost) != "PENDING"
        book.open("lost-1")
        book.await_free("lost")


@pytest.fixture
def settled(servers):
    """Both servers know a master that has served for a while."""
    with servers.master().client() as admin:
        run = admin.info("server")["run_id"]
        noted = {"run": run, "since": 0, "till": 0, "longest": round(LEASE * 1000)}
        admin.hset("csl:fleet:server", mapping=noted)


@pytest.mark.full
def test_l30_min_replicas_to_write_refuses_what_a_failover_could_lose(book, servers):
    """Without its replica the master takes no lock and parks nothing: the broker keeps all."""
    master = servers.master()
    with master.client() as admin:
        admin.config_set("min-replicas-to-write", 1)
        admin.config_set("min-replicas-max-lag", 1)
    with book.worker() as worker:
        assert book.value(book.send("act", "a", 0)) == 0
        replica = servers.other(master)
        replica.pause()
        with master.client(decode_responses=True) as admin:
            eventually(lambda: admin.info()["min_slaves_good_slaves"] == 0, 5)
        waiting = [book.send("act", "a", n) for n in (1, 2)]
        assert book.value(book.send("plain", "p", 1)) == 1
        never(lambda: len(book.starts("a")) > 1, during=1)
        eventually(lambda: book.unacked() == 2)
        replica.resume()
        assert [book.value(r) for r in waiting] == [1, 2]
        assert book.order("a") == [0, 1, 2]
        assert "NOREPLICAS" in worker.log()


@pytest.mark.full
def test_locks_use_the_sentinel_broker_by_default(servers, tmp_path):
    """``broker_url`` and ``result_backend`` as Celery writes them: the locks' Redis follows."""
    conf = {
        "broker_transport_options": servers.options,
        "result_backend_transport_options": servers.options,
    }
    # The dead address comes last: kombu would ask it first, for seconds, for each connection.
    url = ";".join(reversed(servers.url.split(";")))
    with Book(url, tmp_path, lock_url=servers.servers[0].url, conf=conf) as book:
        follow(book, servers)
        with book.worker() as worker:
            first = book.start_holder("a", 1)
            second = book.send("act", "a", 2)
            book.await_waiting("a", 1)
            book.open("a-1")
            assert [book.value(first), book.value(second)] == [1, 2]
            book.await_free("a")
            assert "locks live in Redis" in worker.log()
            assert SECRET not in worker.log()


def test_a_sentinel_url_without_master_name_stops_the_worker(redis_url, servers, tmp_path):
    """The error names the setting; the password stays hidden."""
    conf = {"singleton_lock_backend": servers.url}
    with Book(redis_url, tmp_path, conf={}) as book:
        worker = book.worker(conf=conf).start(wait=False)
        assert worker.wait() != 0
        assert 'singleton_lock_backend_options = {"master_name"' in worker.log()
        assert SECRET not in worker.log()
