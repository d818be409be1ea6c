"""The processes of a recording: started together, watched over, and ended."""

import contextlib
import functools
import hmac
import secrets
import time
from typing import Any

from tqdm import tqdm

from asyncsim.errors import InputError
from asyncsim.real.cluster import actor, share, shared, started
from asyncsim.real.folder import Header
from asyncsim.wording import note, on_a_terminal

#: Seconds between two looks at how far the processes are.
_LOOK = 0.2
#: Seconds for an answer of the server to a question that needs no turn.
_ANSWER = 30.0


class ServerActor:
    """A `Server` as an actor: what it is made of comes from the cluster's store.

    It serves only callers with its key, which the process that started it gives to the workers.
    """

    def __init__(self, content: bytes, header: Header, key: str, *options: Any):
        from asyncsim.real.server import Server

        method, problem = shared(content)
        self._key, self._server = key, Server(method, problem, header, *options)

    def call(self, key: str, name: str, *arguments: Any) -> Any:
        """Call a function of the server; raise PermissionError if the key is another one."""
        if not hmac.compare_digest(key, self._key):
            raise PermissionError(f"{name}: of a process that this recording did not start")
        return getattr(self._server, name)(*arguments)


class WorkerActor:
    """A `Worker` as an actor."""

    def __init__(self, content: bytes, index: int, header: Header):
        from asyncsim.real.worker import Worker

        method, problem = shared(content)
        self._worker = Worker(index, method, problem, header)

    def warm_up(self) -> int:
        """Compile what the worker runs; return its process."""
        import os

        self._worker.warm_up()
        return os.getpid()

    def run(self, server: Any, key: str, node: str, timeout: float) -> None:
        """Compute and visit until the server, which is on this node of the cluster, has nothing more to do."""
        import ray

        self._worker.run(Remote(server, key, timeout), ray.get_runtime_context().get_node_id() == node)


class Remote:
    """A server in another process: its functions are calls that wait for the answer."""

    def __init__(self, server: Any, key: str, timeout: float):
        self._server, self._key, self._timeout = server, key, timeout

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call and wait: as long as it takes (a visit may starve), if only the server answers others meanwhile."""
        import ray

        answer = self._server.call.remote(self._key, name, *arguments)
        while True:
            try:
                return ray.get(answer, timeout=self._timeout)
            except ray.exceptions.GetTimeoutError:
                ray.get(self._server.call.remote(self._key, "commits"), timeout=self._timeout)


class Crew:
    """The server's and the workers' processes.

    Attributes
    ----------
    server : actor handle
    workers : list of actor handle
    """

    def __init__(
        self,
        module: Any,
        shared_values: tuple[Any, Any],
        header: Header,
        cpus: float,
        memory: int | None,
        start_timeout: float,
        timeout: float,
    ):
        self._ray, self._header = module, header
        self._content = share(module, *shared_values)
        self._start_timeout, self._timeout = start_timeout, timeout
        self._key = secrets.token_hex(32)
        self._of_server = actor(module, ServerActor, cpus, memory, True, 2 * header.processes.workers + 8)
        self._of_workers = actor(module, WorkerActor, cpus, memory)
        self.server: Any = None
        self.workers: list[Any] = []
        self._running: dict[Any, int] = {}
        self._starting: dict[Any, tuple[int, float]] = {}

    def start(self, folder: str, checkpoint_every: int, keep_states: bool) -> None:
        """Start all processes, and let them go when all are ready."""
        self.server = self._of_server.remote(
            self._content, self._header, self._key, folder, checkpoint_every, keep_states
        )
        self.workers = [self._worker(index) for index in range(self._header.processes.workers)]
        calls = [self._call("warm_up"), *(worker.warm_up.remote() for worker in self.workers)]
        started(self._ray, calls, f"{len(calls)} processes", self._start_timeout)
        self._ask("start")
        for index in range(len(self.workers)):
            self._set_going(index)

    def watch(self, restart: bool, progress: bool | None) -> None:
        """Return when all commits are made; enter the workers that are lost, and start them again if asked."""
        finished = self._call("wait")
        show = on_a_terminal() if progress is None else progress
        done, moved = 0, time.monotonic()
        with tqdm(total=self._header.commits, unit="commit", disable=not show, leave=False) as bar:
            while True:
                calls = [finished, *self._running, *self._starting]
                ended, _ = self._ray.wait(calls, num_returns=1, timeout=_LOOK)
                if finished in ended:
                    self._conclude(finished)
                    return
                for call in ended:
                    if call in self._starting:
                        self._started_again(call)
                    else:
                        self._left(call, restart)
                self._give_up_late()
                now = self._ask("commits")
                bar.update(now - bar.n)
                if now > done:
                    done, moved = now, time.monotonic()
                if not self._running and not self._starting and now < self._header.commits:
                    raise InputError(f"workers: all are lost after commit {now}; {self._remedy()}")
                if time.monotonic() - moved > self._timeout:
                    raise InputError(
                        f"timeout = {self._timeout:g}: no commit for so long, after {now}; {self._remedy()}"
                    )

    def end(self) -> None:
        """End all processes."""
        for process in [self.server, *self.workers]:
            if process is not None:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.kill(process)

    def _worker(self, index: int) -> Any:
        return self._of_workers.remote(self._content, index, self._header)

    def _set_going(self, index: int) -> None:
        node = self._ray.get_runtime_context().get_node_id()
        self._running[self.workers[index].run.remote(self.server, self._key, node, self._timeout)] = index

    def _left(self, call: Any, restart: bool) -> None:
        """Look after a worker whose loop has ended: well, because its process is gone, or by an error of its own."""
        index = self._running.pop(call)
        try:
            self._ray.get(call, timeout=_ANSWER)
            return
        except self._ray.exceptions.RayError as error:
            if self._is_server_gone():
                raise self._server_gone(error) from error
            what = "process died"
            if not isinstance(error, self._ray.exceptions.RayActorError):
                cause = getattr(error, "cause", None) or error
                what = f"failed: {' '.join(f'{type(cause).__name__}: {cause}'.split())[:300]}"
        self._ask("lost", index, what)
        note(f"worker {index}: {what}{', starting it again' if restart else ''}")
        if restart:
            self.workers[index] = self._worker(index)
            late = time.monotonic() + self._start_timeout
            self._starting[self.workers[index].warm_up.remote()] = index, late

    def _started_again(self, call: Any) -> None:
        index, _ = self._starting.pop(call)
        started(self._ray, [call], f"worker {index}", _ANSWER)
        self._set_going(index)

    def _give_up_late(self) -> None:
        """Raise InputError if a worker does not start again in time."""
        for call, (index, late) in self._starting.items():
            if time.monotonic() > late:
                started(self._ray, [call], f"worker {index}", 0.0)

    def _conclude(self, finished: Any) -> None:
        try:
            trouble = self._ray.get(finished, timeout=_ANSWER)
        except self._ray.exceptions.RayError as error:
            raise self._server_gone(error) from error
        if trouble:
            raise InputError(f"server: failed: {trouble}; {self._remedy()}")

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.server.call.remote(self._key, name, *arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return self._ray.get(self._call(name, *arguments), timeout=_ANSWER)
        except self._ray.exceptions.RayError as error:
            raise self._server_gone(error) from error

    def _is_server_gone(self) -> bool:
        try:
            self._ask("commits")
        except InputError:
            return True
        return False

    def _server_gone(self, error: Exception) -> InputError:
        return InputError(f"server: its process is gone ({type(error).__name__}); {self._remedy()}")

    def _remedy(self) -> str:
        return "what was recorded is kept: go on with resume=True, in a study with --resume and its folder"
