"""Greenlets that are killed, or reach their time limit, while they wait to acknowledge."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from celery_singleton_lock.worker.pools import GREEN

ROUNDS = 30

SCENE = """
import random
import sys
if sys.argv[1] == "gevent":
    from gevent import monkey; monkey.patch_all()
    from gevent import Timeout, joinall, kill, sleep, spawn
    def join(greenlets):
        joinall(greenlets, timeout=5)
        return sum(not each.dead for each in greenlets)
else:
    import eventlet; eventlet.monkey_patch()
    from eventlet import Timeout, kill, sleep, spawn
    def join(greenlets):
        for _ in range(500):
            if all(each.dead for each in greenlets):
                break
            sleep(0.01)
        return sum(not each.dead for each in greenlets)
from celery_singleton_lock.worker.turn_at_broker import ACKS_AT_ONCE, TurnAtBroker
random.seed(1)
turn, seen, busy = TurnAtBroker(sys.argv[1]), dict(asked=0, began=0, ended=0, most=0), []

def acknowledge(limit):
    try:
        with Timeout(limit):
            seen["asked"] += 1
            with turn():
                seen["began"] += 1
                busy.append(None)
                seen["most"] = max(seen["most"], len(busy))
                try:
                    sleep(0.0005)
                finally:
                    busy.pop()
    except Timeout:
        seen["ended"] += 1

for number in range(int(sys.argv[2])):
    greenlets = [spawn(acknowledge, random.uniform(0.001, 0.02)) for _ in range(100)]
    sleep(0.003)
    for each in random.sample(greenlets, 20):
        kill(each)
    left = join(greenlets)
    if left:
        break
print(left, seen["asked"] - seen["began"], seen["most"] - ACKS_AT_ONCE, seen["ended"] > 0)
"""


@pytest.mark.parametrize("pool", GREEN)
def test_greenlets_that_end_while_they_wait_to_acknowledge_acknowledge_first(pool):
    """Otherwise a worker that has met some of them receives no message any more."""
    if find_spec(pool) is None:  # an import of eventlet here would warn of later forks
        pytest.skip(f"{pool} is not installed")
    command = [sys.executable, "-W", "ignore", "-c", SCENE, pool, str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split("\n")[0] == "0 0 0 True"
