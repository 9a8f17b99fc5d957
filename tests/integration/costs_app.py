"""Tasks with rates that count costs."""

import os

from celery import Celery

from celery_singleton_lock import LockedTask, Rate

URL = os.environ["CELERY_RESULT_BACKEND"]
app = Celery("costs", broker=os.environ["CELERY_BROKER_URL"], backend=URL)
app.conf.singleton_lock_backend = URL


def any_number(lock, rate, **options):
    return app.task(
        base=LockedTask, bind=True, lock_key=lock, lock_limit=None, lock_rate=rate, **options
    )


@any_number("llm", ["500/h", Rate("1000/h", cost="{tokens}")])
def ask(self, tokens, used=None):
    if used is not None:
        self.lock.charge(used - tokens)
    return tokens


@any_number("words", Rate("3600/h", kind="smooth", burst=100, cost=lambda text: 2 * len(text)))
def translate(self, text):
    return text.upper()


@any_number("llm", Rate("5/h", cost=1))
def lower(self):
    return "done"


@app.task(base=LockedTask, bind=True, lock_keys=["a", "b"])
def pair(self):
    self.lock.charge(1)


@app.task(bind=True)
def plain(self):
    return 7
