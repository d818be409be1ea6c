"""Real worker processes, with or without a real server, recorded as a trace; see `record`.

The same `asyncsim.Cluster` describes simulated and real processes: a real worker sleeps for the
cluster's compute time besides computing a gradient, and a real server for its service time. The
processes run the functions of a replay's step on the jobs of a replay: same minibatches, same
random numbers. So a recording can be replayed, and its replay must give the same parameters.

Ray runs the processes (``pip install "asyncsim[ray]"``).
"""

from asyncsim.real.agreement import Agreement, agreement
from asyncsim.real.recording import Recorded, record

__all__ = ["Agreement", "Recorded", "agreement", "record"]
