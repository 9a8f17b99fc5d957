"""Several locks of one task: in which order, with which limits, and what is refused."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from celery import Celery
from kombu.message import Message

from celery_singleton_lock import (
    ConfigurationError,
    LockedTask,
    LockNameError,
    current_locks,
)
from celery_singleton_lock.config.multi_lock_option import MOST, compile_names
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind
from celery_singleton_lock.core.lock_set import (
    Key,
    LockSet,
    Names,
    Part,
    in_order,
    lock_set_in,
    names_in,
    read,
)
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.lock_header import LockHeader, in_order_of_release, singles
from celery_singleton_lock.worker.lock_set_header import (
    begun_again,
    claim_in,
    onward,
    renewed,
    time_left,
    unanswered,
    with_lock_set,
)
from celery_singleton_lock.worker.message_codec import pack, unpack


def transfer(source, target, amount=0):
    """A task."""


def keys_of(lock_keys, *args, **kwargs):
    """Return the locks of a call, with their limits."""
    name = compile_names("transfer", transfer, lock_keys).name(args, kwargs)
    return limits_of(name) if isinstance(name, Names) else name


def limits_of(name):
    """Return the names of several locks, with their limits."""
    return tuple((key.name, key.limit) for key in name.keys)


ACCOUNTS = ["account:{source}", "account:{target}"]

# --- names ----------------------------------------------------------------------------------------


def test_L27_locks_are_taken_in_the_order_of_their_names_bytes():
    """However the task names them, and whatever the locale says of letters."""
    names = ["a", "B", "é", "z", "a1", "a:", "𐍈", "Ａ"]  # noqa: RUF001  # wide, on purpose
    expected = tuple((name, None) for name in sorted(names, key=lambda name: name.encode()))
    for order in itertools.islice(itertools.permutations(names), 50):
        assert limits_of(in_order(map(Key, order))) == expected
    assert keys_of(ACCOUNTS, 7, 3) == keys_of(ACCOUNTS, 3, 7)
    assert keys_of(ACCOUNTS, 3, 7) == (("account:3", None), ("account:7", None))


def test_equal_names_are_one_lock_as_if_lock_key_had_named_it():
    """A plain name: nothing of what several locks need is done for it."""
    name = in_order([Key("account:1"), Key("account:1")])
    assert (name, type(name)) == ("account:1", str)
    assert keys_of(ACCOUNTS, 4, 4) == "account:4"


def test_a_name_of_several_reads_as_that_of_the_first():
    """Whoever knows one lock only takes it for that one."""
    name = in_order([Key("b"), Key("a")])
    assert (name, str(name), names_in(name)) == ("a", "a", {"a", "b"})
    assert names_in("a") == {"a"}


def test_locks_have_limits_of_their_own_and_of_equal_names_the_lowest_counts():
    """A dict of templates; None is the task's lock_limit."""
    limits = {"account:{source}": 1, "account:{target}": 3, "api": 5}
    assert keys_of(limits, 1, 2) == (("account:1", 1), ("account:2", 3), ("api", 5))
    assert keys_of(limits, 1, 1) == (("account:1", 1), ("api", 5))
    assert in_order([Key("a", 3), Key("a", 2)]).keys == (Key("a", 2),)


@pytest.mark.parametrize("first", ["account:{source}", "account:{target}"])
@pytest.mark.parametrize(("given", "task_limit", "counts"), [(2, 1, 1), (2, 5, 2), (1, 3, 1)])
def test_equal_names_of_which_one_has_no_limit_do_not_run_more_than_the_task_may(
    first, given, task_limit, counts
):
    """The limit of the task counts for it, whichever of the two comes first."""
    limits = dict.fromkeys(ACCOUNTS, None) | {first: given}
    with Celery("shop", set_as_current=False) as app:
        options = {"lock_keys": limits, "lock_limit": task_limit}
        task = app.task(base=LockedTask, shared=False, **options)(transfer)
        app.finalize()
        name = install(app).name_of(task, (4, 4), {})
        assert name.keys == (Key("account:4", counts),)


def test_a_callable_names_a_lock_as_with_lock_key():
    """It has the task's signature."""
    named = ["account:{source}", lambda source, target, amount: f"bank:{target[:2]}"]
    assert keys_of(named, "DE1", "FR2") == (("account:DE1", None), ("bank:FR", None))


def test_a_call_without_names_gives_the_same_error_as_with_lock_key():
    """The task itself cannot be called; or a value is missing."""
    with pytest.raises(ArgumentsDoNotBind):
        keys_of(ACCOUNTS, 1)
    with pytest.raises(LockNameError, match=r"argument 'target' is None.*callable in lock_keys"):
        keys_of(ACCOUNTS, 1, None)
    with pytest.raises(LockNameError, match=r"or leave it out of lock_keys$"):
        keys_of(ACCOUNTS, 1, object())
    with pytest.raises(LockNameError, match="the callable in lock_keys returned an int"):
        keys_of([lambda source, target, amount: 5], 1, 2)


# --- declarations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lock_keys", "words"),
    [
        ("account:{source}", "it must be a list of templates"),
        (7, "it must be a list of templates"),
        ({"a", "b"}, "it must be a list of templates"),
        ([], f"it must name 1 to {MOST} locks"),
        ({}, f"it must name 1 to {MOST} locks"),
        (
            [f"lock-{n}" for n in range(33)],
            re.escape(
                "lock_keys names 33 locks ('lock-0', 'lock-1', 'lock-2', …): it may name at most 32"
            ),
        ),
        (dict.fromkeys((f"lock-{n}" for n in range(40)), 2), "lock_keys names 40 locks"),
        ([None], "each lock needs a template or a callable"),
        (["account:{origin}"], "lock_keys has 'account:{origin}': it names the argument 'origin'"),
        (["{source}"], "it has no literal text"),
        ([["a"]], "a list is neither a template nor a callable; lock_keys is one list of all"),
        ({"a": 0}, r"lock_keys\['a'\] is 0: it must be from 1"),
        ({"a": "2"}, r"lock_keys\['a'\] is '2': it must be a whole number"),
    ],
)
def test_a_wrong_declaration_is_refused_with_a_remedy(lock_keys, words):
    """When the task is declared; the error names task and option."""
    with pytest.raises(ConfigurationError, match=words) as refused:
        compile_names("transfer", transfer, lock_keys)
    assert "task transfer: lock_keys" in str(refused.value)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"lock_key": "a"}, "lock_key is 'a': lock_keys is given too"),
        ({"lock_args": ["source"]}, "lock_args is .*: lock_keys is given too"),
        ({"lock_on_full": "replace", "lock_max_waiting": 1}, 'Use "skip" or "fail"'),
        ({"lock_on_retry": "keep"}, 'Use "release"'),
    ],
)
def test_what_does_not_go_with_several_locks_is_refused(others, words):
    """With the same declaration, or from the settings."""
    with pytest.raises(ConfigurationError, match=words):
        resolve_options("transfer", {"lock_keys": ACCOUNTS, **others}, None)


@pytest.mark.parametrize(
    "keys", [ACCOUNTS, {"account:{source}": None, "api": 5}, {"account:{source}": None}]
)
def test_a_limit_counts_for_those_of_several_locks_that_have_none(keys):
    """Where all have one, it is refused: see what is said of it in test_messages."""
    assert resolve_options("transfer", {"lock_keys": keys, "lock_limit": 3}, None).limit == 3


def test_what_the_settings_say_must_go_with_several_locks_too():
    """singleton_lock_on_retry="keep", and several servers."""
    with pytest.raises(ConfigurationError, match="lock_on_retry is 'keep'"):
        resolve_options("transfer", {"lock_keys": ACCOUNTS}, Settings(on_retry="keep"))
    urls = tuple(f"redis://host{n}" for n in range(3))
    with pytest.raises(ConfigurationError, match="several servers in singleton_lock_backend"):
        resolve_options(
            "transfer",
            {"lock_keys": ACCOUNTS, "lock_on_conflict": "requeue"},
            Settings(backend=urls),
        )


def test_a_task_declares_its_locks():
    """lock_keys is an option like the others; lock_key=None beside it is none."""
    app = Celery("keys", broker="memory://", set_as_current=False)
    task = app.task(base=LockedTask, lock_keys=ACCOUNTS, shared=False, name="t")(transfer)
    app.finalize()
    name = install(app).name_of(app.tasks["t"], (2, 1), {})
    assert name.keys == (Key("account:1"), Key("account:2"))
    assert task.locks == current_locks() == ()


def test_a_wrong_name_of_the_option_is_refused():
    """lock_keyss would lock nothing."""
    app = Celery("keys", broker="memory://", set_as_current=False)
    app.task(base=LockedTask, lock_keyss=ACCOUNTS, shared=False, name="t")(transfer)
    with pytest.raises(ConfigurationError, match="Did you mean lock_keys"):
        app.finalize()


# --- headers --------------------------------------------------------------------------------------


@pytest.fixture
def header():
    """Of a task with three locks, as it arrives."""
    names = in_order([Key("c"), Key("a"), Key("b", 2)])
    return with_lock_set(
        LockHeader(str(names), "t.0", "id/1/0", "task", "w#1", place=9, copy=True), names
    )


@pytest.fixture
def granted(header):
    """The same, granted its second lock after it was parked there."""
    lock_set = header.lock_set._replace(at=1)
    here = lock_set.here
    return header._replace(
        name=here.name, token=here.token, granted=True, lock_set=lock_set, copy=False, place=0
    )


def test_each_lock_has_a_token_of_its_own(header):
    """All that is keyed by tokens works as for a single lock."""
    tokens = [part.token for part in header.lock_set.parts]
    assert (tokens[0], len(set(tokens))) == ("t.0", 3)
    assert [(each.name, each.token) for each in singles(header)] == [
        *zip("abc", tokens, strict=True)
    ]
    assert [part.limit for part in header.lock_set.parts] == [None, 2, None]
    assert singles(header._replace(lock_set=None)) == [header._replace(lock_set=None)]


def test_only_the_first_lock_distinguishes_duplicates(header, granted):
    """There the attempt is the task's; at the others each delivery has one of its own."""
    first, *others = singles(header)
    assert (first.attempt, first.copy) == ("id/1/0", True)
    assert all(not each.copy and each.attempt.startswith("id/1/") for each in others)
    assert {each.attempt for each in others}.isdisjoint({first.attempt})
    again = begun_again(granted, granted.lock_set, frees=())
    assert singles(again)[1].attempt != singles(granted)[1].attempt
    assert singles(granted)[0].copy  # it was parked: its end is remembered


def test_all_locks_have_the_place_of_its_arrival_and_one_is_granted(granted):
    assert [each.place for each in singles(granted)] == [9, 9, 9]
    assert [each.granted for each in singles(granted)] == [False, True, False]


def test_the_lock_at_which_the_message_may_be_kept_is_given_back_last(header, granted):
    """Whoever gets it then finds the others free."""
    assert [each.name for each in in_order_of_release(header)] == ["c", "b", "a"]
    assert [each.name for each in in_order_of_release(granted)] == ["c", "a", "b"]
    assert in_order_of_release(header._replace(lock_set=None)) == [header._replace(lock_set=None)]


def test_a_delivery_knows_which_locks_concern_it(header):
    assert [header.concerns(name) for name in "abcd"] == [True, True, True, False]
    assert not header._replace(lock_set=None).concerns("b")


def test_a_restarted_attempt_has_new_tokens_and_its_old_place(granted):
    """It counts as a copy, and says where its message is kept until then."""
    again = onward(granted, granted.lock_set, None)
    old = {part.token for part in granted.lock_set.parts}
    assert old.isdisjoint({part.token for part in again.lock_set.parts})
    assert (again.name, again.token) == ("a", again.lock_set.parts[0].token)
    assert (again.place, again.copy, again.granted) == (9, True, False)
    assert again.lock_set.left == Part("b", granted.token)
    assert again.lock_set.frees == granted.lock_set.kept


def test_a_delivery_with_an_unanswered_claim_is_parked_at_its_first_lock_and_frees_the_others(
    granted,
):
    """Only the first lock may count its message as acknowledged, and recognises copies."""
    first, here, last = granted.lock_set.parts
    settling = granted._replace(acks_early=True)
    again = unanswered(settling)
    assert (again.name, again.token, again.copy) == ("a", first.token, True)
    assert (again.lock_set.at, again.lock_set.left, again.lock_set.frees) == (0, here, (last,))
    assert {here.token, last.token}.isdisjoint({part.token for part in again.lock_set.parts})
    others = [("b", here.token), ("c", last.token)]
    assert claim_in(again) == (granted.attempt, first.token, others)


def test_a_late_acknowledged_delivery_asks_for_the_same_locks_after_an_unanswered_claim(granted):
    """Its claim deletes nothing. What ended before it arrived is another call with its id."""
    settling = granted._replace(acks_early=False)
    assert unanswered(settling) == settling._replace(copy=True, first_place=9)


def test_a_later_delivery_shares_no_token_with_the_one_before(header, granted):
    """Who had it before may still run."""
    assert renewed(granted.lock_set, "t.1") is None
    anew = renewed(header.lock_set, "t.1")
    assert anew.parts[0].token == "t.1"
    old = {part.token for part in header.lock_set.parts}
    assert old.isdisjoint({part.token for part in anew.parts})


def test_the_wait_for_the_later_locks_is_what_the_first_have_left(header, granted):
    """lock_wait_timeout counts for all locks together."""
    moved = granted._replace(lock_set=granted.lock_set._replace(left=granted.lock_set.here))
    assert time_left(moved._replace(created_at=100.0), 60, 110.0) == 50
    assert time_left(moved._replace(created_at=100.0), 60, 500.0) > 0
    assert time_left(moved, None, 110.0) is None
    assert time_left(header, 60, 500.0) == 60


# --- messages -------------------------------------------------------------------------------------


@pytest.fixture
def message():
    return Message(
        body="[[1], {}, {}]",
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": "id", "task": "t"},
        properties={},
        delivery_info={"exchange": "", "routing_key": "q"},
    )


def test_what_a_task_keeps_is_kept_with_its_message(message, granted):
    """And read from there by whoever gets it; nothing for a task with one lock."""
    header = granted.lock_set._replace(left=granted.lock_set.here).header()
    kept = pack(message, header)
    assert lock_set_in(kept) == granted.lock_set
    assert read(next(iter(json.loads(json.dumps(header)).values()))) == granted.lock_set
    assert lock_set_in(pack(message)) is None
    assert lock_set_in(None) is None


def test_it_is_not_kept_twice_nor_seen_in_the_message_itself(message, granted):
    """A message that is parked again has only what it keeps then."""
    once = unpack(pack(message, granted.lock_set.header()))
    later = LockSet((Part("z", "z.0"),), place=1)
    assert lock_set_in(pack(once, later.header())) == later
    assert lock_set_in(pack(once)) is None
