"""A stub of click_repl for workers under test, which never open the shell of ``celery amqp``.

Celery's command line imports click_repl, and with it prompt_toolkit, at every start. That took a
third of the CPU time of a start, and the suite starts some hundreds of workers.
"""


def register_repl(group, name="repl"):
    """Do nothing."""
