"""``POST /api/locks/change``: changes of one lock or waiter, or of many."""

from __future__ import annotations

from typing import Any

from tornado.web import authenticated

from celery_singleton_lock.admin import Operator
from celery_singleton_lock.flower.changes import ChangeRequest, answer_of, parse_change
from celery_singleton_lock.flower.operator_handler import OperatorHandler
from celery_singleton_lock.flower.rows import LockRows


class ChangeApi(OperatorHandler):
    """Answers with a question; with ``"sure": true``, makes the change."""

    @authenticated
    async def post(self) -> None:
        """Send what the change would do, or what it has done."""
        if self.is_refused():
            return None
        try:
            wanted = parse_change(self.request.body)
        except ValueError as error:
            return self.refuse(400, str(error))
        by = self.operator(wanted.why).sets(wanted.to, wanted.seconds)
        found = await self.ask(lambda rows: self._answer(rows, wanted, by))
        if found is not None:
            self.finish(found)
        return None

    def _answer(self, rows: LockRows, wanted: ChangeRequest, by: Operator) -> dict[str, Any]:
        """Return the answer. Runs in a thread."""
        actions = self.locks.actions()
        changes = rows.changes(actions)
        if not wanted.sure:
            return changes.question(wanted)
        outcome = changes.carry_out(wanted, by)
        rows.expire()
        done = {name: number for name, number in outcome.done.items() if number}
        actions.announce(by, done, wanted.action)
        return answer_of(wanted, outcome, actions.untold)
