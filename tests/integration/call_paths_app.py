"""The task book, and tasks that are called in other ways: shared, pydantic, recorded signals.

Two apps: ``celery -A integration.call_paths_app:app`` and ``…:other``. They use the same broker and
the same Redis for locks, and different queues.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Task, shared_task, signals

from celery_singleton_lock import LockedTask, current_lock
from integration.taskbook import Journal, build

try:
    from pydantic import BaseModel
except ImportError:  # then its tests are skipped
    BaseModel = None  # type: ignore[assignment,misc]

HEARD = (
    "task_received",
    "task_prerun",
    "task_postrun",
    "task_success",
    "task_failure",
    "task_retry",
    "task_revoked",
)

folder = os.environ["BOOK_FOLDER"]
conf = json.loads(os.environ.get("BOOK_CONF", "{}"))
journal = Journal(folder)


@shared_task(bind=True, base=LockedTask, name="shared", lock_key="k:{key}")
def shared(self, key: str, n: int = 0, hold: str | None = None) -> str:
    """Note which app runs it, and under which lock."""
    facts = {"id": self.request.id, "key": key, "n": n, "lock": current_lock().name}
    journal.note("start", fence=current_lock().fencing_token, app=self.app.main, **facts)
    if hold:
        journal.await_gate(hold)
    journal.note("end", fence=current_lock().fencing_token, **facts)
    return self.app.main


def mirror(self, key: str, n: int = 0, end: str = "return") -> str:
    """Note all that the task can see of its request."""
    seen = {name: value for name, value in vars(self.request).items() if not name.startswith("_")}
    facts = {"id": self.request.id, "key": key, "n": n, "task": self.name}
    options = json.loads(json.dumps(self.request.as_execution_options(), default=str))
    seen = json.loads(json.dumps(seen, default=str))
    journal.note(
        "mirror", seen=seen, options=options, state=self.AsyncResult(facts["id"]).state, **facts
    )
    if end == "raise":
        raise ValueError(end)
    if end == "retry" and not self.request.retries:
        raise self.retry(countdown=0)
    return "x" * 2000


def make(queue: str, name: str) -> Any:
    """Return an app with the book's tasks and the shared one, on a queue of its own."""
    made = build(os.environ["CELERY_BROKER_URL"], os.environ["CELERY_RESULT_BACKEND"], folder, conf)
    made.main = name
    declare = {"bind": True, "shared": False}
    made.task(base=Task, name="mirror_plain", **declare)(mirror)
    made.task(base=LockedTask, name="mirror", lock_key="k:{key}", **declare)(mirror)
    for policy in ("skip", "fail"):
        made.task(
            base=LockedTask,
            name=f"mirror_{policy}",
            lock_key="k:{key}",
            lock_on_conflict=policy,
            ignore_result=True,
            **declare,
        )(mirror)
    made.conf.task_default_queue = queue
    return made


app = make("celery", "app")
other = make("other", "other")

if BaseModel is not None:

    class Order(BaseModel):
        """What a pydantic task gets and returns."""

        account: str
        n: int = 0
        hold: str | None = None

    for each in (app, other):

        @each.task(
            name="pydantic",
            bind=True,
            base=LockedTask,
            pydantic=True,
            shared=False,
            lock_key="k:{order[account]}",
        )
        def settle(self, order: Order) -> Order:
            """Return the order, as a model."""
            assert isinstance(order, Order)
            facts = {"id": self.request.id, "key": order.account, "n": order.n}
            fence = current_lock().fencing_token
            journal.note("start", fence=fence, lock=current_lock().name, **facts)
            if order.hold:
                journal.await_gate(order.hold)
            journal.note("end", fence=fence, **facts)
            return order


def _hear(name: str) -> None:
    """Note each signal of this name, in whichever process it comes."""

    def note(sender: Any = None, task_id: str | None = None, request: Any = None, **_: Any) -> None:
        about = request or sender.request  # task_success names its sender alone
        journal.note("signal", signal=name, id=task_id or about.id)

    getattr(signals, name).connect(note, weak=False)


for signal in HEARD:
    _hear(signal)
