"""What a command leaves of its broker options in the process of a sender (``call_command``)."""

import pytest
from celery import Celery

from celery_singleton_lock.cli.app_context import AppSide
from celery_singleton_lock.worker.install import install


@pytest.fixture
def app():
    """Return the app of a sender that has RabbitMQ confirm its messages. It connects to nothing."""
    app = Celery("web", broker="amqp://guest@127.0.0.1:1//", set_as_current=False)
    app.conf.broker_transport_options = {"confirm_publish": True}
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    yield app
    app.close()


def confirms_messages(app):
    """Return whether RabbitMQ confirms the tasks that the app sends."""
    return app.amqp.producer_pool.connections.connection.transport_options["confirm_publish"]


def test_commands_of_two_threads_leave_the_senders_options_as_they_were(app):
    """Two requests of a web server run a command each, and the first one ends first."""
    extension = install(app)
    one = AppSide(app, extension)
    other = AppSide(app, extension)
    one.close()
    other.close()
    assert app.conf.broker_transport_options == {"confirm_publish": True}
    assert confirms_messages(app)


def test_a_command_limits_its_waits_until_it_ends_though_another_one_ends_before(app):
    """The last one restores the options."""
    extension = install(app)
    one = AppSide(app, extension)
    other = AppSide(app, extension)
    one.close()
    assert not app.conf.broker_transport_options["confirm_publish"]
    other.close()
    assert app.conf.broker_transport_options == {"confirm_publish": True}


def test_a_process_that_has_only_read_the_length_of_a_queue_sends_with_its_own_options(app):
    """Such a process has a pool of connections, and none of producers."""
    assert app.pool is not None  # as with app.connection_or_acquire()
    side = AppSide(app, install(app))
    assert not confirms_messages(app)  # a command announces what it changed
    side.close()
    assert confirms_messages(app)


def test_the_connections_of_a_process_that_has_sent_stay(app):
    """A command neither uses nor closes them."""
    pool, producers = app.pool, app.amqp.producer_pool
    AppSide(app, install(app)).close()
    assert app.pool is pool
    assert app.amqp.producer_pool is producers
