"""A simulated quorum: servers, clocks that drift, and a network that loses and delays messages.

The steps are the library's (:mod:`celery_singleton_lock.store.quorum.votes`); the servers and the
network are simulated. A simulated server does in Python what the scripts do in Redis.
tests/contract/test_quorum_scripts.py checks that both do the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.store.quorum.values import Bid, Each, Elected, ServerState, VoteReply
from celery_singleton_lock.store.quorum.votes import Votes

NAME = "a"
LEASE = 10.0
LONGEST = 12.0
TIMEOUT = 0.5
GRACE = 60.0
EPSILON = 1e-4


@dataclass
class Vote:
    """What a server keeps of a lock."""

    token: str = ""
    round: int = 0
    till: float = 0.0
    fence: int = 0


class Server:
    """One server: what the scripts do, in Python.

    Args:
        time: returns the true time, in seconds.
        rate: how fast its clock runs.
        offset: by how much its clock is ahead.
    """

    def __init__(self, time, rate: float = 1.0, offset: float = 0.0, run: str = "run-0") -> None:
        self._time, self._rate, self._offset = time, rate, offset
        self.run, self._starts = run, itertools.count(1)
        self.votes: dict[str, Vote] = {}
        self.gone: dict[tuple[str, str], tuple[int, float]] = {}
        self.mark: tuple[str, float] | None = None
        self.alive = True

    @property
    def now(self) -> float:
        """Its clock."""
        return self._offset + self._time() * self._rate

    def restart(self, *, lose: bool) -> None:
        """Start anew, with the data or without."""
        self.alive, self.run = True, f"{self.run.rsplit('-', 1)[0]}-{next(self._starts)}"
        if lose:
            self.votes, self.gone, self.mark = {}, {}, None

    def admit_voter(self) -> str:
        self.mark = (self.run, 0.0)
        return self.run

    def newness(self, new_for: float) -> float:
        if self.mark is None or self.mark[0] != self.run:
            self.mark = (self.run, self.now)
        return max(0.0, self.mark[1] + new_for - self.now)

    def read(self, name: str) -> Vote:
        """The vote for a lock; nobody's if it has lapsed, forgotten after a while."""
        vote = self.votes.get(name, Vote())
        if vote.till <= self.now:
            remembered = vote.fence if self.now < vote.till + GRACE else 0
            return Vote(fence=remembered, till=0.0)
        return vote

    def vote(self, bid: Bid) -> VoteReply:
        new_for, vote = self.newness(bid.new_for), self.read(bid.name)
        gone, until = self.gone.get((bid.name, bid.token), (-1, 0.0))
        left = vote.till - self.now
        if self.now > bid.until:
            return self._say("late")
        if until > self.now and bid.round <= gone:
            return self._say("gone")
        if vote.token and vote.token != bid.token:
            return self._say("busy", 0, left)
        if not vote.token and new_for > 0:
            return self._say("new", 0, new_for)
        ours = vote.token == bid.token
        number = max(vote.fence if ours else vote.fence + 1, bid.fence)
        self.votes[bid.name] = Vote(
            bid.token,
            max(vote.round if ours else 0, bid.round),
            self.now + max(left, bid.lease),
            number,
        )
        return self._say("yes", number)

    def vote_many(self, bids) -> None:
        for bid in bids:
            self.vote(bid)

    def _say(self, verdict: str, number: int = 0, left: float = 0.0) -> VoteReply:
        return VoteReply(verdict, number, left, self.now, self.run)

    def withdraw_vote(self, name: str, token: str, round_: int, keep: float) -> bool:
        vote = self.read(name)
        gone, until = self.gone.get((name, token), (0, 0.0))
        last = max(round_, gone) if until > self.now else round_
        self.gone[name, token] = (last, self.now + keep)
        if vote.token != token or vote.round > round_:
            return False
        self.votes[name] = Vote(fence=vote.fence, till=self.now)
        return True

    def renew_votes(self, leases) -> list[tuple[bool, int]]:
        return [self._renew(*each) for each in leases]

    def _renew(self, name: str, token: str, lease: float) -> tuple[bool, int]:
        vote = self.read(name)
        if vote.token != token:
            return False, vote.fence
        vote.till = max(vote.till, self.now + lease)
        return True, vote.fence

    def server_state(self, name: str, new_for: float) -> ServerState:
        fresh, vote = self.newness(new_for), self.read(name)
        left = max(0.0, vote.till - self.now)
        return ServerState(vote.token, vote.fence, left, self.now, self.run, fresh)


class ClientClock:
    """A client's monotonic clock.

    Args:
        time: returns the true time.
        rate: how fast it runs.
        offset: where it began.
    """

    def __init__(self, time, rate: float, offset: float) -> None:
        self._time, self._rate, self._offset = time, rate, offset

    def monotonic(self) -> float:
        return self._offset + self._time() * self._rate

    def true(self, mine: float) -> float:
        """The true time at which this clock shows ``mine``."""
        return (mine - self._offset) / self._rate


@dataclass(eq=False)
class Message:
    """A request on its way; it may arrive at any time, or never."""

    client: Client
    wish: int
    server: int
    call: Any
    about: str


@dataclass(eq=False)
class Client:
    """One client: at most one plan at a time, and what it believes."""

    name: str
    clock: ClientClock
    ballot: Votes
    plan: Any = None
    doing: str = ""
    wish: Each | None = None
    wishes: int = 0
    answers: dict[int, Any] = field(default_factory=dict)
    until: float = 0.0
    asked: float = 0.0
    token: str = ""
    fence: int = 0
    valid_until: float = 0.0
    holds: bool = False
    lost: bool = False
    tries: int = 0

    @property
    def believes(self) -> bool:
        return self.holds and self.clock.monotonic() < self.valid_until


class World:
    """Servers, clients, and the network between them.

    Args:
        count: how many servers.
        ballot: the class under test; a mutant in its place must be found out.
        server: likewise.
        clients: how many.
        spread: by how much clocks run too fast or too slow.
    """

    def __init__(
        self, count: int, *, ballot=Votes, server=Server, clients: int = 3, spread: float = 0.0045
    ) -> None:
        self.true = 100.0
        rates = itertools.cycle((1.0 + spread, 1.0, 1.0 - spread))
        offsets = itertools.cycle((0.0, 20.0, -20.0))
        self.servers = [
            server(self.now, next(rates), next(offsets), f"server{n}-0") for n in range(count)
        ]
        for each in self.servers:
            each.admit_voter()
        rates = itertools.cycle((1.0 - spread, 1.0 + spread, 1.0))
        self.clients: list[Client] = []
        for n in range(clients):
            clock = ClientClock(self.now, next(rates), 1000.0 * n)
            votes = ballot(count, clock, timeout=TIMEOUT, longest_lease=LONGEST)
            self.clients.append(Client(f"client{n}", clock, votes))
        self.cut: set[tuple[str, int]] = set()
        self.network: list[Message] = []
        self.last_fence = 0
        self.forgot = False
        self.lost_withdraw: set[tuple[str, int]] = set()

    def now(self) -> float:
        return self.true

    @property
    def minority(self) -> int:
        return (len(self.servers) - 1) // 2

    # -- what clients do --------------------------------------------------------------------------

    def elect(self, client: Client, *, same: bool = False) -> None:
        if not same or not client.token:
            client.tries += 1
            client.token = f"{client.name}.{client.tries}"
        client.asked = client.clock.monotonic()
        fence = int((self.true + 15 * (client.tries % 2)) * 1000)  # from clocks 15 s apart
        self._begin(client, "elect", client.ballot.elect(NAME, client.token, LEASE, fence))

    def renew(self, client: Client) -> None:
        client.asked = client.clock.monotonic()
        self._begin(client, "renew", client.ballot.renew([(NAME, client.token, LEASE)]))

    def release(self, client: Client) -> None:
        client.holds = client.lost = False
        self._begin(client, "release", client.ballot.withdraw(NAME, client.token))

    def crash(self, client: Client) -> None:
        """The process is gone; what it has sent is not."""
        client.plan = client.wish = None
        client.doing, client.holds, client.lost = "", False, False
        for server in range(len(self.servers)):
            self.lost_withdraw.add((client.token, server))
        client.token = ""

    def _begin(self, client: Client, doing: str, plan) -> None:
        client.plan, client.doing = plan, doing
        self._go_on(client, None)

    def _go_on(self, client: Client, answers) -> None:
        """Have the plan wish for something, or end."""
        client.wish = None
        try:
            wish = next(client.plan) if answers is None else client.plan.send(answers)
        except StopIteration as end:
            client.plan, doing, client.doing = None, client.doing, ""
            getattr(self, f"_end_{doing}")(client, end.value)
            return
        client.wish, client.answers = wish, {}
        client.wishes += 1
        client.until = client.clock.monotonic() + TIMEOUT
        for server, call in wish.calls.items():
            message = Message(client, client.wishes, server, call, client.token)
            self.network.append(message)
        if not wish.calls:
            self._go_on(client, {})

    def _end_elect(self, client: Client, result) -> None:
        if isinstance(result, Elected):
            client.holds = True
            client.valid_until, client.fence = result.valid_until, result.fencing_token
            if not self.forgot:
                assert client.fence > self.last_fence, "fences grow in the order of grants"
            self.last_fence = max(self.last_fence, client.fence)

    def _end_renew(self, client: Client, result) -> None:
        held, _ = result
        if held[0]:
            client.valid_until = max(client.valid_until, client.asked + LEASE)
        elif held[0] is False:
            client.holds, client.lost = False, True

    def _end_release(self, client: Client, _result) -> None:
        client.token = ""

    # -- what the network does --------------------------------------------------------------------

    def deliver(self, message: Message, *, answer: bool = True) -> None:
        """A request arrives, if the server can be reached; its answer too, or not."""
        self.network.remove(message)
        client, server = message.client, self.servers[message.server]
        if not server.alive or (client.name, message.server) in self.cut:
            self.lost_withdraw.add((message.about, message.server))
            return
        said = message.call(server)
        self.check()
        heard = client.wish is not None and client.wishes == message.wish
        if heard and answer:
            client.answers[message.server] = said
            self._look(client)

    def drop(self, message: Message) -> None:
        self.network.remove(message)
        self.lost_withdraw.add((message.about, message.server))

    def _look(self, client: Client) -> None:
        wish = client.wish
        if wish is not None and (
            len(client.answers) == len(wish.calls) or wish.enough(client.answers)
        ):
            self._go_on(client, client.answers)
            self.check()

    def finish(self, client: Client) -> None:
        """Everything of this client arrives at once, until its plan ends."""
        while client.plan is not None:
            for message in self._mine(client):
                if message in self.network:
                    self.deliver(message)
            if client.plan is not None and not self._mine(client):
                self.pass_time(TIMEOUT * 1.1)

    def _mine(self, client: Client) -> list[Message]:
        """What this client's plan waits for."""
        wish = client.wishes
        return [m for m in self.network if m.client is client and m.wish == wish]

    def arrive(
        self, client: Client, *servers: int, answer: bool = True, lose: bool = False
    ) -> None:
        """What a client has just asked these servers arrives; the rest is late, or lost."""
        for message in self._mine(client):
            if message.server in servers and message in self.network:
                self.deliver(message, answer=answer)
            elif lose and message in self.network:
                self.drop(message)

    def meet(self) -> None:
        """All clients know all servers' clocks."""
        for client in self.clients:
            self._begin(client, "meet", client.ballot.server_states(NAME))
            self.finish(client)

    def _end_meet(self, client: Client, _result) -> None:
        pass

    # -- time -------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Let true time pass; clients whose patience ends go on with what they have."""
        goal = self.true + seconds
        while True:
            ends = sorted(
                (max(self.true, client.clock.true(client.until)), client.name, client)
                for client in self.clients
                if client.wish is not None
            )
            if not ends or ends[0][0] > goal:
                break
            self.true = ends[0][0] + EPSILON
            self.check()
            self._go_on(ends[0][2], ends[0][2].answers)
            self.check()
        self.true = max(self.true, goal)
        self.check()

    def moments(self) -> list[float]:
        """When something ends: votes, beliefs, patience, newness."""
        found = [client.clock.true(client.valid_until) for client in self.clients if client.holds]
        for server in self.servers:
            vote = server.votes.get(NAME)
            if vote is not None:
                found.append((vote.till - server._offset) / server._rate)
            if server.mark is not None and server.mark[1]:
                end = server.mark[1] + self.clients[0].ballot.kept(LONGEST)
                found.append((end - server._offset) / server._rate)
        return sorted(moment for moment in found if moment > self.true)

    # -- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        owners = [client.name for client in self.clients if client.believes]
        assert len(owners) <= 1, f"{owners} own the lock at once"

    def settle(self) -> None:
        """Let all arrive, and all end; then nothing may stay behind, and the lock can be had."""
        for client in self.clients:
            self.finish(client)
            if client.holds or client.lost:  # who has lost a lock is told, and releases
                self.release(client)
                self.finish(client)
        for message in list(self.network):
            if message in self.network:
                self.deliver(message)
        for number, server in enumerate(self.servers):
            vote = server.read(NAME)
            lost = (vote.token, number) in self.lost_withdraw
            assert not vote.token or lost or not server.alive, (
                f"server {number} keeps a vote of {vote.token}"
            )
        self._end_well()

    def _end_well(self) -> None:
        """A majority alive, all reachable, and one longest lease later: somebody owns the lock."""
        self.cut.clear()
        dead = [server for server in self.servers if not server.alive]
        for server in dead[self.minority :]:
            server.restart(lose=False)
        for _ in range(2):  # greeted once, so that they are known to be new; then not any more
            self.pass_time(2 * LONGEST)
            client = self.clients[0]
            self.elect(client)
            self.finish(client)
        assert client.believes, "with a majority alive the lock can be had"
