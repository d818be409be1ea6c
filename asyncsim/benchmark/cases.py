"""Who runs in turns in each case of the throughput study, and for how long."""

import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsim.benchmark import baselines, gradients, tasks, turns
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


#: Commits by which the wave's mean length is found, per worker.
_WAVE_STEPS = 20
#: Runs of an ensemble.
SEEDS = 32
#: Clusters of the task `growth`.
_GROWTH = (100, 1_000, 10_000, 100_000)


class Scale(NamedTuple):
    """How long everything takes.

    Attributes
    ----------
    turn, sweep : float
        Seconds of a contender's turn, and of each batching of the sweep.
    visits : int
        Of a trace of the task `trace`.
    quick : bool
    """

    turn: float
    sweep: float
    visits: int
    quick: bool


FULL, QUICK = Scale(1.0, 0.3, 100_000, False), Scale(0.1, 0.05, 20_000, True)


class Bench:
    """A task on a cluster of so many workers: the problem, the swept gradients, and the loops to compare with."""

    def __init__(self, task: str, problem: Problem, workers: int, scale: Scale):
        self.task, self.problem, self.workers, self.scale = task, problem, workers, scale
        self.cluster = tasks.cluster(workers, service=0.0)
        seconds, trace = _timed(lambda: simulate(self.cluster, _WAVE_STEPS * workers))
        self._simulated_per_second = len(trace) / seconds
        self.mean_wave = gradients.mean_wave(trace.frame["worker"].to_numpy())
        self.gradients = gradients.GradientsAlone(problem, workers)
        self._without_gradients = baselines.without_gradients(problem)
        self._torch: Any = importlib.import_module("asyncsim.benchmark.pytorch") if has_torch() else None
        self._torch_gradients: Any = self._torch.TorchGradients(problem, workers) if self._torch else None

    def sweep(self) -> "pd.DataFrame":
        """Time the gradients alone in pieces of several sizes; the best is the limit from then on.

        PyTorch's too, with one thread and with all, as more may be slower: of these it uses the better from then on.

        Returns
        -------
        pandas.DataFrame
            ``task``, ``workers``, ``piece_size``, ``way``, ``per_second`` and ``best`` (of ours, and of PyTorch's).
        """
        import pandas as pd

        swept = self.gradients.sweep(self.mean_wave, self.scale.sweep, self.scale.quick)
        rows = [(*batching, rate) for batching, rate in swept]
        table = pd.DataFrame(rows, columns=["piece_size", "way", "per_second"])
        self.limit = float(table["per_second"].max())
        table["best"] = table["per_second"] == self.limit
        if self._torch:
            table = pd.concat([table, self._sweep_threads()], ignore_index=True)
        return table.assign(task=self.task, workers=self.workers)[["task", "workers", *table.columns]]

    def _sweep_threads(self) -> "pd.DataFrame":
        """Return the rates of PyTorch's gradients by its number of threads, and let it use the better one."""
        import pandas as pd

        rates = {}
        for count in self._torch.thread_counts():
            self._torch.use_threads(count)
            rates[count] = turns.calibrate(self._torch_gradients.run, self.scale.sweep) / self.scale.sweep
        best = max(rates, key=rates.__getitem__)
        self._torch.use_threads(best)
        rows = [(1, f"PyTorch, threads: {count}", rate, count == best) for count, rate in rates.items()]
        return pd.DataFrame(rows, columns=["piece_size", "way", "per_second", "best"])

    @property
    def commits(self) -> int:
        """Commits of a replay that takes no longer than a turn, with simulation, if it is as fast as it can be."""
        seconds_each = 1 / self.limit + 1 / self._simulated_per_second
        return max(1, round(self.scale.turn / seconds_each))

    def contenders(self, method: Method, usual: bool = True) -> tuple["Replaying", list[Any]]:
        """Return who runs in turns for a method, and the first of them, the replay.

        Without the ``usual`` loops these are the replay, with and without simulation, and its limit.
        """
        replaying = Replaying(self, method, self.problem, self.commits)
        found = [
            turns.Contender("replay", replaying.commits, replaying.run),
            turns.Contender("replay and simulation", replaying.commits, replaying.run_with_simulation),
        ]
        if usual:
            if replaying.replays_at_once > 1:
                found.append(turns.Contender("concurrent replays", replaying.commits, replaying.run_concurrently))
            found.append(self._commits_alone(method))
            found.append(self._usual_loop("usual loop", baselines.UsualLoop(method, self.problem)))
            recording = baselines.UsualLoop(method, self.problem, records=True)
            found.append(self._usual_loop("usual loop, same records", recording))
            if self.task == "cnn":
                # The loops before have this package's layers, which are quicker than those that one would write.
                with_xla = baselines.UsualLoop(method, baselines.with_usual_convolutions(self.problem))
                found.append(self._usual_loop("usual loop, XLA's convolutions", with_xla))
        found += self._limits(replaying.at_once, replaying.replays_at_once if usual else 1)
        if usual and self._torch:
            found.append(self._torch_loop(self._torch.TorchLoop(method, self.problem)))
            found.append(self._calibrated("gradients alone, PyTorch", self._torch_gradients.run))
        if usual and self.task == "quadratic" and not self.scale.quick:
            ensemble = Ensemble(self, method)
            found.append(turns.Contender(f"ensemble of {SEEDS}", ensemble.commits, ensemble.run))
        return replaying, found

    def _commits_alone(self, method: Method) -> Any:
        """Return the replay of gradients that cost nothing, of a trace that takes about a turn."""

        def replaying(commits: int) -> Replaying:
            return Replaying(self, method, self._without_gradients, commits)

        def run(commits: int) -> Any:
            one = replaying(commits)
            return one.run(one.commits)

        alone = replaying(turns.calibrate(run, self.scale.turn, self.commits))
        return turns.Contender("commits alone", alone.commits, alone.run)

    def _limits(self, used: int, replays: int) -> list[Any]:
        """Return the gradients alone, as many pieces at a time as the replay has: its limit.

        And, where these are other numbers, one piece at a time, as many as there are devices, and as many as there are
        concurrent ``replays``.
        """
        found = []
        numbers = {used, 1, len(self.gradients.devices), replays}
        for at_once in sorted(numbers, key=lambda at_once: (at_once != used, at_once)):
            amount = self.gradients.amount(round(self.limit * self.scale.turn), at_once=at_once)
            name = "gradients alone" if at_once == used else f"gradients alone, {at_once} at a time"

            def run(count: int, at_once: int = at_once) -> float:
                return self.gradients.run(count, at_once=at_once)

            found.append(turns.Contender(name, amount, run))
        return found

    def _usual_loop(self, name: str, loop: Any) -> Any:
        return self._calibrated(name, lambda commits: loop.run(self.cluster, commits))

    def _torch_loop(self, loop: Any) -> Any:
        def run(commits: int) -> Any:
            started = time.perf_counter()
            loop.run(self.cluster, commits)
            seconds = time.perf_counter() - started
            return turns.Took(commits, seconds - loop.setup_seconds, loop.setup_seconds)

        return self._calibrated("usual loop, PyTorch", run)

    def _calibrated(self, name: str, run: Callable[[int], Any]) -> Any:
        return turns.Contender(name, turns.calibrate(run, self.scale.turn), run)


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

    def __init__(self, bench: Bench, method: Method, problem: Problem, commits: int):
        self.method, self._problem = method, problem
        self._cluster = tasks.cluster_for(method, bench.workers)
        self._first = bench.workers
        self.commits = self._first + commits
        self.trace_seconds, self._trace = _timed(lambda: simulate(self._cluster, self.commits))
        self.devices = len(default_devices(self._trace, method, problem))
        self.at_once = pieces_at_once(self._trace, method, problem)
        self.replays_at_once = tuning.replays_at_once(problem, bench.workers)
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
            return min(_timed(lambda: Replay(trace, self.method, toy, stops=stops))[0] for _ in range(3))

        short = simulate(self._cluster, self._first)
        return max(0.0, least_seconds(self._trace) - least_seconds(short))


class Ensemble:
    """Replays of many seeds at once.

    Every call of `asyncsim.replay_ensemble` may compile anew, and always makes its state; so a turn is a long call
    less one of an eighth of its commits.
    """

    def __init__(self, bench: Bench, method: Method):
        self._problem, self._factory = bench.problem, METHODS[method.name]
        self._learning_rate = method.hyperparameters["learning_rate"]
        # So many at least that the short call is shorter.
        commits = max(8, bench.commits)
        self._long, self._short = (simulate(bench.cluster, commits // share) for share in (1, 8))
        #: Over all seeds.
        self.commits = SEEDS * (len(self._long) - len(self._short))

    def run(self, commits: int) -> Any:
        """Replay all, with an evaluation at both ends."""
        short, _ = _timed(lambda: self._replay(self._short))
        long, _ = _timed(lambda: self._replay(self._long))
        # Where compilation takes so long that nothing can be said of the rest, the rate is too low.
        seconds = long - short if long > short else long
        return turns.Took(commits, seconds, long - seconds)

    def _replay(self, trace: Trace) -> None:
        replay_ensemble(
            trace,
            self._factory,
            self._problem,
            seeds=range(SEEDS),
            evaluate_every=len(trace),
            progress=False,
            learning_rate=self._learning_rate,
        )


def trace_contenders(workers: int, scale: Scale) -> list[Any]:
    """Return `simulate` and the usual SimPy model, the drawing of the times included."""
    model = tasks.cluster(workers, service=0.5 / workers)
    return [
        turns.Contender("simulate", scale.visits, lambda visits: simulate(model, visits)),
        turns.Contender("usual SimPy model", scale.visits, lambda visits: baselines.usual_model(model, visits)),
    ]


def growth_contenders(scale: Scale) -> list[Any]:
    """Return `simulate` on clusters that grow, named by their workers, ten visits a worker on the largest."""
    sizes = _GROWTH[:-1] if scale.quick else _GROWTH

    def contender(workers: int) -> Any:
        model = tasks.cluster(workers, service=0.5 / workers)
        return turns.Contender(str(workers), 10 * sizes[-1], lambda visits: simulate(model, visits))

    return [contender(workers) for workers in sizes]


def has_torch() -> bool:
    """Return whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def _advance(replay: Replay, commits: int) -> int:
    """Replay up to so many commits and wait for them; return how many they are."""
    replay.advance(commits)
    replay.wait()
    return replay.position


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result
