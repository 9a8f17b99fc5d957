"""Stands in for click_repl in workers under test, of which none opens the shell of ``celery amqp``.

Celery's command line imports it at every start, and with it prompt_toolkit, which took a third of
the processor time of a start; the suite starts some hundreds of workers.
"""


def register_repl(group, name="repl"):
    """Offer no shell."""
