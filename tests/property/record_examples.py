"""Search again for the defects that were found once, and record the shortest program for each.

Run ``python -m tests.property.record_examples`` when the moves have changed. A mutant brings each
defect back, and the real scripts must pass its program.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from celery_singleton_lock.demo.redis_provider import find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from support.script_model.kept_examples import HOLES, breaks, keep


def main() -> int:
    wanted = set(sys.argv[1:])
    with RedisServer(find_provider()) as server, server.client(decode_responses=False) as client:
        for hole in HOLES:
            if wanted and hole.file not in wanted:
                continue
            kept = keep(client, hole)
            closed = breaks(client, kept["moves"]) is None
            print(f"{hole.file}: {kept['breaks']} in {len(kept['moves'])} moves; {closed=}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
