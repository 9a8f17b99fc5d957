"""``manage book ACCOUNT AMOUNT``: enter an amount, and have it settled after the commit."""

import json

from django.core.management.base import BaseCommand
from django.db import transaction

from integration.site.ledger.models import Entry
from integration.site.ledger.tasks import settle, settle_plainly


class Command(BaseCommand):
    """Print what happened, as JSON."""

    def add_arguments(self, parser):
        parser.add_argument("account")
        parser.add_argument("amount", type=int)
        parser.add_argument("--rollback", action="store_true")
        parser.add_argument("--eager", action="store_true")

    def handle(self, *_, account, amount, rollback, eager, **__):
        try:
            with transaction.atomic():
                entry = Entry.objects.create(account=account, amount=amount)
                settle.delay_on_commit(entry.pk, account)
                task_id = f"settle-{amount}"
                settle_plainly.apply_async_on_commit((entry.pk, account), task_id=task_id)
                if rollback:
                    raise InterruptedError
        except InterruptedError:
            return json.dumps({"rolled back": account})
        told = {"entry": entry.pk}
        if eager:
            told["eager"] = settle.apply((entry.pk, account)).get()
        return json.dumps(told)
