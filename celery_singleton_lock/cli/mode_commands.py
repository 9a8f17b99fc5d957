"""Commands for lock modes: report, mode."""

from __future__ import annotations

import click

from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.observe_report import report_lines
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import agreed, as_json, reason
from celery_singleton_lock.cli.target import Target, with_target
from celery_singleton_lock.config.limits import MAX_COUNT
from celery_singleton_lock.core.lock_mode import ALL, MODES, OBSERVE, OFF
from celery_singleton_lock.message_text import meant

DECLARED = "declared"
"""Argument that removes a switch."""

OBSERVED = "(report of what was observed)"
"""Lock name of the audit entry."""


@click.command()
@click.option("--limit", "most", type=click.IntRange(1, MAX_COUNT), default=20, show_default=True)
@click.option("--reset", is_flag=True, help="Delete the observations after this report.")
@agreed
@as_json
@with_target
def report(target: Target, most: int, *, reset: bool, yes: bool, machine: bool) -> None:
    """Show which tasks in mode observe would have been blocked, and how long."""
    found = target.store.observations()
    if machine:
        render.as_json(found)
    else:
        render.show(report_lines(found, most=most))
    if reset:
        if not yes:
            render.ask("Delete the observations?")
        target.store.clear_observations()
        by = target.operator("reset")
        target.store.write_audit_entry(OBSERVED, by)
        target.announce(by, {OBSERVED: 1}, "reset")


@click.command()
@click.argument("mode", required=False, type=click.Choice([*MODES, DECLARED]))
@click.option("--task", default=ALL, help="Name of one task. Default: all tasks.")
@click.option(
    "--force",
    is_flag=True,
    help="Accept a name that no known locked task has, or workers of other brokers.",
)
@agreed
@reason
@as_json
@with_target
def mode(
    target: Target,
    mode: str | None,
    task: str,
    *,
    force: bool,
    yes: bool,
    why_text: str,
    machine: bool,
) -> None:
    """Show or switch the lock MODE of all tasks, or of one task, while workers run.

    "declared" removes a switch. The switch for all tasks can only relax the declared mode. Workers
    apply it within about a second. If the locks' Redis does not answer, use: celery -A YOUR_APP
    control lock_mode MODE.
    """
    if mode is not None:
        if not force:
            _refuse_unknown_task(target, task)
            if mode in {OBSERVE, OFF} and task == ALL:
                _refuse_other_applications(target)
        if mode in {OBSERVE, OFF} and not yes:
            whose = "All tasks" if task == ALL else f"Tasks {task}"
            told = f"{whose} run without their locks then, beside those that run now."
            render.say(f"{told} Parked ones start at once.", err=True)
            render.ask("Switch the mode?")
        by = target.operator("mode", why_text)
        target.store.switch(task, None if mode == DECLARED else mode)
        shown = f"(all tasks: {mode})" if task == ALL else f"(task {task}: {mode})"
        target.store.write_audit_entry(shown, by)
        target.announce(by, {shown: 1}, "mode")
    switches = dict(target.store.switches())
    if machine:
        return render.as_json(switches)
    if not switches:
        return render.say("No switch is set: each task uses its declared mode.")
    rows = [("all tasks" if name == ALL else name, switches[name]) for name in sorted(switches)]
    return render.show(render.table(("TASK", "MODE"), rows))


def _refuse_other_applications(target: Target) -> None:
    """Refuse if workers of another broker live: their tasks would run without their locks, too.

    Without an app, nothing tells which broker is meant, so all live workers must have the same.
    """
    live = sorted((name, about["realm"]) for name, about in target.store.workers().items())
    if not live:
        return
    realm = target.app.realm if target.app else live[0][1]
    others = [name for name, theirs in live if theirs != realm]
    if not others:
        return
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    whose = "this app" if target.app else "one application"
    msg = (
        f"the switch applies to all workers of this Redis, also to {others[0]!r}{more} of "
        "another broker, perhaps of another application. Nothing was switched. Switch tasks of "
        f"{whose} one by one with --task, or those of all applications with --force"
    )
    raise Refused(msg)


def _refuse_unknown_task(target: Target, task: str) -> None:
    """Refuse a name that no locked task has, since a mistyped name would have no effect."""
    if task == ALL or task in target.store.switches():
        return
    known = set(target.store.locked_tasks())
    if target.app is not None and task not in known:
        target.app.load_tasks()
        known |= target.app.extension.declared()
    if task not in known:
        msg = (
            f"{'no live worker' if target.app is None else 'neither a live worker nor the app'} "
            f"has a LockedTask {task!r}.{meant(task, known)} "
            "To switch its mode nevertheless: --force"
        )
        raise Refused(msg)
