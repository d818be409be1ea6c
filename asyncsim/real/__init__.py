"""Real worker processes around a real parameter server, recorded as a trace; see `record`.

One process holds the central variable and all states that belong to it; each worker's process
computes its gradients with one thread. The server serves visits one at a time, with the functions
of the method that a replay uses, and the workers compute the jobs that a replay would compute: same
minibatches, same random numbers. So a recording can be replayed, and its replay must give the same
parameters.

Ray runs the processes (``pip install "asyncsim[ray]"``); no other part of asyncsim needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncsim.real.processes import Processes
    from asyncsim.real.recording import Recorded, load
    from asyncsim.real.supervisor import record

__all__ = ["Processes", "Recorded", "load", "record"]

#: The module of each name, imported on first use: the options of studies need no traces.
_HOME = {
    "Processes": "processes",
    "Recorded": "recording",
    "load": "recording",
    "record": "supervisor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'asyncsim.real' has no attribute {name!r}")
    return getattr(importlib.import_module(f"asyncsim.real.{_HOME[name]}"), name)
