"""The RabbitMQ that the tests start."""

from __future__ import annotations

import pytest
from kombu import Connection, Queue

from support.rabbitmq import RabbitError
from support.waiting import eventually


def test_it_lists_its_queues_and_cuts_connections(rabbit_vhost):
    """Ready, given out and not acknowledged, per queue; in classic and in quorum queues."""
    with Connection(rabbit_vhost.url) as connection:
        producer = connection.Producer()
        for kind in ("classic", "quorum"):
            arguments = {"x-queue-type": kind}
            queue = Queue(kind, routing_key=kind, queue_arguments=arguments)(producer.channel)
            queue.declare()
            assert rabbit_vhost.queue_type(kind) == kind
            for _ in range(3):
                producer.publish({}, routing_key=kind)
            eventually(queue.get)
        # A get counts as a consumer of a quorum queue, for as long as its message is out.
        eventually(lambda: counts(rabbit_vhost) == {(2, 1)}, 5, lambda: str(rabbit_vhost.depths()))
        eventually(lambda: rabbit_vhost.cut() == 1, 5, "it is known")
        eventually(lambda: counts(rabbit_vhost) == {(3, 0)}, 5, lambda: str(rabbit_vhost.depths()))


def counts(vhost):
    return {(depth.ready, depth.unacked) for depth in vhost.depths().values()}


def test_each_test_has_its_own_locks(rabbit):
    """What one declares, another does not see; a mistake is an error."""
    with rabbit.vhost() as one, rabbit.vhost() as two, Connection(one.url) as connection:
        Queue("q")(connection.default_channel).declare()
        assert list(one.depths()) == ["q"]
        assert two.depths() == {}
    with pytest.raises(RabbitError, match="nonsense"):
        rabbit.ask("nonsense:nonsense()")
