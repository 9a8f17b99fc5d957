"""What ``celery-singleton-lock`` says of a URL or an option that it cannot use: asks nobody."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_singleton_lock.admin.select_parked import Tally
from celery_singleton_lock.cli import locks, main, render
from celery_singleton_lock.cli.app_context import sent
from celery_singleton_lock.cli.bulk_commands import tell_tally
from celery_singleton_lock.cli.commands import COMMANDS
from celery_singleton_lock.worker.operator_actions import BrokerError

NOBODY = "redis://localhost:1/0"
SENTINEL = "sentinel://localhost:1"


def said(url, *options):
    """Return the error text of wrong usage, and check the exit status."""
    given = [each for option in options for each in ("--option", option)]
    ran = CliRunner().invoke(main, ["--backend", url, *given, "list"])
    assert ran.exit_code == 2, ran.output
    return ran.output.partition("Error: ")[2]


@pytest.mark.parametrize(
    ("url", "option", "says"),
    [
        (NOBODY, "socket_timeout=abc", "--option socket_timeout is 'abc': it must be a number"),
        (NOBODY, "socket_timout=1", "--option has 'socket_timout', which redis-py does not take"),
        (NOBODY, "db=5", "--option has 'db', which has no effect: the URL of the locks has it"),
        (NOBODY, "retry=3", "--option retry is '3': it must be an object as redis-py takes it"),
        (f"{NOBODY}?socket_timeout=soon", "client_name=me", "Invalid value for"),
        (f"{NOBODY}?auth=s3cret", "client_name=me", "?auth=***': its option 'auth' is unknown"),
        (NOBODY, "master_name=m", "--option has 'master_name', which has no effect"),
        (SENTINEL, "master_nam=m", "did you mean 'master_name'?"),
        (SENTINEL, "client_name=me", "Give --option master_name=mymaster"),
        ("redis://localhost:17x/0", "client_name=me", "--backend is 'redis://***': its port is"),
        ("amqp://localhost", "client_name=me", "--backend is 'amqp://localhost': locks need a"),
    ],
)
def test_what_cannot_be_used_is_wrong_usage_of_an_option_of_the_command_line(url, option, says):
    """The names of settings were not used on this command line."""
    told = said(url, option)
    assert says in told
    assert "singleton_lock_" not in told


def test_options_for_sentinels_may_be_json():
    """A slip in them is named."""
    told = said(SENTINEL, "master_name=m", 'sentinel_kwargs={"pasword": "s3cret"}')
    assert told.startswith("--option sentinel_kwargs has 'pasword'")
    assert "Did you mean 'password'?" in told
    assert "s3cret" not in told


def test_a_number_on_the_command_line_is_read_as_one():
    """The client takes it, and asks a server that is not there."""
    ran = CliRunner().invoke(main, ["--backend", NOBODY, "--option", "socket_timeout=1", "list"])
    assert ran.exit_code == 3
    assert "did not answer (ConnectionError: Connection refused)" in ran.output


def test_without_an_app_the_error_says_how_to_give_one():
    """It does not say that there are locked tasks, since it cannot know."""
    with Celery(set_as_current=False) as app:
        app.conf.broker_url = "memory://"
        ran = CliRunner().invoke(locks, ["list"], obj=SimpleNamespace(app=app))
    assert ran.exit_code == 1
    assert "There are locked tasks" not in ran.output
    assert "Give the app (celery -A YOUR_APP locks …)" in ran.output
    assert "celery-singleton-lock --backend URL" in ran.output


def test_doctor_of_an_app_whose_redis_is_away_does_not_say_to_give_the_app():
    with Celery(set_as_current=False) as app:
        app.conf.broker_url = "memory://"
        app.conf.singleton_lock_backend = NOBODY
        ran = CliRunner().invoke(locks, ["doctor"], obj=SimpleNamespace(app=app))
    assert ran.exit_code == 3
    assert "Not examined, since the locks' Redis did not answer: eviction, " in ran.output
    assert "give the app" not in ran.output


@pytest.mark.parametrize("group", [locks, main], ids=["celery locks", "celery-singleton-lock"])
def test_the_help_cuts_no_summary(group):
    """A sentence whose end is missing may say the contrary."""
    told = CliRunner().invoke(group, ["--help"]).output.partition("\nCommands:\n")[2]
    assert told
    assert "..." not in told
    for command in COMMANDS:
        first = command.help.split(".")[0].split()
        assert " ".join(first) in " ".join(told.split())


@pytest.mark.parametrize(
    ("most", "shown"),
    [(None, [8, 40, 60]), (112, [8, 40, 60]), (72, [8, 30, 30]), (20, [8, 12, 12])],
)
def test_the_widest_columns_of_a_table_give_way(most, shown):
    """Down to a dozen characters; narrower than that nothing can be read."""
    cells = [["a" * 8, "b" * 40, "c" * 60]]
    _, line = render.table(("A", "B", "C"), cells, most)
    assert [len(cell) for cell in line.split("  ")] == shown


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_watch_refuses_an_interval_that_it_cannot_wait_for(value):
    ran = CliRunner().invoke(main, ["--backend", NOBODY, "watch", "--interval", value])
    assert ran.exit_code == 2
    assert "Invalid value for '--interval'" in ran.output


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_drain_refuses_a_rate_that_it_cannot_keep(value):
    ran = CliRunner().invoke(main, ["--backend", NOBODY, "drain", "--rate", value, "--all"])
    assert ran.exit_code == 2
    assert "Invalid value for '--rate'" in ran.output


@pytest.mark.parametrize("task_id", ["", " "])
def test_why_refuses_an_empty_id_as_a_script_with_an_unset_variable_gives_it(task_id, monkeypatch):
    """It said that the task had not reached a worker."""
    monkeypatch.setattr("celery_singleton_lock.cli.show_commands.why", pytest.fail)
    ran = CliRunner().invoke(main, ["--backend", NOBODY, "why", task_id])
    assert (ran.exit_code, "TASK_ID is empty" in ran.output) == (2, True), ran.output


def test_a_lock_of_which_no_task_was_changed_is_not_in_the_count(capsys):
    """A drain told "0  account:7" if a worker had parked all of its tasks again."""
    tally = Tally(Counter({"account:7": 0, "account:42": 2}))
    tell_tally(tally, "sent to the broker", machine=False)
    told = capsys.readouterr().out
    assert [line.split()[:2] for line in told.splitlines()] == [["2", "account:42"], ["2", "sent"]]


@pytest.mark.parametrize("command", ["purge", "drain", "export"])
@pytest.mark.parametrize("empty", ["--lock", "--match", "--task", "--queue"])
def test_an_empty_filter_does_not_select_the_tasks_of_all_locks(command, empty):
    """``--lock "$LOCK" --older-than 1h`` dropped all old tasks if the variable was not set."""
    app = Celery("empty", broker=NOBODY, backend=NOBODY, set_as_current=False)
    given = [command, empty, "", "--older-than", "1h"]
    ran = CliRunner().invoke(locks, given, obj=SimpleNamespace(app=app))
    assert ran.exit_code == 2, ran.output
    assert f"{empty} is empty" in ran.output


def test_a_drain_whose_message_is_not_confirmed_says_that_its_task_may_run_twice():
    """RabbitMQ with an alarm reads the message when the alarm is over."""

    def send():
        raise TimeoutError

    with pytest.raises(BrokerError, match="may run twice"):
        sent(send)
