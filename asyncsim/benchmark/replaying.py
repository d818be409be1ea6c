"""Replays in turns of the throughput study: one run, several seeds side by side, or all as one."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsim.benchmark import tasks, turns
from asyncsim.clusters.cluster import Cluster
from asyncsim.methods import METHODS, Method
from asyncsim.problems import Problem, quadratic
from asyncsim.replays import tuning
from asyncsim.replays.ensemble import replay_ensemble
from asyncsim.replays.replay import Replay
from asyncsim.replays.ways import default_devices, pieces_at_once
from asyncsim.simulation.simulate import simulate
from asyncsim.study.executor import Failure, Local
from asyncsim.threads import one_core_each
from asyncsim.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

#: Runs of an ensemble.
_SEEDS = 32


class Replaying:
    """The replays of a case, all of one trace, made anew in every turn.

    The trace has the timing that the method needs: where a policy discards messages, only those that were taken up
    are replayed, and counted.

    A turn is a sample of a long run. What happens once a run, however long, is reported apart as its set-up: making
    the state, and the first commits of the workers, which draw their first epochs. The planning of the trace, which
    grows with its length, belongs to the turn.

    Attributes
    ----------
    method : Method
    commits : int
        Of the trace: one per worker before the turn, and the turn's.
    devices : int
        That the replay uses.
    at_once : int
        Pieces whose gradients it computes at a time.
    replays_at_once : int
        Such replays that a study of many computes at a time.
    trace_seconds, planning_seconds : float
        Of making the trace, and of its plan.
    """

    def __init__(self, workers: int, method: Method, problem: Problem, commits: int):
        self.method, self._problem = method, problem
        self._cluster = tasks.cluster_for(method, workers)
        self._first = workers
        self.commits = self._first + commits
        self.trace_seconds, self._trace = timed(lambda: simulate(self._cluster, self.commits))
        self.devices = len(default_devices(self._trace, method, problem))
        self.at_once = pieces_at_once(self._trace, method, problem)
        self.replays_at_once = tuning.replays_at_once(problem, workers)
        self.planning_seconds = self._planning_seconds()
        #: Of whole calls of `run`: the first one compiles.
        self.whole_seconds: list[float] = []

    def run(self, commits: int) -> Any:
        """Replay the trace, with the default diagnostics and without evaluations."""
        began = time.perf_counter()
        took = self._run(commits, 1)
        self.whole_seconds.append(time.perf_counter() - began)
        return took

    def run_concurrently(self, commits: int) -> Any:
        """Replay the trace with several seeds, as many at a time as a study would, each on one core.

        It took as long as all together.
        """
        with one_core_each():
            return self._run(commits, self.replays_at_once)

    def _run(self, commits: int, replays: int) -> Any:
        began = time.perf_counter()
        made = [self._replay(self._trace, commits, seed) for seed in range(replays)]
        setup = time.perf_counter() - began - replays * self.planning_seconds
        for replay in made:
            _advance(replay, self._first)
        started = time.perf_counter()
        ended = [done.value for done in Local(replays).map(_advance, [(replay, commits) for replay in made])]
        seconds = time.perf_counter() - started
        for value in ended:
            if isinstance(value, Failure):
                raise RuntimeError(value.traceback)
        # As if one were planned after the other: Python works for one thread at a time.
        planning = replays * (1 - self._first / commits) * self.planning_seconds
        return turns.Took(sum(ended) - replays * self._first, seconds + planning, max(0.0, setup))

    def run_with_simulation(self, commits: int) -> None:
        """Do all that a user waits for, from the cluster to the last commit."""
        trace = simulate(self._cluster, commits)
        replay = self._replay(trace, commits)
        replay.advance(self._first)
        _advance(replay, commits)

    def _replay(self, trace: Trace, commits: int, seed: int = 0) -> Replay:
        return Replay(trace, self.method, self._problem, seed, stops=np.array([self._first, commits]))

    def costs(self, case: Any, turns: "pd.DataFrame") -> "pd.DataFrame":
        """Return a row with the case, its devices, pieces and replays at once, and the seconds of what is paid once.

        That is compiling (less where JAX's cache has the program from an earlier start), set-up, trace and plan.
        """
        import pandas as pd

        first, *warm = self.whole_seconds
        row = {
            **case._asdict(),
            "commits": self.commits,
            "devices": self.devices,
            "at_once": self.at_once,
            "replays_at_once": self.replays_at_once,
            "compile_seconds": first - float(np.median(warm)),
            "setup_seconds": turns.loc[turns["contender"] == "replay", "setup_seconds"].median(),
            "trace_seconds": self.trace_seconds,
            "planning_seconds": self.planning_seconds,
        }
        return pd.DataFrame([row])

    def _planning_seconds(self) -> float:
        """Return how much longer a replay of one parameter takes to make than one of a short trace: its plan."""
        toy = quadratic([1.0])

        def least_seconds(trace: Trace) -> float:
            stops = np.array([len(trace.taken_up)])
            return min(timed(lambda: Replay(trace, self.method, toy, stops=stops))[0] for _ in range(3))

        short = simulate(self._cluster, self._first)
        return max(0.0, least_seconds(self._trace) - least_seconds(short))


class Ensemble:
    """Replays of many seeds at once.

    Every call of `asyncsim.replay_ensemble` may compile anew, and always makes its state; so a turn is a long call
    less one of an eighth of its commits.
    """

    def __init__(self, cluster: Cluster, method: Method, problem: Problem, commits: int):
        self._problem, self._factory = problem, METHODS[method.name]
        self._learning_rate = method.hyperparameters["learning_rate"]
        # So many at least that the short call is shorter.
        commits = max(8, commits)
        self._long, self._short = (simulate(cluster, commits // share) for share in (1, 8))
        self.seeds = _SEEDS
        #: Over all seeds.
        self.commits = self.seeds * (len(self._long) - len(self._short))

    def run(self, commits: int) -> Any:
        """Replay all, with an evaluation at both ends."""
        short, _ = timed(lambda: self._replay(self._short))
        long, _ = timed(lambda: self._replay(self._long))
        # Where compilation takes so long that nothing can be said of the rest, the rate is too low.
        seconds = long - short if long > short else long
        return turns.Took(commits, seconds, long - seconds)

    def _replay(self, trace: Trace) -> None:
        replay_ensemble(
            trace,
            self._factory,
            self._problem,
            seeds=range(self.seeds),
            evaluate_every=len(trace),
            progress=False,
            learning_rate=self._learning_rate,
        )


def _advance(replay: Replay, commits: int) -> int:
    """Replay up to so many commits and wait for them; return how many they are."""
    replay.advance(commits)
    replay.wait()
    return replay.position


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many seconds it took, and what it returned."""
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result
