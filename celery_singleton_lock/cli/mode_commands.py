"""Commands for modes: report what was observed, and switch."""

from __future__ import annotations

import click

from celery_singleton_lock.admin.observe_report import report_lines
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import agreed, as_json, reason
from celery_singleton_lock.cli.target import Place, with_place
from celery_singleton_lock.core.lock_mode import ALL, MODES

DECLARED = "declared"
"""Stands for a mode where the switch is to be taken away."""

OBSERVED = "(report of what was observed)"
"""Stands in the audit for the name of a lock."""


@click.command()
@click.option("--limit", "most", type=click.IntRange(1), default=20, show_default=True)
@click.option("--reset", is_flag=True, help="Begin anew, after this report.")
@agreed
@as_json
@with_place
def report(place: Place, most: int, *, reset: bool, yes: bool, machine: bool) -> None:
    """What locks would have blocked, of tasks whose mode is observe."""
    found = place.store.observed()
    if machine:
        render.as_json(found)
    else:
        render.show(report_lines(found, most=most))
    if reset:
        if not yes:
            render.ask("Forget what was observed so far?")
        place.store.forget_observed()
        by = place.operator("reset")
        place.store.remark(OBSERVED, by)
        place.announce(by, {OBSERVED: 1}, "reset")


@click.command()
@click.argument("mode", required=False, type=click.Choice([*MODES, DECLARED]))
@click.option("--task", default=ALL, help="Name of one task; else all of them.")
@reason
@as_json
@with_place
def mode(place: Place, mode: str | None, task: str, *, why_text: str, machine: bool) -> None:
    """Show the switches; or switch the MODE of all tasks, or of one, while workers run.

    "declared" takes a switch away. The switch for all only relaxes. Workers hear of it within
    about a second, if the locks' Redis answers; else: celery -A YOUR_APP control lock_mode MODE.
    """
    if mode is not None:
        place.store.switch(task, None if mode == DECLARED else mode)
        shown = f"(all tasks: {mode})" if task == ALL else f"(task {task}: {mode})"
        by = place.operator("mode", why_text)
        place.store.remark(shown, by)
        place.announce(by, {shown: 1}, "mode")
    switches = dict(place.store.switches())
    if machine:
        return render.as_json(switches)
    if not switches:
        return render.say("No switch is set: each task has the mode that it declares.")
    rows = [("all tasks" if name == ALL else name, switches[name]) for name in sorted(switches)]
    return render.show(render.table(("TASK", "MODE"), rows))
