"""The other projects whose tests run here, and their tests without an equivalent."""

from __future__ import annotations

from foreign.suite import Suite

# -- reasons ---------------------------------------------------------------------------------------

LEASE = "Every lock has a lease here, so there is none that cannot be extended."
TOKEN = "An owner token comes from new_token() here; one that the caller makes up is refused."
NO_POLLING = "A waiting client blocks in Redis here, so there is no `sleep` and no count of sleeps."
KEY = "The test reads or writes a key of python-redis-lock that has no counterpart here."
RENEWAL = "One watchdog renews all leases of a process here; no lock has a thread of its own."
SERVER = "The client is checked when the lock is made here; there is no `strict=False`."

# -- redis-py --------------------------------------------------------------------------------------

_LOCK = "tests/*test_lock.py::TestLock::test_"

REDIS_PY = Suite(
    name="redis-py",
    project="redis",
    files=("pyproject.toml", "tests"),
    tests=("tests/test_lock.py", "tests/test_asyncio/test_lock.py"),
    plugins=("foreign.adapters.redis_py", "pytest_asyncio.plugin", "pytest_timeout"),
    options=("--redis-url={redis}",),
    listed={
        f"{_LOCK}lock": "The test asks for a lock without a lease (`ttl == -1`).",
        f"{_LOCK}lock_token": TOKEN,
        f"{_LOCK}lock_token_thread_local_false": TOKEN,
        f"{_LOCK}blocking_timeout": NO_POLLING,
        f"{_LOCK}context_manager_blocking_timeout": NO_POLLING,
        f"{_LOCK}extending_lock_with_no_timeout_raises_error": LEASE,
        f"{_LOCK}reacquiring_lock_with_no_timeout_raises_error": LEASE,
        f"{_LOCK}context_manager_reacquiring_lock_with_no_timeout_raises_error": LEASE,
    },
)

# -- python-redis-lock -----------------------------------------------------------------------------

_TEST = "tests/test_redis_lock.py::test_"

PYTHON_REDIS_LOCK = Suite(
    name="python-redis-lock",
    project="python-redis-lock",
    release="4.0.1",
    files=("pytest.ini", "tests"),
    tests=("tests",),
    plugins=("pytest_timeout",),
    options=("--timeout=60",),
    env={"DJANGO_SETTINGS_MODULE": "test_project.settings"},
    listed={
        "tests/test_django_integration.py::test_django_add_or_set_locked": (
            "get_or_set keeps None like any other value; there the function must return a value."
        ),
        f"{_TEST}upgrade": KEY,
        f"{_TEST}release_from_nonblocking_leaving_garbage": KEY,
        f"{_TEST}signal_expiration": KEY,
        f"{_TEST}simple_auto_renewal": RENEWAL,
        f"{_TEST}no_auto_renewal": RENEWAL,
        f"{_TEST}auto_renewal": RENEWAL,
        f"{_TEST}auto_renewal_stops_after_gc": RENEWAL,
        f"{_TEST}not_usable_timeout": "`blocking=False` wins over a time-out here.",
        f"{_TEST}expire_less_than_timeout": "A wait may be longer than the lease here.",
        f"{_TEST}extend_lock_without_expire_fail": LEASE,
        f"{_TEST}owner_id": TOKEN,
        f"{_TEST}given_id": TOKEN,
        f"{_TEST}expire_int_conversion": SERVER,
        f"{_TEST}strict_check": SERVER,
        f"{_TEST}borken_expires": SERVER,
    },
)

# -- Celery ----------------------------------------------------------------------------------------

_CELERY = (
    "foreign.adapters.celery_tasks",
    "celery.contrib.pytest",
    "pytest_timeout",
    "pytest_rerunfailures",
    "pytest_order",
)

CELERY_UNIT = Suite(
    name="celery-unit",
    project="celery",
    files=("pyproject.toml", "t"),
    tests=("t/unit/test_canvas.py", "t/unit/tasks", "t/unit/app", "t/unit/worker"),
    plugins=(*_CELERY, "pytest_click"),
    # Left out: they start parts of a worker whose pool, event dispatcher or controller is a mock.
    options=(
        "--timeout=60",
        "--ignore=t/unit/worker/test_consumer.py",
        "--ignore=t/unit/worker/test_loops.py",
        "--ignore=t/unit/worker/test_worker.py",
    ),
    listed={
        "t/unit/tasks/test_trace.py::test_trace::test_outside_body_error": (
            "A locked task shows the tracer behind its lock, not the one that Celery has built."
        ),
        "t/unit/app/test_control.py::test_*_implements_all_commands": (
            "Celery's clients have methods for its own remote commands alone, not for ours."
        ),
    },
)

_CHORD = "t/integration/test_canvas.py::test_chord::test_mutable_errback_called_by_chord_from_"

CELERY_INTEGRATION = Suite(
    name="celery-integration",
    project="celery",
    files=("pyproject.toml", "t"),
    tests=(
        "t/integration/test_canvas.py",
        "t/integration/test_tasks.py",
        "t/integration/test_group_chains.py",
        "t/integration/test_inspect.py",
    ),
    plugins=_CELERY,
    # Left out: its 42 tasks must all end within a second of the first. On a busy machine that fails
    # without locks too, and with 5 s it passes with them. And two tests that look for a log line
    # 10 ms after a result: behind the other tests they fail without locks too, alone they pass.
    options=(
        "--timeout=300",
        f"--deselect={_CHORD}group_fail_multiple_on_body_failure[errback_old_style]",
        "--deselect=t/integration/test_tasks.py::test_trace_log_arguments",
    ),
    env={"WORKER_LOGLEVEL": "INFO"},  # as in Celery's own runs: some of its tests read the log
    seconds=3000,
    listed={},
)

SUITES = (REDIS_PY, PYTHON_REDIS_LOCK, CELERY_UNIT, CELERY_INTEGRATION)
