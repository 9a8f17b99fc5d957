"""Transfers between accounts: each locks both accounts."""

from __future__ import annotations

import os
import random
import re
from contextlib import ExitStack

import pytest
from celery import Celery

from integration.book import SAFE_LEASE, only
from integration.transfers_app import SETTINGS
from support.redelivery import redelivery_after
from support.waiting import eventually

ACCOUNTS, OPENED = 50, 1000
MANY = int(os.environ.get("CSL_TEST_MANY", "300"))
RECEIVED = re.compile(r"Task transfer\[(\S+)\] received")


@pytest.fixture(scope="module")
def lease():
    """It does not end while a process stands still."""
    return SAFE_LEASE


@pytest.fixture
def bank(own_book):
    """The book's Redis, with the accounts opened."""
    own_book.broker.mset({f"balance:{n}": OPENED for n in range(ACCOUNTS)})
    return own_book.broker


def send(book, number, *, dies=()):
    """Send transfers between random accounts, now and then of one to itself; return their ids."""
    chance = random.Random(number)  # the same each time
    ids = []
    with Celery("bank", broker=book.url, set_as_current=False) as app:
        app.conf.update(SETTINGS)
        with app.producer_pool.acquire() as producer:
            for n in range(number):
                accounts = [chance.randrange(ACCOUNTS) for _ in range(2)]
                sent = (*accounts, chance.randrange(1, 100))
                options = {"dies": True} if n in dies else {}
                ids.append(app.send_task("transfer", sent, options, producer=producer).id)
    return ids


def sum_of(bank):
    """Return what all accounts have together."""
    return sum(int(bank.get(f"balance:{n}")) for n in range(ACCOUNTS))


def await_done(book, bank, number):
    """Wait until all have run, and nothing is left of them anywhere."""
    eventually(
        lambda: bank.scard("done") == number,
        20 + number / 40,
        lambda: f"{number} transfers; {bank.scard('done')} done",
    )
    await_settled(book, bank)


def await_settled(book, bank):
    """Wait until nothing is left of them anywhere."""
    book.await_drained("celery", 20)
    eventually(lambda: not list(bank.scan_iter("csl:*:bodies")), 20, "nothing is parked")
    eventually(lambda: not list(bank.scan_iter("csl:*:holders")), 20, "nothing is held")


@pytest.mark.full
@only("prefork")
def test_L27_the_sum_of_all_accounts_is_exact_after_many_transfers(own_book, pool, bank):
    """By three workers, with a child killed now and then in mid-transfer; nothing hangs."""
    dies = range(20, MANY, MANY // 6)
    send(own_book, MANY, dies=dies)
    with ExitStack() as workers:
        for _ in range(3):
            worker = own_book.worker(app="integration.transfers_app", pool=pool, concurrency=3)
            workers.enter_context(worker)
        await_done(own_book, bank, MANY)
        assert len(list(bank.scan_iter("died:*"))) == len(dies)
    assert sum_of(bank) == ACCOUNTS * OPENED
    assert len({bank.get(f"balance:{n}") for n in range(ACCOUNTS)}) > 1


@only("prefork")
@pytest.mark.full
@pytest.mark.timeout(480)
def test_T7_transfers_survive_workers_that_are_killed(own_book, pool, bank):
    """One of three workers is killed and replaced, again and again; the sum is exact.

    Each transfer that a worker has received is done. (Kombu loses what is on its way to a worker
    that is killed, see tests/chaos/test_broker_gap.py.) The broker delivers after 5 s what a killed
    worker had not acknowledged: beside what is parked.
    """
    conf = {"broker_transport_options": redelivery_after(5)}
    sent = set(send(own_book, 2500, dies=range(50, 2500, 400)))
    fleet = []

    def start():
        options = {"app": "integration.transfers_app", "pool": pool, "concurrency": 3}
        fleet.append(own_book.worker(conf=conf, **options).start())

    def missing():
        return sent - {each.decode() for each in bank.smembers("done")}

    def all_done():
        return missing().isdisjoint(RECEIVED.findall("".join(worker.log() for worker in fleet)))

    for _ in range(3):
        start()
    while len(missing()) > 400 and len(fleet) < 25:
        left = len(missing())
        eventually(lambda left=left: len(missing()) < left, 30, "some progress")
        fleet[-3].kill()
        start()
    eventually(lambda: not own_book.queued() and all_done(), 60, lambda: f"{missing()} are done")
    await_settled(own_book, bank)
    assert len(missing()) < len(fleet)
    assert sum_of(bank) == ACCOUNTS * OPENED
