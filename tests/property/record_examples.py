"""Look anew for the holes that were found once, and keep their shortest programs.

``python -m tests.property.record_examples``; wanted when the moves have changed. Each hole is opened again by
a mutant for that, and the real scripts are shown to have closed it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from celery_singleton_lock.demo.redis_server import RedisServer, find_provider
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
