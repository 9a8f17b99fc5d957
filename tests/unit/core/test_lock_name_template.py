# the number of a trap is part of its test's name
"""From a task and its arguments to the name of its lock."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import hashlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import uuid

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_singleton_lock.core.lock_name_template import (
    OF_FUNCTION,
    ArgumentsDoNotBind,
    Sent,
    compile_name,
)
from celery_singleton_lock.errors import ConfigurationError, LockNameError


def settle(account_id, amount=0, *, note="none"):
    """A task."""


def anything(first, *args, **kwargs):
    """A task that takes everything."""


def name_of(*args, key=None, only=None, run=settle, **kwargs):
    return compile_name("shop.settle", run, lock_key=key, lock_args=only).name(args, kwargs)


class Region(enum.Enum):
    EU = "eu"


class Level(enum.IntEnum):
    HIGH = 3


class TextRegion(str, enum.Enum):  # StrEnum came with Python 3.11
    EU = "eu"


@dataclasses.dataclass
class Order:
    id: int
    lines: list
    cache: dict = dataclasses.field(default_factory=dict, compare=False)


class WithJson:
    def __json__(self):
        return {"id": 3}


class BrokenJson:
    def __json__(self):
        msg = "s3cret"
        raise KeyError(msg)


# --- which lock -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"lock_key": "account:{account_id}"},
        {"lock_key": lambda account_id, amount, *, note: f"{account_id}:{amount}:{note}"},
        {"lock_args": ["account_id", "amount", "note"]},
        {"lock_args": []},
    ],
    ids=["digest", "template", "callable", "lock_args", "one lock"],
)
def test_T31_positional_keyword_and_default_arguments_give_one_lock(declared):
    """f(1), f(a=1), f(1, default): one lock, however it is declared."""
    namer = compile_name("shop.settle", settle, **declared)
    names = {
        namer.name((1,), {}),
        namer.name([1], {}),
        namer.name((), {"account_id": 1}),
        namer.name((1, 0), {}),
        namer.name((1,), {"amount": 0}),
        namer.name((), {"note": "none", "amount": 0, "account_id": 1}),
    }
    assert len(names) == 1


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ((1, 2), [1, 2]),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc), "2024-01-02T03:04:05+00:00"),
        (dt.date(2024, 1, 2), "2024-01-02"),
        (dt.time(3, 4), "03:04:00"),
        (dt.timedelta(minutes=1), 60),
        (decimal.Decimal("1.50"), "1.50"),
        (Region.EU, "eu"),
        (TextRegion.EU, "eu"),
        (Level.HIGH, 3),
        (b"\xff\x00", "/wA="),
        (bytearray(b"\xff\x00"), b"\xff\x00"),
        ({7: "a", None: "b", True: "c"}, {"7": "a", "null": "b", "true": "c"}),
        ({"b": 1, "a": {"d": 1, "c": 2}}, {"a": {"c": 2, "d": 1}, "b": 1}),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (42.0, 42),
        (-0.0, 0),
        (Order(1, [2], {"x": 1}), {"id": 1, "lines": [2]}),
        (WithJson(), {"id": 3}),
    ],
)
def test_T31_a_value_and_what_the_wire_makes_of_it_give_one_lock(here, there):
    """UUID, datetime, Decimal, Enum, bytes, nested dicts …: the same for caller and worker."""
    for declared in ({}, {"only": ["account_id"]}, {"key": "account:{account_id}"}):
        assert name_of(here, **declared) == name_of(there, **declared)


def test_T31_kombu_carries_values_to_the_same_lock():
    """What Celery's own JSON does to arguments changes no name."""
    kombu_json = pytest.importorskip("kombu.utils.json")
    value = {
        "uuid": uuid.UUID(int=7),
        "at": dt.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=2))),
        "day": dt.date(2024, 1, 2),
        "sum": decimal.Decimal("1.50"),
        "raw": b"\xff",
        "text": "żółć \U0001f512",
        "level": Level.HIGH,
        "pair": (1, 2.5),
        7: None,
    }
    arrived = kombu_json.loads(kombu_json.dumps(value))
    assert name_of(value) == name_of(arrived)


def test_T31_names_do_not_change_between_processes():
    """Whatever the hash seed of a process: the same names, and the same ones for ever."""
    program = (
        "from celery_singleton_lock.core.lock_name_template import compile_name\n"
        "def f(a, b=None): ...\n"
        "print(compile_name('t', f).name(({'y': {'c', 'b', 'a'}, 'x': 1.5},), {}))\n"
        "print(compile_name('t', f, lock_key='k:{a}').name(({'q', 'w', 'e'},), {}))\n"
    )
    canonical = b'{"a":{"x":1.5,"y":["a","b","c"]},"b":null}'
    digest = hashlib.sha256(canonical).hexdigest()[:32]
    for seed in ("1", "2"):
        shown = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert shown == [f"t:{digest}", 'k:["e","q","w"]']


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


def shuffled(value, rng):
    """Return an equal value, its dicts in another order and its lists as tuples."""
    if isinstance(value, dict):
        items = [(key, shuffled(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return tuple(shuffled(item, rng) for item in value) if isinstance(value, list) else value


@settings(deadline=None)
@given(value=json_values, rng=st.randoms(use_true_random=False))
def test_T31_order_of_keys_kind_of_sequence_and_json_change_no_name(value, rng):
    """Equal values have equal names: through dict order, tuples, JSON and pickle."""
    name = name_of(value, only=["account_id"])
    assert name == name_of(shuffled(value, rng), only=["account_id"])
    assert name == name_of(json.loads(json.dumps(value)), only=["account_id"])
    assert name == name_of(pickle.loads(pickle.dumps(value)), only=["account_id"])


@settings(deadline=None)
@given(one=json_values, other=json_values)
def test_values_that_differ_have_different_names(one, other):
    """No two values share a name, unless Python too calls them equal, type by type."""
    same = name_of(one, only=["account_id"]) == name_of(other, only=["account_id"])

    def typed(value):
        if isinstance(value, dict):
            return {key: typed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [typed(item) for item in value]
        return (isinstance(value, (bool, str)), value)

    assert same == (typed(one) == typed(other))


@settings(deadline=None)
@given(values=st.lists(st.uuids() | st.datetimes() | st.decimals(allow_nan=False) | st.binary()))
def test_whatever_can_be_named_is_named_as_text_that_redis_can_hold(values):
    """Infinity is refused; everything else becomes a name that encodes."""
    try:
        name = name_of(values, key="v:{account_id}")
    except LockNameError:
        assert any(isinstance(v, decimal.Decimal) and not v.is_finite() for v in values)
    else:
        assert name.encode()


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("account:{account_id}", 42, "account:42"),
        pytest.param("account:{account_id}", "42", "account:42", id="text that is a number"),
        ("account:{account_id}", 42.0, "account:42"),
        ("account:{account_id}", 10**30, f"account:{10**30}"),
        ("account:{account_id}", True, "account:true"),
        ("account:{account_id}", "", "account:"),
        ("account:{account_id}", 'a"b\n\x00', 'account:a"b\n\x00'),
        ("100%:{account_id}:{{}}", "%s", "100%:%s:{}"),
        ("nightly", 42, "nightly"),
        ("o:{account_id[id]}", {"id": 7}, "o:7"),
        ("o:{account_id[0]}", [7, 8], "o:7"),
        ("o:{account_id[0]}", {"0": 7}, "o:7"),
        ("o:{account_id[0]}", {0: 7}, "o:7"),
        ("o:{account_id[a][1][b c]}", {"a": [0, {"b c": "x"}]}, "o:x"),
        ("o:{account_id:05d}", 42, "o:00042"),
        ("o:{account_id:%Y-%m}", dt.datetime(2024, 5, 6, tzinfo=dt.timezone.utc), "o:2024-05"),
        ("o:{account_id:.1%}", 0.5, "o:50.0%"),
        ("o:{account_id:>4}", "ab", "o:  ab"),
        ("o:{account_id:>4}", TextRegion.EU, "o:  eu"),
        ("o:{account_id}:{note}", 1, "o:1:none"),
    ],
)
def test_a_template_is_filled_from_the_arguments(key, value, name):
    """A str is put in as it is, all else as JSON writes it."""
    assert name_of(value, key=key) == name


def test_a_hashed_field_hides_its_value_and_is_stable():
    """`{secret!h}` is 32 hex digits of the SHA-256 of what `{secret}` would have put in."""
    assert name_of("abc", key="s:{account_id!h}") == "s:ba7816bf8f01cfea414140de5dae2223"
    assert name_of(42, key="s:{account_id!h}") == name_of("42", key="s:{account_id!h}")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "no literal text"),
        ("{account_id}", "no literal text"),
        ("{account_id}:{note}", "no literal text"),
        ("a:{acount_id}", "'acount_id', which the task does not have. It has: account_id, amount,"),
        ("a:{acount_id}", "Did you mean 'account_id'?"),
        ("a:{xyz}", "Use one of them."),
        ("a:{}", "'' is not the name of an argument"),
        ("a:{0}", "'0' is not the name of an argument"),
        ("a:{account_id.id}", "with [ ], not with a dot"),
        ("a:{account_id.__class__}", "with [ ], not with a dot"),
        ("a:{account_id[id].x}", "with [ ], not with a dot"),
        ("a:{account_id!r}", "the only conversion is !h"),
        ("a:{account_id!s}", "the only conversion is !h"),
        ("a:{account_id!h:>5}", "a digest has no format"),
        ("a:{account_id:{amount}}", "nested"),
        ("a:{account_id:%B}", "locale"),
        ("a:{account_id:n}", "locale"),
        ("a:{account_id", "for a brace that is text"),
        ("a:{account_id[}", "lock_key is 'a:{account_id[}'"),
        (7, "neither a template nor a callable"),
    ],
)
def test_a_wrong_template_is_refused_at_declaration(key, says):
    """The error names task, option, value and remedy."""
    with pytest.raises(ConfigurationError) as caught:
        compile_name("shop.settle", settle, lock_key=key)
    assert says in str(caught.value)
    assert "task shop.settle: lock_key is " in str(caught.value)
    assert not isinstance(caught.value, LockNameError)


def test_None_in_a_template_is_an_error_that_names_the_argument():
    """`account:None` would put all such calls on one lock."""
    for key in ("a:{account_id}", "a:{account_id!h}", "a:{account_id:>3}", "a:{account_id[x]}"):
        value = {"x": None} if "[x]" in key else None
        with pytest.raises(
            LockNameError, match=r"task shop.settle: argument 'account_id.* is None"
        ):
            name_of(value, key=key)


@pytest.mark.parametrize("value", [{}, [], {"id": []}])
def test_a_missing_item_is_an_error_that_names_it(value):
    """Looking into what is not there says where."""
    with pytest.raises(LockNameError, match=r"argument 'account_id\[id\]\[0\]' is missing"):
        name_of(value, key="o:{account_id[id][0]}")


@pytest.mark.parametrize(
    ("value", "looked_into", "kind"),
    [
        ("text", "account_id", "a str"),
        (5, "account_id", "an int"),
        ({"id": 7}, "account_id[id]", "an int"),
    ],
)
def test_a_template_with_an_index_into_a_number_gives_a_specific_error(value, looked_into, kind):
    """The value itself is not shown."""
    with pytest.raises(LockNameError) as caught:
        name_of(value, key="o:{account_id[id][0]}")
    assert str(caught.value) == (
        f"task shop.settle: argument {looked_into!r} is {kind}, and {{account_id[id][0]}} needs a "
        f"dict or list. Write {{{looked_into}}} in lock_key, or send a dict"
    )


@pytest.mark.parametrize(
    ("spec", "value"), [("05d", "x"), ("%Y", "2024"), (">4", [1]), (".1f", 10**400), ("x", 1.5)]
)
def test_a_format_that_does_not_fit_is_an_error_that_names_the_argument(spec, value):
    """At the call, since only then the value is known."""
    with pytest.raises(LockNameError, match=r"argument 'account_id' is an? .* cannot format"):
        name_of(value, key="o:{account_id:" + spec + "}")


def test_a_field_of_the_message_is_refused_where_it_names_nothing():
    """A header is named; the queue has no parts; a function has no message."""
    for key in ("q:{__queue__[a]}", "h:{__headers__}", "h:{__headers__[a][b]}"):
        with pytest.raises(ConfigurationError, match=r"write \{__queue__\} for the queue"):
            compile_name("shop.settle", settle, lock_key=key)
    with pytest.raises(ConfigurationError, match="exists only for tasks"):
        compile_name("shop.settle", settle, lock_key="q:{__queue__}", wording=OF_FUNCTION)


def test_a_call_without_a_queue_gives_a_specific_error():
    """Such as an eager one."""
    namer = compile_name("shop.settle", settle, lock_key="q:{__queue__}")
    assert namer.name((1,), {}, Sent(lambda: ("fast", {}))) == "q:fast"
    with pytest.raises(LockNameError, match="this call has come through no queue"):
        namer.name((1,))


def circular():
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        (n for n in ()),
        lambda: 0,
        Order,
        float("nan"),
        float("inf"),
        decimal.Decimal("NaN"),
        {"deep": [object()]},
        {(1, 2): 3},
        {1: "a", "1": "b"},
        circular(),
        BrokenJson(),
        pytest.param(10**5000, id="a long integer"),
    ],
)
@pytest.mark.parametrize(
    "declared",
    [{}, {"only": ["account_id"]}, {"key": "a:{account_id}"}, {"key": "a:{account_id!h}"}],
)
def test_a_value_that_cannot_be_written_is_an_error_that_names_the_argument(declared, value):
    """… and does not show the value, which may be a secret."""
    if value == 10**5000 and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python writes integers of any length")
    with pytest.raises(LockNameError, match="argument 'account_id' cannot be part of") as caught:
        name_of(value, **declared)
    assert "s3cret" not in str(caught.value)


def test_half_a_surrogate_pair_is_an_error_that_names_the_argument():
    """JSON can carry one; a key in Redis cannot."""
    with pytest.raises(LockNameError, match="argument 'note' holds a lone surrogate"):
        name_of(1, note="\ud800", key="a:{note}")
    assert name_of("\ud800")  # a digest can


def test_half_a_surrogate_pair_is_named_whatever_else_cannot_be_written():
    """Another argument may be what no name could hold: it is not in this one."""

    def task(weight, note):
        """The first comes first."""

    with pytest.raises(LockNameError, match="argument 'note' holds a lone surrogate"):
        name_of(float("nan"), "\ud800", key="a:{note}", run=task)


# --- lock_args ------------------------------------------------------------------------------------


def test_lock_args_are_the_tasks_name_and_the_values():
    """An empty list is one lock for the whole task."""
    assert name_of(42, only=["account_id"]) == "shop.settle:42"
    assert name_of("42", only=["account_id"]) == 'shop.settle:"42"'
    assert name_of(42, 5, only=("note", "account_id")) == 'shop.settle:"none",42'
    assert name_of({"id": 7}, only=["account_id[id]"]) == "shop.settle:7"
    assert name_of(None, only=["account_id"]) == "shop.settle:null"
    assert name_of(42, only=[]) == "shop.settle"


def test_lock_args_cannot_run_into_each_other():
    """("a,b", "c") and ("a", "b,c") are two locks."""
    only = ["account_id", "note"]
    assert name_of('a","b', note="c", only=only) != name_of("a", note='b","c', only=only)


@pytest.mark.parametrize("only", ["account_id", {"account_id"}, [1], 5, ["acount_id"], ["a.b"]])
def test_wrong_lock_args_are_refused_at_declaration(only):
    """A bare str is the usual slip; a set has no order."""
    with pytest.raises(ConfigurationError, match=r"task shop.settle: lock_args is "):
        compile_name("shop.settle", settle, lock_args=only)


def test_lock_key_and_lock_args_together_are_refused():
    """Each is the whole answer."""
    with pytest.raises(ConfigurationError, match=r"shop.settle: lock_key and lock_args are both"):
        compile_name("shop.settle", settle, lock_key="a", lock_args=[])


def test_without_a_declaration_task_and_arguments_are_the_name():
    """Another task, or another argument, is another lock."""
    assert name_of(1).startswith("shop.settle:")
    assert len(name_of(1)) == len("shop.settle:") + 32
    assert len({name_of(1), name_of(2), name_of(1, 1), name_of("1"), name_of(None)}) == 5


# --- callables ------------------------------------------------------------------------------------


def test_a_callable_gets_the_arguments_as_the_task_does():
    """Defaults applied, whatever its parameters are called."""
    seen = []

    def key(a, b, *, note):
        seen.append((a, b, note))
        return "x"

    assert name_of(1, key=key) == "x"
    assert name_of(account_id=1, key=key) == "x"
    assert seen == [(1, 0, "none")] * 2


def test_T40_what_a_callable_raises_is_wrapped_and_kept_as_the_cause():
    """The task can fail with it; nothing else ends."""

    def key(account_id, amount, note):
        return f"a:{account_id['id']}"

    with pytest.raises(LockNameError, match=r"task shop.settle: the callable lock_key") as caught:
        name_of(1, key=functools.partial(key, note="x"))
    assert isinstance(caught.value.__cause__, TypeError)

    def raising(*args, **kwargs):
        return {}[1]

    with pytest.raises(LockNameError, match="raised KeyError: 1") as caught:
        name_of(1, key=raising)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("returned", ["", None, 5, b"x", ["x"]])
def test_a_callable_must_return_text(returned):
    """None as a name would be one lock for everybody."""
    with pytest.raises(LockNameError, match=r"task shop.settle: the callable lock_key returned"):
        name_of(1, key=lambda *_a, **_k: returned)


async def later(account_id, amount, note): ...


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (lambda: "x", "cannot take the task's arguments: too many positional"),
        (lambda account_id: "x", "the task's arguments: too many positional"),
        (lambda account_id, amount: "x", "unexpected keyword argument 'note'"),
        (
            lambda self, account_id, amount, note: "x",
            "it is called without 'self': in a class",
        ),
        (lambda self, *args, **kwargs: "x", "put @staticmethod above it. Give it the task's"),
        (lambda cls, *args, **kwargs: "x", "it is called without 'cls'"),
        (lambda a, b, c, *, note: "x", "missing a required argument: 'c'"),
        (lambda amount, account_id, *, note: "x", "another position than the task's"),
        (lambda args, kwargs: "x", "the task's arguments themselves, not a list and a dict"),
        (later, "coroutine"),
    ],
)
def test_a_callable_with_a_wrong_signature_is_refused_at_declaration(key, says):
    """The error shows the signature to give it."""
    with pytest.raises(ConfigurationError, match=r"task shop.settle: lock_key is ") as caught:
        compile_name("shop.settle", settle, lock_key=key)
    assert says in str(caught.value)


def test_a_callable_may_have_an_argument_of_the_task_that_is_called_self():
    def settle_self(self, amount=1): ...

    key = compile_name("shop.settle", settle_self, lock_key=lambda self, amount: f"a:{self}")
    assert key.name((7,), {}) == "a:7"


def test_a_callable_may_have_arguments_of_the_task_that_are_called_args_and_kwargs():
    def relay(args, kwargs): ...

    key = compile_name("shop.relay", relay, lock_key=lambda args, kwargs: f"a:{args}:{kwargs}")
    assert key.name((7, 8), {}) == "a:7:8"


# --- signatures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1, 2, 3), {}),
        ((1,), {"account_id": 2}),
        ((1,), {"other": 2}),
        ((), {"amount": 2}),
        ((), {"amount": 1, "other": 1}),
        (None, {}),
        ((1,), [1]),
        ((1,), {5: 1}),
    ],
)
@pytest.mark.parametrize("declared", [{}, {"lock_key": "one"}, {"lock_args": ["account_id"]}])
def test_wrong_arguments_of_a_call_give_a_specific_error(declared, args, kwargs):
    """Such a task fails by itself, so it needs no lock: ArgumentsDoNotBind."""
    with pytest.raises(ArgumentsDoNotBind, match=r"task shop.settle cannot be called"):
        compile_name("shop.settle", settle, **declared).name(args, kwargs)


def test_a_call_that_a_decorator_lets_in_does_not_count_as_failing_by_itself():
    """`*args` around a signature: the task would run, so it must not run unlocked."""

    @functools.wraps(settle)
    def decorated(*args, **kwargs): ...

    assert name_of(5, run=decorated, key="a:{account_id}") == "a:5"
    with pytest.raises(LockNameError) as caught:
        name_of(1, 2, 3, run=decorated)
    assert not isinstance(caught.value, ArgumentsDoNotBind)


def test_args_and_kwargs_of_the_task_can_be_named():
    """A field may be a key of `**kwargs`; that it is missing shows at the call."""
    assert name_of(1, run=anything, key="a:{first}:{x}", x=3) == "a:1:3"
    assert name_of(1, 2, 3, run=anything, key="a:{args[1]}") == "a:3"
    assert name_of(1, run=anything, key="a:{kwargs[x]}", x=3) == "a:3"
    assert name_of(1, run=anything, only=["x"], x=3) == "shop.settle:3"
    with pytest.raises(LockNameError, match="argument 'x' is missing"):
        name_of(1, run=anything, key="a:{x}")
    assert name_of(1, 2, run=anything, y=1) == name_of(1, 2, run=anything, y=1)
    assert name_of(1, 2, run=anything) != name_of(1, 3, run=anything)
    assert name_of(1, 2, run=anything, key=lambda *a, **k: f"{a}{k}", y=1) == "(1, 2){'y': 1}"


def test_positional_only_parameters_are_bound_as_python_does():
    """The quick way does not apply to them."""

    def run(a, /, b=2): ...

    assert name_of(1, run=run, key="a:{a}:{b}") == "a:1:2"
    with pytest.raises(ArgumentsDoNotBind):
        name_of(run=run, key="a:{a}", a=1)


@settings(deadline=None)
@given(
    args=st.lists(st.integers(), max_size=4),
    kwargs=st.dictionaries(st.sampled_from(["account_id", "amount", "note", "x"]), st.integers()),
)
def test_the_quick_way_to_bind_agrees_with_inspect(args, kwargs):
    """… on what fits, on what does not, and on the values."""
    namer = compile_name("t", settle, lock_key=lambda a, b, *, note: f"{a}-{b}-{note}")
    try:
        bound = inspect.signature(settle).bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(ArgumentsDoNotBind):
            namer.name(args, kwargs)
    else:
        bound.apply_defaults()
        assert namer.name(args, kwargs) == "-".join(str(v) for v in bound.arguments.values())


def test_self_of_a_bound_task_is_no_argument():
    """`bound=True` drops the first parameter, of a function or of a wrapper's `*args`."""

    def run(self, account_id): ...

    @functools.wraps(run)
    def wrapper(*args, **kwargs): ...

    for function in (run, wrapper):
        namer = compile_name("t", function, bound=True, lock_key="a:{account_id}")
        assert namer.name((5,), {}) == "a:5"
    with pytest.raises(ConfigurationError, match="It has: account_id"):
        compile_name("t", run, bound=True, lock_key="a:{self}")


def test_the_error_of_a_task_without_arguments_says_so():
    """There is nothing to choose from."""
    with pytest.raises(ConfigurationError, match="The task has no arguments"):
        compile_name("t", lambda: None, lock_key="a:{x}")
    assert compile_name("t", lambda: None).name() == compile_name("t", lambda: None).name((), {})


def test_a_function_without_a_signature_is_refused():
    """Some built-in functions have none."""
    with pytest.raises(ConfigurationError, match=r"task t: the signature of .* cannot be read"):
        compile_name("t", min)


def test_T29_arguments_that_do_not_bind_survive_pickle():
    """The worker may keep the error as the task's result."""
    error = ArgumentsDoNotBind("what")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, str(copy)) == (ArgumentsDoNotBind, ("what",), "what")


@pytest.mark.parametrize(
    ("lock_args", "use"),
    [
        ("tenant_id", '["tenant_id"]'),
        ("tenant_id, month", '["tenant_id", "month"]'),
        ({"tenant_id"}, '["tenant_id"]'),
        (7, '["tenant_id"]'),
    ],
)
def test_lock_args_must_be_a_list(lock_args, use):
    """With what was written, or with an argument that the task has."""
    with pytest.raises(ConfigurationError) as caught:
        compile_name("t", lambda tenant_id, month: None, lock_args=lock_args)
    assert str(caught.value).endswith(f"it must be a list of names: use {use}.")


def test_the_error_of_a_bound_task_without_self_explains_bind():
    class Task:
        def run(account_id, month=1):  # noqa: N805  # the slip
            pytest.fail("never called")

    for named in ({"lock_key": "a:{account_id}"}, {"lock_args": ["account_id"]}):
        with pytest.raises(ConfigurationError, match="which the task does not have") as caught:
            compile_name("t", Task().run, **named)
        assert str(caught.value).endswith(
            "bind=True passes the task itself as the first parameter. Use def …(self, account_id, "
            "month=1)."
        )


def test_no_error_shows_the_whole_of_an_object_that_is_no_key():
    """A client's repr is long, and not for a log."""
    with pytest.raises(ConfigurationError, match=r"lock_key is <redis\.Redis>: a redis\.Redis is"):
        compile_name("t", lambda x: None, lock_key=redis.Redis(password="secret"))


@pytest.mark.parametrize(
    "declared",
    [
        {"lock_key": "a:{__header__[tenant]}"},
        {"lock_key": "a:{__queues__}"},
        {"lock_key": "a:{__headers__.tenant}"},
        {"lock_args": ["__queue__"]},
    ],
)
def test_the_error_of_a_wrong_message_field_says_how_to_write_it(declared):
    with pytest.raises(
        ConfigurationError, match=r"Write \{__queue__\} .*\{__headers__\[tenant\]\}"
    ):
        compile_name("t", lambda x: None, **declared)
