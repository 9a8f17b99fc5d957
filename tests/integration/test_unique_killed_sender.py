"""A sender that is killed at any moment leaves no duplicate without a message."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.unique_app import make_app, sending

KILLS = 1000
SLOWEST = 0.03
"""Seconds from the beginning of its call after which a sender is killed at the latest."""


def send_in_a_process(url, month):
    """Return the pid of a process that now sends one call."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            task = make_app(url).tasks["done"]
            os.write(tell, b"!")
            task.delay(month, "first")
        finally:
            os._exit(0)
    os.read(told, 1)
    os.close(told)
    os.close(tell)
    return pid


def ids_with_the_broker(client):
    return {json.loads(raw)["headers"]["id"] for raw in client.lrange("celery", 0, -1)}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_killed_between_announcement_and_confirmation(redis_url, redis_client):
    with sending(make_app(redis_url)) as app:
        app.tasks["done"].delay("first", "imports what is needed")
    dice, states = random.Random(20), set()
    for number in range(KILLS):
        pid = send_in_a_process(redis_url, f"m{number}")
        time.sleep(dice.uniform(0, SLOWEST))  # the moment of the kill, which is what is tried
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        states |= states_of(redis_client, f"m{number}")
    sent = ids_with_the_broker(redis_client)
    assert states == {"pending", "sent"}, "some were killed before they had sent, and some later"

    with sending(make_app(redis_url)) as app, ThreadPoolExecutor(20) as pool:
        task = app.tasks["done"]
        results = list(pool.map(lambda n: task.delay(f"m{n}", "second"), range(KILLS)))
    assert {each.id for each in results if each.duplicate} <= sent
    sent = ids_with_the_broker(redis_client)
    assert {each.id for each in results} <= sent
    assert 0 < sum(each.duplicate for each in results) < KILLS


def states_of(client, month):
    entries = client.keys(f"*report:{month}:unique:done:call")
    return {json.loads(client.get(entry))["state"] for entry in entries}
