"""An event loop in a thread, with which synchronous tests call asyncio code."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """A running event loop. Each calling thread has its own asyncio task in it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self._mine = threading.local()
        self._serving: set[asyncio.Task[None]] = set()  # a loop keeps only weak references to tasks

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self) -> None:
        """Cancel all tasks, as ``asyncio.run`` does; also renewals of locks that are still held."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this thread's task, and return what it returns."""
        done: Future[Any] = Future()
        self.loop.call_soon_threadsafe(self._calls().put_nowait, (call, done))
        return done.result()

    def call(self, function: Any, *args: Any) -> Any:
        """Call a plain function in this thread's task."""

        async def called() -> Any:
            return function(*args)

        return self.run(called())

    def _calls(self) -> asyncio.Queue[Any]:
        if not hasattr(self._mine, "calls"):
            self._mine.calls = asyncio.run_coroutine_threadsafe(self._serve(), self.loop).result()
        return self._mine.calls

    async def _serve(self) -> asyncio.Queue[Any]:
        calls: asyncio.Queue[Any] = asyncio.Queue()

        async def serve() -> None:
            while True:
                call, done = await calls.get()
                try:
                    done.set_result(await call)
                except asyncio.CancelledError:
                    done.cancel()
                    raise
                except BaseException as error:  # noqa: BLE001  # raised in the calling thread
                    done.set_exception(error)
                del call, done

        self._serving.add(asyncio.get_running_loop().create_task(serve()))
        return calls


class Driven:
    """Wraps an asyncio object for synchronous tests: methods return the results of coroutines.

    Attributes are passed through. Calls run in the asyncio task of the calling thread.
    """

    def __init__(self, thread: LoopThread, real: Any) -> None:
        self.__dict__.update(_thread=thread, real=real)

    def __getattr__(self, name: str) -> Any:
        found = self._thread.call(getattr, self.real, name)
        if not callable(found) or inspect.isclass(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if inspect.iscoroutinefunction(found):
                return self._thread.run(found(*args, **kwargs))
            return self._thread.call(lambda: found(*args, **kwargs))

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)

    def __repr__(self) -> str:
        return self._thread.call(repr, self.real)

    def __enter__(self):
        self._thread.run(self.real.__aenter__())
        return self

    def __exit__(self, *exc: object) -> Any:
        return self._thread.run(self.real.__aexit__(*exc))
