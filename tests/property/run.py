"""Look for broken invariants for longer: ``python -m tests.property.run --steps 200000``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import HealthCheck, Phase, settings

from celery_singleton_lock.demo.redis_provider import find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from support.script_model import outcomes
from support.script_model.invariants import InvariantBroken, check
from support.script_model.kept_examples import FOLDER, shrunk, write
from support.script_model.machine import machine_on
from support.script_model.moves import walk
from support.script_model.world import World

WALK = 150
ENOUGH = 20_000
"""Steps after which each outcome must have been seen."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="calls of a verb, about")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run")
    parser.add_argument(
        "--by",
        choices=("walk", "hypothesis"),
        default="walk",
        help="walk: more steps in a second; hypothesis: found histories are shrunk",
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"--by {options.by} --seed {seed} --steps {options.steps}", flush=True)
    began = time.monotonic()
    with RedisServer(find_provider()) as server, server.client(decode_responses=False) as client:
        look = by_walk if options.by == "walk" else by_hypothesis
        tally: Counter[str] = Counter()
        steps = look(client, seed, options.steps, tally)
    if not steps:
        return 1
    print(f"{steps} steps in {time.monotonic() - began:.0f} s; all invariants held")
    print("What came of them:", *outcomes.table(tally, steps), sep="\n")
    blind = outcomes.unseen(tally) if steps >= ENOUGH else []
    if blind:
        print("The search never met:", *blind, sep="\n  ")
    return 1 if blind else 0


def by_walk(client, seed: int, most: int, tally: Counter[str]) -> int:
    steps = 0
    while steps < most:
        world = World(client, check, watch=partial(outcomes.count, tally))
        try:
            walk(world, seed, WALK)
        except InvariantBroken as found:
            print("\n".join(world.history))
            print(f"walk {seed}, step {world.steps}: {found}")
            path = FOLDER / f"found_by_seed_{seed}.json"
            shorter = shrunk(client, world.played, found.invariant)
            write(path, str(found), found.invariant, shorter)
            print(f"{len(shorter)} moves show it: {path}. Name it among the HOLES, and close it.")
            return 0
        steps += world.steps
        seed += 1
        if seed % 100 == 0:
            print(f"{steps} steps, next seed {seed}", flush=True)
    return steps


def by_hypothesis(client, seed: int, most: int, tally: Counter[str]) -> int:
    each = 60
    how = settings(
        max_examples=max(1, most // 45),
        stateful_step_count=each,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    return machine_on(client, tally)(how, seed)


if __name__ == "__main__":
    sys.exit(main())
