"""Fakes of what the dispatcher calls, and what a pool would do to a request."""

from __future__ import annotations

from types import SimpleNamespace

from billiard.einfo import ExceptionInfo

from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.worker.agent_commands import Park
from celery_singleton_lock.worker.not_started import NotStarted


class CallRecorder:
    """Notes each call as (name, arguments)."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def names(self):
        return [name for name, _, _ in self.calls]

    def commands(self, kind):
        put = [args[0] for name, args, _ in self.calls if name == "put"]
        return [command for command in put if isinstance(command, kind)]

    def parked(self):
        return [command.request for command in self.commands(Park)]


def take(parts, request):
    """A child has taken the lock."""
    request.on_accepted(4711, 0.0)
    parts.dispatcher.pool_callbacks.on_notice(request.lock_header.token)


def end(request):
    """A child has told of a success."""
    request.on_success((0, None, 0.1))


def turn(request, outcome=Outcome.PARK):
    """A child was turned away."""
    request.on_failure(SimpleNamespace(exception=NotStarted(outcome, "held"), traceback=""))


def die(request, error):
    """A child is gone."""
    try:
        raise error
    except type(error):
        request.on_failure(ExceptionInfo())


def hold_lock(parts):
    """A task of this worker holds its lock, so later ones are parked."""
    holder = parts.message("early", "a")
    parts.dispatcher(holder)
    take(parts, holder)


def deliver(parts, task="early", key="a", verdict="granted"):
    request = parts.message(task, key)
    delivery = Delivery(f"k:{key}", "token.0", 7, b"", verdict, 1.5)
    parts.dispatcher.deliveries.deliver(delivery, request)
    return request


def fail_always(_pool):
    raise RuntimeError


def deliver_as(parts, key):
    request = parts.message("early", key)
    parts.dispatcher.deliveries.deliver(Delivery(f"k:{key}", f"{key}.0", 7, b""), request)
    return request
