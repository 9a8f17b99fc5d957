"""Four calls of 400 tokens for each of two customers; the API is busy for one of them."""

from __future__ import annotations

import time

from tasks import api, ask

began = time.time()
api.delete("refused:globex")
api.set("busy:globex", 1, ex=3)
calls = {name: [ask.delay(name, 400) for _ in range(4)] for name in ("acme", "globex")}
for name, results in calls.items():
    after = sorted(result.get() - began for result in results)
    print(f"{name:7} after", *(f"{seconds:.1f}" for seconds in after), "s")
print("refused by the API:", int(api.get("refused:globex") or 0))
