"""A real server of a quorum and a simulated one, which must give the same replies; and mutants.

The results of the state machine with simulated servers (support/quorum_simulation.py) hold for the
scripts as far as the two agree.
"""

from __future__ import annotations

import random

from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.quorum.sync import RedisNode
from celery_singleton_lock.store.quorum.values import Bid
from celery_singleton_lock.store.scripts import (
    QUORUM_VERBS,
    Script,
    assemble,
    file_of,
    load_quorum_scripts,
    load_scripts,
    read,
)
from support.quorum_simulation import Server
from support.script_model.mutants import Mutant

CLOCK = "local function server_time() return redis.call('GET', 'clock') end"
NEW_FOR = 12.0
FOR_EVER = 10.0**6
KEYSPACE = Keyspace()
LIBRARY = "quorum/_server.lua"


class Differs(AssertionError):  # what it says
    """The real server does not do what the simulated one does."""


class Twin:
    """A real server whose clock says what the model's says."""

    def __init__(self, client, scripts=None) -> None:
        self.client = client
        self.time = 1000.0
        self.model = Server(lambda: self.time)
        quorum = scripts or load_quorum_scripts(CLOCK)
        self.node = RedisNode(client, scripts={**load_scripts(), **quorum})
        self.advance(0)

    def advance(self, seconds) -> None:
        self.time = round(self.time + seconds, 3)
        self.client.set("clock", round(self.time * 1e6))

    def restart(self, *, lose) -> None:
        self.model.restart(lose=lose)
        if lose:
            self.client.flushdb()
            self.advance(0)
        else:
            self.client.hset(KEYSPACE.quorum, "run", "another")

    def both(self, call):
        """The real answer, which must be the model's."""
        real, model = call(self.node), call(self.model)
        if hasattr(real, "run"):
            real, model = real._replace(run=""), model._replace(run="")
        if repr(_rounded(real)) != repr(_rounded(model)):
            msg = f"the script answers {real}, the model {model}"
            raise Differs(msg)
        self._all_ends()
        return real

    def _all_ends(self) -> None:
        """All but our mark on the server expires, and no vote before its time."""
        for key in set(self.client.keys()) - {b"clock", KEYSPACE.quorum.encode()}:
            left = self.client.pttl(key) / 1000
            vote = self.model.read(key.split(b":")[2].decode())
            needed = vote.till - self.time if key.endswith(b":vote") else 0.0
            if left <= max(0.0, needed - 1.0):
                msg = f"{key} expires in {left} s"
                raise Differs(msg)


def _rounded(answer):
    if isinstance(answer, float):
        return round(answer, 3) + 0.0
    if isinstance(answer, (tuple, list)):
        return [_rounded(each) for each in answer]
    return answer


def bid_at(server, token, round_=1, *, lease=10.0, fence=0, late=1.0) -> Bid:
    """A bid for the lock "a", at the server's time."""
    return Bid("a", token, round_, lease, fence, server.time + late, NEW_FOR)


def walk(server: Twin, seed: int, steps: int = 60) -> None:
    """Have both do the same, at random."""
    chance = random.Random(seed)
    server.restart(lose=True)
    for step in range(steps):
        a_move(server, chance, step)
        if step % 4 == 3:
            server.advance(chance.choice([1, 4]))
        if step == 20:
            server.restart(lose=False)
        if step == 30 and seed % 2:
            server.both(lambda node: bool(node.admit_voter()))
    rounds_out_of_order(server, "p", "p")
    rounds_out_of_order(server, "q", "r")


def rounds_out_of_order(server: Twin, first: str, second: str) -> None:
    """The end of an earlier try comes between two; of the same token, or after another's."""
    server.advance(15)  # whatever there was has lapsed
    one = bid_at(server, first, 8, lease=2.0)
    server.both(lambda node: node.vote(one))
    if first != second:
        server.advance(3)
    other = bid_at(server, second, 6, lease=2.0)
    server.both(lambda node: node.vote(other))
    server.both(lambda node: node.withdraw_vote("a", second, 7, FOR_EVER))


def a_move(server: Twin, chance: random.Random, step: int) -> None:
    token, round_ = chance.choice("xy"), chance.randint(max(0, step - 4), step + 1)
    fence, late = chance.choice([0, 7, 99]), chance.choice([-1, 1, 1])
    lease, longer = chance.choice([2.0, 10.0]), chance.choice([1.0, 4.0, 12.0])
    asked = bid_at(server, token, round_, lease=lease, fence=fence, late=late)
    calls = [
        lambda node: node.vote(asked),
        lambda node: node.withdraw_vote("a", token, round_, FOR_EVER),
        lambda node: node.renew_votes([("a", token, longer), ("b", token, longer)]),
        lambda node: node.server_state("a", NEW_FOR),
    ]
    server.both(chance.choices(calls, [6, 3, 2, 1])[0])


# --- wrong scripts --------------------------------------------------------------------------------

MUTANTS = (
    Mutant("a vote is given twice", "quorum/vote.lua",
           "if holder ~= '' and holder ~= token", "if false"),
    Mutant("who is new votes", "quorum/vote.lua", "if holder == '' and new_for > 0", "if false"),
    Mutant("late requests count", "quorum/vote.lua", "if now > tonumber(until_ms)", "if false"),
    Mutant("the end is forgotten", "quorum/vote.lua", "if tonumber(round) <= gone", "if false"),
    Mutant("a round comes twice", "quorum/vote.lua",
           "tonumber(round) <= gone", "tonumber(round) < gone"),
    Mutant("numbers stand still", "quorum/vote.lua", "or last + 1,", "or last,"),
    Mutant("numbers always grow", "quorum/vote.lua",
           "token and last or last + 1", "token and last + 1"
           " or last + 1"),
    Mutant("no number is asked for", "quorum/vote.lua", ", tonumber(fence))", ", 0)"),
    Mutant("asking again shortens", "quorum/vote.lua", "math.max(left, tonumber(lease_ms))",
           "tonumber(lease_ms)"),
    Mutant("rounds go back", "quorum/vote.lua", "token and last_round or 0,", "token and 0 or 0,"),
    Mutant("rounds of others count", "quorum/vote.lua", "holder == token and last_round or 0",
           "last_round"),
    Mutant("a vote expires early", "quorum/vote.lua", "lease + GRACE_MS", "math.floor(lease / 2)"),
    Mutant("a vote never expires", "quorum/vote.lua",
           "redis.call('PEXPIRE', KEYS[1], lease + GRACE_MS)\n",
           ""),
    Mutant("anybody withdraws", "quorum/withdraw_vote.lua",
           "holder == token and", "holder ~= '' and"),
    Mutant("an old end takes the vote", "quorum/withdraw_vote.lua",
           " and last_round <= tonumber(round)", ""),
    Mutant("the vote stays", "quorum/withdraw_vote.lua", "if ours then redis.call('HDEL'",
           "if false then redis.call('HDEL'"),
    Mutant("the number goes along", "quorum/withdraw_vote.lua", "'token', 'round', 'till')",
           "'token', 'round', 'till', 'fence')"),
    Mutant("no end is kept", "quorum/withdraw_vote.lua", "'SET', KEYS[2]", "'GET', KEYS[2]"),
    Mutant("an older end counts", "quorum/withdraw_vote.lua", "math.max(gone, tonumber(round))",
           "tonumber(round)"),
    Mutant("what is taken back stays", "quorum/withdraw_vote.lua", "if ours or holder == '' then",
           "if holder == '' then"),
    Mutant("what others have stays", "quorum/withdraw_vote.lua",
           "if not ours and holder ~= '' then",
           "if false then"),
    Mutant("others' votes expire early", "quorum/withdraw_vote.lua",
           "math.max(0, tonumber(redis.call('HGET', KEYS[1], 'till')) - now) + GRACE_MS", "1000"),
    Mutant("renewal creates", "quorum/renew_votes.lua", "local held = holder == token",
           "local held = holder == token or holder == ''\n"
           "if held then redis.call('HSET', key, 'token', token) end"),
    Mutant("anybody renews", "quorum/renew_votes.lua", "local held = holder == token",
           "local held = holder ~= ''"),
    Mutant("renewal shortens", "quorum/renew_votes.lua", "lease = math.max(left, lease)", ""),
    Mutant("renewal only says so", "quorum/renew_votes.lua",
           "redis.call('HSET', key, 'till', digits(now + lease))\n", ""),
    Mutant("what is renewed stays", "quorum/renew_votes.lua",
           "redis.call('PEXPIRE', key, lease + GRACE_MS)\n", ""),
    Mutant("what is renewed expires", "quorum/renew_votes.lua", "lease + GRACE_MS", "1"),
    Mutant("a lapsed vote counts", LIBRARY, "left > 0 and v[1] or ''", "v[1] or ''"),
    Mutant("a restart is not seen", LIBRARY, "if mark[1] ~= run then", "if not mark[1] then"),
    Mutant("who is new stays so", LIBRARY, "if mark[1] ~= run then", "if true then"),
    Mutant("who is new is soon old", LIBRARY, "tonumber(longest_ms) - now",
           "tonumber(longest_ms) / 2 - now"),
    Mutant("the number is forgotten", LIBRARY, "tonumber(v[4] or 0)", "left > 0 and tonumber(v[4]) "
           "or 0"),
    Mutant("an admitted server is new", "quorum/admit_voter.lua",
           "'since', 0)", "'since', digits(now))"),
    Mutant("greetings hide the owner", "quorum/server_state.lua", "return {holder,", "return {'',"),
)  # fmt: skip


def scripts_of(mutant: Mutant) -> dict[str, Script]:
    """The scripts of a server, one of them wrong."""
    texts = {file: read(file) for file in (LIBRARY, *(file_of(verb) for verb in QUORUM_VERBS))}
    texts[mutant.file] = mutant.patched()
    before = f"{CLOCK}\n{texts[LIBRARY]}"
    return {verb: assemble(verb, before, "", texts[file_of(verb)]) for verb in QUORUM_VERBS}
