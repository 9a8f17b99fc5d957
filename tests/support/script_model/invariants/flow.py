"""Invariants of rates and groups."""

from __future__ import annotations

from support.script_model.flow import (
    known_rates,
    opens_at,
    unclaimed,
)
from support.script_model.invariants.facts import (
    GRACE,
    UNCLAIMED,
    broken,
    grants,
    may_grant,
    reservations,
    touched,
)
from support.script_model.invariants.locks import ruled_for_ever
from support.script_model.snapshot import LockState
from support.script_model.world import Step, World


def no_grant_is_above_the_rate(world: World, step: Step) -> None:
    """Starts in a period, grants that are not claimed included, are at most the rate."""
    for name, ledger, before, after in touched(world, step):
        if not set(grants(before, after)) - reservations(after):
            continue
        rates, _ = known_rates(after, world.now)
        granted = list(unclaimed(after, world.now))
        for rate in rates:
            opens = opens_at(ledger.flow, [rate], granted, None, world.now_us)
            if opens > world.now_us:
                broken("rate", f"more than {rate} of {name} start: {ledger.flow}, {granted}")


def no_group_is_above_its_limit(world: World, step: Step) -> None:
    for name, _, before, after in touched(world, step):
        for token in grants(before, after):
            rec = after.record[token]
            most, group = rec.get("group_limit"), rec.get("group", "")
            valid = [t for t in after.valid(world.now) if after.record[t].get("group", "") == group]
            if most and len(valid) > int(most) and token not in reservations(after):
                broken("group", f"{valid} of {group} hold {name}, and its limit is {most}")


def flow_keys_match_what_stands(  # noqa: C901  # a list of facts
    world: World, step: Step
) -> None:
    """Lines, groups and counted grants, as I7 has it; keys that expire, or do not."""
    for name, _, _, after in touched(world, step):
        flow = after.flow
        if may_grant(step):
            counted = {t for t, at in flow.get("log", {}).items() if at >= UNCLAIMED}
            granted = {t for t, rec in after.record.items() if rec["state"] == "granted"}
            if known_rates(after, world.now)[1] and counted != granted & after.holders.keys():
                broken("I7", f"{counted} count as granted at {name}, and {granted} are")
        if "vt" in flow.get("", {}):
            _lines_match(name, after, world.ledgers[name].flow.expired_lines, world.now)
        elif [part for part in flow if part.startswith(("line:", "groups", "heads", "full"))]:
            broken("I7", f"{name} has no groups, and keeps {flow.keys()}")
        for part in flow:
            ends = after.ends.get(f"flow:{part}")
            if ends is None and not after.bodies and not ruled_for_ever(world.ledgers[name]):
                broken("I7", f"flow:{part} of {name} would stay for ever")
            if ends is not None and after.bodies and part in {"", "groups", "heads", "full"}:
                broken("I7", f"flow:{part} of {name} would expire beside a body")


def _lines_of(after: LockState, expired: set[str], now: int) -> dict[str, dict[str, float]]:
    """Return who waits by group, without clients that died and whose line has expired unswept."""
    lines: dict[str, dict[str, float]] = {}
    for token, place in after.queue.items():
        group = after.record[token].get("group", "")
        if group not in expired or after.deadlines.get(token, now) > now - GRACE:
            lines.setdefault(group, {})[token] = place
    return lines


def _lines_match(name: str, after: LockState, expired: set[str], now: int) -> None:
    lines = _lines_of(after, expired, now)
    found = {part[5:]: line for part, line in after.flow.items() if part.startswith("line:")}
    if found != lines:
        broken("I7", f"the lines of {name} are {found}, not {lines}")
    # The line of clients that died expires; the group is removed when it is next.
    here = {member[17:] for member in after.flow.get("groups", {})} - (expired - lines.keys())
    full = set(after.flow.get("full", {})) - (expired - lines.keys())
    if here & full or here | full != set(lines):
        broken("I7", f"groups of {name} are {here} and {full}, not {set(lines)}")
    heads = {member[17:] for member in after.flow.get("groups", {})}
    if set(after.flow.get("heads", {})) != heads:
        broken("I7", f"heads of {name} are {after.flow.get('heads')}, not {heads}")
    for group, line in lines.items():
        place, _ = min((place, token) for token, place in line.items())
        head = after.flow.get("heads", {}).get(group)
        if head is not None and head != f"{place:016.0f}:{group}":
            broken("I7", f"the head of {group} of {name} is {head}, not {place}")
    if set(after.flow.get("idle", {})) & set(lines):
        broken("I7", f"groups of {name} wait and are idle: {after.flow['idle']}")
