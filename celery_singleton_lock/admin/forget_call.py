"""Let a unique call be sent again after its message was lost (``lock_unique``)."""

from __future__ import annotations

from celery_singleton_lock.admin.force_release import Refused, has_done
from celery_singleton_lock.core.unique import EntryState
from celery_singleton_lock.store.operator.base import AdminStore, Operator


def forget_call(store: AdminStore, name: str, key: str, by: Operator) -> str:
    """Let a call be sent again. Writes an audit entry.

    Args:
        store: the store of the locks.
        name: name of the lock that the call takes.
        key: text that calls share if they are alike.
        by: the operator, for the audit.

    Returns:
        Id of the task that counted as sent until now.

    Raises:
        Refused: no call counts, or its task is parked or holds the lock.
        BackendError: Redis did not answer, or refused the command.
    """
    call = store.find_call(name, key)
    if call is None:
        msg = "no call like this one counts as sent, so the next one is sent"
        raise Refused(msg, name)
    if call.state is EntryState.PARKED_OR_HELD:
        msg = (
            f"task {call.task_id} is parked, or holds the lock, so its message is not lost. See "
            f"locks why {call.task_id}"
        )
        raise Refused(msg, name)
    if not (store.forget_call(name, key, by) or has_done(store, name, by)):
        msg = f"task {call.task_id} has just been parked, started or forgotten. Try again"
        raise Refused(msg, name)
    return call.task_id
