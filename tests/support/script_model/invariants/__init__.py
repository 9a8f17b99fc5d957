"""The invariants: one function each, checked after every step.

A function takes the world (with its records, which do not depend on the keys) and the step (the
keys before and after it). It raises :class:`InvariantBroken` with its name.
"""

from __future__ import annotations

from collections.abc import Callable

from support.script_model.invariants.deliveries import (
    a_grant_goes_to_a_worker_with_a_free_slot,
    a_grant_is_passed_on_only_before_it_begins,
    a_grant_reaches_who_was_granted,
    answers_tell_what_the_keys_say,
    messages_leave_for_their_own_broker,
    neglected_tells_what_nobody_looks_at,
)
from support.script_model.invariants.facts import InvariantBroken as InvariantBroken
from support.script_model.invariants.flow import (
    flow_keys_match_what_stands,
    no_grant_is_above_the_rate,
    no_group_is_above_its_limit,
)
from support.script_model.invariants.ledgers import note
from support.script_model.invariants.locks import (
    i1_unexpired_holders_never_exceed_the_limit,
    i2_what_a_client_believes_the_server_keeps,
    i3_fences_grow_in_grant_order,
    i4_full_or_no_live_waiter,
    i5_grants_follow_the_line,
    i6_nobody_holds_and_waits,
    i7_records_match_what_stands,
    i8_a_parked_body_stays_until_its_task_is_settled,
    i9_the_lock_is_free_within_its_longest_lease,
    i10_asking_again_changes_nothing,
    i11_extend_never_creates,
    i12_somebody_looks_again_in_time,
)
from support.script_model.invariants.tasks import (
    a_full_redis_refuses_whole_or_not_at_all,
    a_lock_stays_taken_after_a_success,
    a_paused_lock_is_granted_to_nobody,
    a_reservation_is_kept_for_its_attempt,
    a_wait_lasts_as_long_as_was_asked,
    an_attempt_is_here_once,
    every_token_is_granted_once,
    settled_attempts_do_not_come_back,
    who_is_rejected_does_not_run,
    who_is_replaced_makes_room_and_does_not_run,
    who_is_revoked_does_not_run,
    who_keeps_coming_back_lets_others_pass,
)
from support.script_model.world import Step, World

ALL: tuple[Callable[[World, Step], None], ...] = (
    i1_unexpired_holders_never_exceed_the_limit,
    i6_nobody_holds_and_waits,
    i2_what_a_client_believes_the_server_keeps,
    i3_fences_grow_in_grant_order,
    i4_full_or_no_live_waiter,
    i5_grants_follow_the_line,
    i7_records_match_what_stands,
    i8_a_parked_body_stays_until_its_task_is_settled,
    i9_the_lock_is_free_within_its_longest_lease,
    i10_asking_again_changes_nothing,
    i11_extend_never_creates,
    i12_somebody_looks_again_in_time,
    every_token_is_granted_once,
    settled_attempts_do_not_come_back,
    an_attempt_is_here_once,
    a_reservation_is_kept_for_its_attempt,
    a_paused_lock_is_granted_to_nobody,
    a_lock_stays_taken_after_a_success,
    who_is_replaced_makes_room_and_does_not_run,
    who_is_revoked_does_not_run,
    who_is_rejected_does_not_run,
    who_keeps_coming_back_lets_others_pass,
    a_wait_lasts_as_long_as_was_asked,
    a_grant_reaches_who_was_granted,
    a_grant_goes_to_a_worker_with_a_free_slot,
    a_grant_is_passed_on_only_before_it_begins,
    messages_leave_for_their_own_broker,
    neglected_tells_what_nobody_looks_at,
    answers_tell_what_the_keys_say,
    no_grant_is_above_the_rate,
    no_group_is_above_its_limit,
    flow_keys_match_what_stands,
)


def check(world: World, step: Step) -> None:
    """Take note of the step in the ledgers, then check every invariant."""
    a_full_redis_refuses_whole_or_not_at_all(world, step)
    if step.refused:
        return  # all is as it was
    if step.lock:
        note(world, step)
    for invariant in ALL:
        invariant(world, step)
