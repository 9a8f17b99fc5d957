"""All commands, and the group for ``celery locks``.

Exit status: 0: done. 1: not done, or not found. 2: wrong usage. 3: the locks' Redis or the broker
did not answer, or refused a command. 4 (``doctor``): no check failed, but one is unknown or warns.
"""

from __future__ import annotations

from typing import Final

import click

from celery_singleton_lock.cli.bulk_commands import (
    drain_command,
    export_command,
    import_command,
    purge_command,
)
from celery_singleton_lock.cli.change_commands import drop, promote, release
from celery_singleton_lock.cli.limit_commands import limit, pause, rate, reopen, resume
from celery_singleton_lock.cli.maintenance_commands import doctor, sweep
from celery_singleton_lock.cli.mode_commands import mode, report
from celery_singleton_lock.cli.options import Commands
from celery_singleton_lock.cli.show_commands import (
    audit,
    list_command,
    show,
    watch_command,
    why_command,
)
from celery_singleton_lock.cli.task_commands import (
    forget_call_command,
    tasks_command,
    try_command,
)

COMMANDS: Final = (
    tasks_command,
    try_command,
    list_command,
    show,
    why_command,
    watch_command,
    release,
    drop,
    promote,
    forget_call_command,
    purge_command,
    drain_command,
    export_command,
    import_command,
    pause,
    resume,
    reopen,
    limit,
    rate,
    report,
    mode,
    sweep,
    doctor,
    audit,
)


@click.group(
    cls=Commands, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
def locks() -> None:
    """Show and change the locks of this app's tasks."""
