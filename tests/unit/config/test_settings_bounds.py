"""Where the values of options and settings end, and what is said of those that do nothing."""

from __future__ import annotations

import warnings

import pytest
from celery import Celery, _state

from celery_singleton_lock import Limit, LockedTask
from celery_singleton_lock.config.app_settings import is_eager, parse_settings
from celery_singleton_lock.config.call_options import check_names
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.config.unknown_names import check_unknown
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.startup_checks_app import check_app

WEEK = 7 * 86_400
YEAR = 366 * 86_400


def asking(conf):
    """An app's settings, as they are asked for: always by name and default."""

    def get(name, default):
        return conf.get(name, default)

    return get


def parsed(conf=None, **values):
    conf = {**(conf or {}), **{f"singleton_lock_{name}": value for name, value in values.items()}}
    return parse_settings(asking(conf))


def resolved(**attributes):
    return resolve_options("shop.settle", attributes, Settings())


@pytest.mark.parametrize(
    ("option", "most"),
    [("lock_wait_timeout", YEAR), ("lock_max_waiting", 2**31 - 1), ("lock_limit", 2**31 - 1)],
)
def test_the_most_that_is_allowed_is_allowed(option, most):
    """And nothing above it."""
    assert getattr(resolved(**{option: most}), option.removeprefix("lock_")) == most
    with pytest.raises(ConfigurationError, match=f"{option} is {most + 1}: "):
        resolved(**{option: most + 1})


def test_a_lease_may_be_a_week_long_and_is_warned_of():
    """It is no error: who has read why may want it."""
    with pytest.warns(ConfigurationWarning) as caught:
        assert resolved(lock_lease=WEEK).lease == WEEK
    assert str(caught[0].message) == (
        "task shop.settle: lock_lease is 604800 s: it need not exceed the task's run time, "
        "because it is renewed while the task runs. A crashed worker blocks the lock for this "
        "time. Use 30."
    )


def test_a_requeued_task_may_be_held_back_for_a_quarter_of_an_hour():
    """From the first time on, if the longest is as long."""
    requeue = {"lock_on_conflict": "requeue", "lock_requeue_max": 900}
    assert resolved(**requeue, lock_requeue_delay=900).requeue_delay == 900.0


def test_no_bound_may_be_declared_over_one_of_the_settings():
    """None is a value."""
    options = resolve_options("t", {"lock_max_waiting": None}, parsed(max_waiting=5))
    assert options.max_waiting is None


def test_a_prefix_is_any_text_without_braces_and_nul():
    """Case and colons are kept."""
    assert parsed(prefix="X:Y").prefix == "X:Y"
    for sign in "{}\0":
        with pytest.raises(ConfigurationError):
            parsed(prefix=f"a{sign}")


@pytest.mark.parametrize(("said", "seconds"), [(1, 1.0), (0.5, 0.5), (True, 3600.0), (-1, 3600.0)])
def test_a_visibility_timeout_is_any_number_over_0(said, seconds):
    """What is no time is not said."""
    conf = {"broker_transport_options": {"visibility_timeout": said}}
    assert parsed(conf).visibility_timeout == seconds


def test_eager_locks_are_off_unless_switched_on():
    """Asked each time, since tests switch it."""
    conf = {}
    assert is_eager(asking(conf)) is False
    conf["singleton_lock_eager"] = True
    assert is_eager(asking(conf)) is True
    conf["singleton_lock_eager"] = 1
    with pytest.raises(ConfigurationError, match=r"^singleton_lock_eager is 1: "):
        is_eager(asking(conf))


def test_an_address_that_cannot_be_used_is_blamed_on_the_setting_from_which_it_came():
    """Not on ours, which nobody has set."""
    with pytest.raises(ConfigurationError, match=r"^result_backend is 'redis://h/x': "):
        parsed({"result_backend": "redis://h/x"}).address()


@pytest.mark.parametrize(
    ("broker", "tls", "backend", "options"),
    [
        ("redis://h", True, "redis://h", {}),
        ("redis://h", {}, "rediss://h", {}),
        ("rediss://h", {"a": 1}, "rediss://h", {"a": 1}),
        ("sentinel://h", {"a": 1}, "sentinel://h", {"ssl": True, "a": 1}),
        ("sentinel://h", None, "sentinel://h", {}),
        (["sentinel://h", "sentinel://i"], None, "sentinel://h;sentinel://i", {}),
    ],
)
def test_tls_of_the_broker_is_that_of_the_locks(broker, tls, backend, options):
    """A dict of options switches it on; Sentinels keep their scheme."""
    settings = parsed({"broker_url": broker, "broker_use_ssl": tls})
    assert (settings.backend, dict(settings.backend_options)) == (backend, options)


def test_only_celerys_sentinel_options_are_taken_over():
    """Each from the options of the URL's own setting; ours count more."""
    said = {"master_name": "m", "min_other_sentinels": 1, "sentinel_kwargs": {}, "other": 5}
    for url, options in (
        ("broker_url", "broker_transport_options"),
        ("result_backend", "result_backend_transport_options"),
    ):
        settings = parsed({url: "sentinel://h", options: said}, backend_options={"a": 1})
        assert settings.backend_options == {
            "master_name": "m",
            "min_other_sentinels": 1,
            "sentinel_kwargs": {},
            "a": 1,
        }
        assert settings.address().sentinels == (("h", 26379),)


# --- options that do nothing ----------------------------------------------------------------------

LEAVE_OUT = ". Leave one of the two out"
NEVER_WAITS = f'with lock_on_conflict="{{}}" it never waits{LEAVE_OUT}'
NO_QUEUE = f'with lock_on_conflict="requeue" it is never in a queue{LEAVE_OUT}'
NEVER_FULL = "without lock_max_waiting its queue is never full. Add lock_max_waiting="
TIMEOUT = {"lock_wait_timeout": 5}
PATIENT = {**TIMEOUT, "lock_max_waiting": 5, "lock_on_full": "skip"}  # matters above a rate
REQUEUE = 'it needs lock_on_conflict="requeue". Add that, or leave this out'


@pytest.mark.parametrize(
    ("declared", "idle"),
    [
        *(
            ({"lock_on_conflict": policy, option: value}, {option: NEVER_WAITS.format(policy)})
            for policy in ("skip", "fail")
            for option, value in (
                ("lock_wait_timeout", 5),
                ("lock_max_waiting", 5),
                ("lock_on_full", "skip"),
            )
        ),
        ({"lock_on_conflict": "requeue", "lock_max_waiting": 5}, {"lock_max_waiting": NO_QUEUE}),
        ({"lock_on_conflict": "requeue", "lock_on_full": "skip"}, {"lock_on_full": NO_QUEUE}),
        ({"lock_on_full": "skip"}, {"lock_on_full": f"{NEVER_FULL}100"}),
        ({"lock_on_full": "replace"}, {"lock_on_full": f"{NEVER_FULL}1"}),
        ({"lock_requeue_delay": 2}, {"lock_requeue_delay": REQUEUE}),
        ({"lock_requeue_max": 2}, {"lock_requeue_max": REQUEUE}),
        ({"lock_on_conflict": "requeue", "lock_wait_timeout": 5}, {}),
        ({"lock_on_conflict": "requeue", "lock_requeue_delay": 2, "lock_requeue_max": 3}, {}),
        ({"lock_on_conflict": "skip", "lock_wait_timeout": None}, {}),
        ({"lock_max_waiting": 5, "lock_on_full": "skip", "lock_wait_timeout": 5}, {}),
        *(
            ({**PATIENT, "lock_on_conflict": policy, **rate}, {})
            for policy in ("skip", "fail")
            for rate in (
                {"lock_rate": "100/m"},
                {"lock_rate": "{rate}"},
                {"lock_keys": {"crm": Limit(1, rate="100/m")}},
            )
        ),
        (
            {"lock_on_conflict": "skip", "lock_rate": "9/m", "lock_on_rate": "fail", **TIMEOUT},
            {"lock_wait_timeout": NEVER_WAITS.format("skip")},
        ),
    ],
)
def test_an_option_that_can_never_matter_is_warned_of_with_the_reason(declared, idle):
    """Those that matter are not, nor is a None, which may be there to undo a setting."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolved(**declared)
    assert [str(warning.message) for warning in caught] == [
        f"task shop.settle: {option} is {declared[option]!r}, and has no effect: {reason}."
        for option, reason in idle.items()
    ]
    assert all(warning.category is ConfigurationWarning for warning in caught)


def app_with(**options):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_backend = "memory://"

    @app.task(base=LockedTask, name="settle", shared=False, **options)
    def settle(account_id):
        pass

    return app, settle


def test_a_worker_warns_once_of_an_option_when_it_knows_the_settings():
    """Not at the import as well: a setting that is read later may be what the option needs."""
    options = {"lock_on_full": "replace", "lock_lease": 30_000}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        app, task = app_with(**options)
        app.finalize()
    with pytest.warns(ConfigurationWarning) as caught:
        check_app(install(app))
    assert [str(warning.message).split(" ")[2] for warning in caught] == [
        "lock_lease",
        "lock_on_full",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install(app).options_of_call(task, {"lock_on_conflict": "park"})


@pytest.mark.parametrize("name", ["max_parked", "max_parked_bytes"])
def test_a_limit_of_parked_messages_on_a_quorum_is_refused_at_the_start(name, monkeypatch):
    """No message is parked there, so it would have no effect."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set())  # shared tasks of other tests
    app, _ = app_with(lock_on_conflict="requeue")
    app.conf.singleton_lock_backend = [f"redis://host{number}" for number in range(3)]
    app.conf[f"singleton_lock_{name}"] = 5
    with pytest.raises(ConfigurationError, match=f"^singleton_lock_{name} is 5: .*no message is"):
        check_app(install(app))


def test_an_option_that_a_setting_gives_a_meaning_is_not_warned_of():
    app, _ = app_with(lock_on_full="replace")
    app.conf.singleton_lock_max_waiting = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_app(install(app))


def test_the_error_of_a_port_in_the_metrics_address_says_where_to_set_it():
    with pytest.raises(ConfigurationError, match=r'Use "0\.0\.0\.0", and .*_metrics_port=9100\.'):
        parsed(metrics_address="0.0.0.0:9100")
    for address in ("127.0.0.1", "::1", "localhost"):
        assert parsed(metrics_address=address).metrics_address == address


def test_the_error_of_a_setting_given_as_a_task_option_names_the_option():
    with pytest.raises(ConfigurationError, match="for all tasks: singleton_lock_max_returns"):
        check_unknown("shop.settle", ["lock_max_returns"])


def test_the_error_of_a_misspelt_call_option_suggests_the_right_one():
    with pytest.raises(ConfigurationError, match=r"Did you mean 'lock_on_conflict'\?"):
        check_names("shop.settle", {"lock_onconflict": "skip"})


def test_the_error_of_an_option_of_the_task_in_a_call_suggests_no_other_option():
    with pytest.raises(ConfigurationError, match=r"lock_lease cannot .* with the task\.$"):
        check_names("shop.settle", {"lock_lease": 5})
