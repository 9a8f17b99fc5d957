"""A dispatcher whose pool, broker and agent are fakes, which record their calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker.request import create_request_cls
from kombu.message import Message
from kombu.utils.json import dumps

from celery_singleton_lock import LockedTask
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.events import Observers
from celery_singleton_lock.worker.dispatch.dispatcher import Dispatcher
from celery_singleton_lock.worker.dispatch.header_factory import HeaderFactory
from celery_singleton_lock.worker.dispatch.notifier import Notifier
from celery_singleton_lock.worker.dispatch.task_leases import TaskLeases
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.request import LockedRequest
from support.dispatcher_fakes import (
    CallRecorder,
)


@pytest.fixture
def app():
    app = Celery("dispatcher", broker="memory://", backend="cache+memory://", set_as_current=False)

    def run(key, n=0):
        return n

    for name, options in {
        "early": {},
        "late": {"acks_late": True},
        "two": {"lock_limit": 2},
        "fails": {"lock_on_conflict": "fail"},
        "runs": {"lock_on_backend_error": "run"},
        "requeues": {"lock_on_conflict": "requeue", "lock_wait_timeout": 60},
    }.items():
        app.task(name=name, base=LockedTask, shared=False, lock_key="k:{key}", **options)(run)
    app.task(name="pair", base=LockedTask, shared=False, lock_keys=["k:{key}", "k:{n}"])(run)
    app.task(name="plain", shared=False)(run)
    app.finalize()
    app.conf.singleton_lock_backend = "redis://localhost:1/0"
    return app


@pytest.fixture
def parts(app):
    """A dispatcher, its agent, and what was sent to the pool."""
    extension, agent, sent, prefetch = install(app), CallRecorder(), [], []
    later = []
    place, notifier = ServerClock(), Notifier(Observers())
    header_factory = HeaderFactory(
        worker="w#1",
        place=place,
        rules=extension.options,
        of_call=extension.options_of_call,
        name_of=extension.name_of,
        computed=extension.computed,
        modes=Modes({}),
    )

    def forward(request):
        sent.append(request)
        if isinstance(request, LockedRequest):
            request.execute_using_pool(None)

    dispatcher = Dispatcher(
        header_factory=header_factory,
        rules=extension.options,
        forward=forward,
        commands=agent,
        leases=TaskLeases(agent, agent, agent.on_lost),
        backend_failed=agent.backend_failed,
        publish_at_exit=agent.publish_at_exit,
        notifier=notifier,
        prefetch=prefetch.append,
        after_pool=lambda call: later.append(call) if parts.waits_for_slot else call(),
    )

    def message(task, *args, request_id=None, canvas=None, **headers):
        tag = f"{len(made)}"
        made.append(tag)
        fields = {"id": request_id or f"id{tag}", "task": task, **headers}
        note = Message(
            body=dumps([args, {}, canvas or {}]),
            content_type="application/json", content_encoding="utf-8",
            headers=fields, delivery_info={"redelivered": headers.get("redelivered", False)},
        )  # fmt: skip
        pool = SimpleNamespace(apply_async=lambda *a, **k: None)
        cls = create_request_cls(LockedRequest, app.tasks[task], pool, "w", None, app=app)
        request = cls(
            note, app=app, task=app.tasks[task], hostname="w",
            on_ack=lambda *_: acked.append(request.id),
            on_reject=lambda *_: rejected.append(request.id),
        )  # fmt: skip
        return request

    made, acked, rejected = [], [], []
    parts = SimpleNamespace(
        waits_for_slot=False, later=later,
        dispatcher=dispatcher, agent=agent, sent=sent, prefetch=prefetch, message=message,
        acked=acked,
        rejected=rejected, place=place, notifier=notifier, header_factory=header_factory,
    )  # fmt: skip
    return parts
