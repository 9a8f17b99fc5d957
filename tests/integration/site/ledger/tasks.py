"""Locked tasks with Django's ``delay_on_commit``."""

from celery import shared_task
from celery.contrib.django.task import DjangoTask

from celery_singleton_lock import LockedTask
from integration.site.ledger.models import Entry


class SiteTask(LockedTask, DjangoTask):
    """Locked, and sent when the transaction commits."""

    abstract = True


@shared_task(bind=True, base=SiteTask, lock_key="account:{account}")
def settle(self, entry_id, account):
    """Write the fencing token into the entry; it must be there, and committed."""
    return settled(self.lock, entry_id, account)


@shared_task(bind=True, base=LockedTask, lock_key="account:{account}")
def settle_plainly(self, entry_id, account):
    """Likewise, of a task that names one base class."""
    return settled(self.lock, entry_id, account)


def settled(lock, entry_id, account):
    """Return what the lock was, and the amount."""
    entry = Entry.objects.get(pk=entry_id, account=account)
    entry.fence = lock.fencing_token
    entry.save()
    return [lock.name, lock.held, entry.amount]
