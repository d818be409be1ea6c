"""A worker process: computes jobs and visits the server, until there is nothing left to do."""

import time
from typing import Any

from asyncsim.real.computing import Computing
from asyncsim.real.folder import Header
from asyncsim.real.server import Update
from asyncsim.simulation.delays import delays

#: Calls from which the offset between two machines' clocks is found: the quickest counts.
_CALLS = 10


class Worker:
    """A worker of a recording: an actor of Ray's, or any object whose `run` has a thread.

    Parameters
    ----------
    index : int
    method, problem : Method, Problem
    header : Header
    """

    def __init__(self, index: int, method: Any, problem: Any, header: Header):
        self._index, self._processes = index, header.processes
        workers, window = header.processes.workers, header.processes.window
        self._computing = Computing(method, problem, workers, window, header.seed, header.precision)
        self._delay = delays(header.processes.delay_laws, header.seed, "delay", window)

    def warm_up(self) -> None:
        """Compile what the worker runs."""
        self._computing.run(self._index, self._computing.first_job())

    def run(self, server: Any, same_clock: bool) -> None:
        """Compute and visit until the server has nothing more to do.

        Parameters
        ----------
        server : object
            With the functions of `asyncsim.real.server.Server`.
        same_clock : bool
            Whether the server is on this machine.
        """
        zero = server.zero() if same_clock else self._find_zero(server)
        job = server.begin(self._index)
        for _ in range(0 if job is None else job.job):
            self._delay(self._index)  # delays belong to jobs, also if another process computed those before
        while job is not None:
            start_time = time.monotonic() - zero
            time.sleep(self._delay(self._index))
            result = self._computing.run(self._index, job)
            send_time = time.monotonic() - zero
            if self._processes.pulls and server.pull(self._index, job.job) is None:
                return
            update = Update(job.job, start_time, send_time, result.update, float(result.loss), result.learner)
            job = server.commit(self._index, update)

    def _find_zero(self, server: Any) -> float:
        """Return when the server's clock was zero, on this machine's."""
        found = []
        for _ in range(_CALLS):
            before = time.monotonic()
            there = server.clock()
            after = time.monotonic()
            found.append((after - before, (before + after) / 2 - there))
        return min(found)[1]
