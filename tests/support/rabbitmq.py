"""One RabbitMQ for a whole run, shared by all test processes.

The first process that asks starts a *keeper* (this file, as a script), which starts the server, and
an epmd of its own, in a folder of the run. Every process that uses the server holds a shared lock
on a file. The system frees that however a process ends, and when nobody holds it any more, the
keeper ends the server and removes the folder. Nothing of the machine's own RabbitMQ is touched:
ports, node name, cookie, data and logs are the run's.

A test gets a virtual host of its own, so tests do not see each other's queues. What the broker
knows is asked through a small Erlang node next to it: a millisecond, where ``rabbitmqctl`` needs a
second.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

HOST = "127.0.0.1"
NODE_HOST = "localhost"
START_TIMEOUT = 90.0
"""Seconds for one start; 5 on an idle machine."""
ATTEMPTS = 3
CHECK = 0.5
"""Seconds between two looks of the keeper whether anybody is left."""

# Debian's /usr/sbin/rabbitmq-server becomes the user rabbitmq; this is what it runs then.
SERVERS = ("/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server")


class RabbitError(RuntimeError):
    """The server could not be started, or did not understand."""


def find_server() -> str | None:
    """Return the program that starts a RabbitMQ, if this machine has one."""
    if shutil.which("erl") is None or shutil.which("epmd") is None:
        return None
    return next(filter(None, map(shutil.which, SERVERS)), None)


class Depth(NamedTuple):
    """What is in a queue."""

    ready: int
    unacked: int
    consumers: int


class RabbitMQ:
    """The server of this run, as one test process sees it.

    Args:
        home: folder of the run, the same for all of its processes.
    """

    _names = itertools.count(1)

    def __init__(self, home: Path) -> None:
        self._home = home
        self._users: Any = None
        self._node: _Node | None = None
        self.port = 0

    def __enter__(self) -> Self:
        """Use the server that runs, or start one."""
        self._home.mkdir(exist_ok=True)
        self._users = (self._home / "users").open("w")
        fcntl.flock(self._users, fcntl.LOCK_SH)  # waits while a keeper is just ending
        with (self._home / "start").open("w") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            facts = self._facts() or self._start()
        self.port = facts["port"]
        self._node = _Node(facts)
        return self

    def __exit__(self, *_: object) -> None:
        """Use it no more; the keeper ends it after the last."""
        if self._node is not None:
            self._node.close()
        if self._users is not None:
            self._users.close()

    def _facts(self) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads((self._home / "ready").read_text()))
        return None

    def _start(self) -> dict[str, Any]:
        failed = self._home / "failed"
        failed.unlink(missing_ok=True)
        keeper = [sys.executable, __file__, str(self._home)]
        subprocess.run(keeper, stdin=subprocess.DEVNULL, start_new_session=True, check=True)
        deadline = time.monotonic() + START_TIMEOUT * ATTEMPTS
        while not (facts := self._facts()):
            if failed.exists() or time.monotonic() > deadline:
                raise RabbitError(failed.read_text() if failed.exists() else "no answer")
            time.sleep(0.05)
        return facts

    # -- restarts ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the broker for all who use it: connections are closed, and new ones refused."""
        self.ask("rabbit:stop()")

    def start(self) -> None:
        """Start the broker again, with its durable queues and messages, on the same port."""
        self.ask("rabbit:start()")

    # -- virtual hosts ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def vhost(self) -> Iterator[VirtualHost]:
        """Make a virtual host, and remove it with all that is in it."""
        name = f"t{os.getpid()}-{next(self._names)}"
        self.ask(f'rabbit_vhost:add(<<"{name}">>, <<"tests">>)')
        self.ask(
            f'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"{name}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"tests">>)'
        )
        try:
            yield VirtualHost(self, name)
        finally:
            self.ask(f'rabbit_vhost:delete(<<"{name}">>, <<"tests">>)')

    def ask(self, expression: str) -> str:
        """Evaluate an Erlang expression in the server; return its value as text.

        Raises:
            RabbitError: it failed.
        """
        if self._node is None:
            raise RabbitError("not in use: enter it first")
        return self._node.ask(expression)


class VirtualHost:
    """A part of the server that one test has for itself."""

    def __init__(self, server: RabbitMQ, name: str) -> None:
        self.server, self.name = server, name
        self.url = f"amqp://guest:guest@{HOST}:{server.port}/{name}"

    def depths(self) -> dict[str, Depth]:
        """Return what is in each queue."""
        answer = self.server.ask(_DEPTHS % self.name)
        rows = re.findall(r'\{<<"([^"]*)">>,(\d+),(\d+),(\d+)\}', answer)
        return {name: Depth(*map(int, numbers)) for name, *numbers in rows}

    def queue_type(self, queue: str) -> str:
        """Return ``classic`` or ``quorum``."""
        rows = dict(re.findall(r'\{<<"([^"]*)">>,rabbit_(\w+?)_queue\}', self._types()))
        return rows[queue]

    def _types(self) -> str:
        return self.server.ask(
            "[{element(4, amqqueue:get_name(Q)), amqqueue:get_type(Q)}"
            f' || Q <- rabbit_amqqueue:list(<<"{self.name}">>)]'
        )

    def delete(self, queue: str) -> None:
        """Delete a queue with all its messages; the broker cancels its consumers."""
        self.server.ask(
            f'{{ok, Q}} = rabbit_amqqueue:lookup({{resource, <<"{self.name}">>, queue, '
            f'<<"{queue}">>}}), element(1, rabbit_amqqueue:delete(Q, false, false, <<"tests">>))'
        )

    def cut(self) -> int:
        """Close all connections, as a broker does that goes away. Return how many there were."""
        answer = self.server.ask(
            '[catch rabbit_networking:close_connection(element(6, C), "cut by a test")'
            f' || C <- rabbit_connection_tracking:list(<<"{self.name}">>)]'
        )
        return answer.count("ok")


_DEPTHS = (
    "[case amqqueue:get_type(Q) of"
    " rabbit_quorum_queue ->"
    "  {ok, {_, O}, _} = ra:local_query(amqqueue:get_pid(Q), fun rabbit_fifo:overview/1),"
    "  {element(4, amqqueue:get_name(Q)), maps:get(num_ready_messages, O),"
    "   maps:get(num_checked_out, O), maps:get(num_consumers, O)};"
    " _ ->"
    "  [{_, R}, {_, U}, {_, C}] ="
    "   rabbit_amqqueue:info(Q, [messages_ready, messages_unacknowledged, consumers]),"
    "  {element(4, amqqueue:get_name(Q)), R, U, C}"
    ' end || Q <- rabbit_amqqueue:list(<<"%s">>)]'
)


class _Node:
    """An Erlang node that has expressions evaluated in the server, one per line."""

    LOOP = """
        Node = list_to_atom(os:getenv("RABBITMQ_NODENAME")),
        Eval = fun(Line) ->
            {ok, Tokens, _} = erl_scan:string(Line),
            {ok, Expressions} = erl_parse:parse_exprs(Tokens),
            {value, Value, _} = rpc:call(Node, erl_eval, exprs, [Expressions, []], 15000),
            Value end,
        Loop = fun(Again) ->
            case io:get_line("") of
                eof -> halt(0);
                Line ->
                    Answer = try {ok, Eval(Line)} catch _:Why -> {error, Why} end,
                    io:format("~0p~n", [Answer]),
                    Again(Again) end end,
        Loop(Loop).
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        name = f"csl-asks-{os.getpid()}-{secrets.token_hex(3)}@{NODE_HOST}"
        self._process = subprocess.Popen(
            ["erl", "-noshell", "-hidden", "-sname", name, "-eval", " ".join(self.LOOP.split())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **facts["env"]},
        )

    def ask(self, expression: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{expression}.\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.startswith("{ok,"):
            raise RabbitError(f"{expression}: {answer or 'the Erlang node has ended'}")
        return answer[len("{ok,") : -len("}\n")]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends at the end of its input
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


# --- the keeper -----------------------------------------------------------------------------------


class _Keeper:
    """Runs the server as long as anybody uses it.

    Args:
        home: folder of the run.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._scratch = home / "server"
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        with (self._home / "users").open("w") as users:
            try:
                self._start_somewhere()
                while self._processes[-1].poll() is None and not _is_last(users):
                    time.sleep(CHECK)
            except RabbitError as error:
                (self._home / "failed").write_text(f"RabbitMQ did not start: {error}")
            finally:
                (self._home / "ready").unlink(missing_ok=True)
                self._end()

    def _start_somewhere(self) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._start(_ports(3))
            except RabbitError:
                self._end()
                if attempt == ATTEMPTS:
                    raise
        return None

    def _start(self, ports: list[int]) -> None:
        env = self._prepare(*ports)
        epmd = ["epmd", "-address", HOST, "-port", str(ports[0])]
        self._run(epmd, env, lambda: _answers(ports[0]))
        self._run([find_server() or SERVERS[0]], env, lambda: "startup complete" in self._log())
        facts = {"port": ports[1], "env": env}
        (self._home / "ready.new").write_text(json.dumps(facts))
        (self._home / "ready.new").rename(self._home / "ready")

    def _prepare(self, epmd: int, port: int, distribution: int) -> dict[str, str]:
        """Write what the server reads at its start, and return its environment."""
        folder = self._scratch
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        cookie = folder / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        (folder / "plugins").write_text("[].\n")
        (folder / "env.conf").touch()
        (folder / "rabbitmq.conf").write_text(
            "log.console.level = info\ndisk_free_limit.absolute = 1MB\n"
        )
        return {
            "HOME": str(folder),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(epmd),
            "RABBITMQ_NODENAME": f"csl-{secrets.token_hex(4)}@{NODE_HOST}",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "env.conf"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server, so a kill reaches it
        }

    def _run(
        self, command: list[str], env: Mapping[str, str], is_ready: Callable[[], bool]
    ) -> None:
        with (self._scratch / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  # the keeper has one thread
            )
        self._processes.append(process)
        deadline = time.monotonic() + START_TIMEOUT
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RabbitError(f"{command[0]} does not run: {self._log()[-3000:]}")
            time.sleep(0.02)

    def _log(self) -> str:
        return (self._scratch / "log.txt").read_text(errors="replace")

    def _end(self) -> None:
        while self._processes:
            process = self._processes.pop()
            process.kill()  # its data is thrown away, so there is nothing to shut down in order
            process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _is_last(users: Any) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ports(count: int) -> list[int]:
    """Return ports that are free just now."""
    with contextlib.ExitStack() as probes:
        found = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind((HOST, 0))
            found.append(int(probe.getsockname()[1]))
        return found


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the keeper ends (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def _main(home: Path) -> None:
    """Run as a process that belongs to none of those that use the server."""
    if os.fork() == 0:
        log = os.open(home / "keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _Keeper(home).run()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
