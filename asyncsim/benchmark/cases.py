"""Who runs in turns in each case of the throughput study, and for how long."""

import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.benchmark import baselines, gradients, tasks, turns
from asyncsim.benchmark.replaying import Ensemble, Replaying, timed
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.simulation.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd


#: Commits by which the wave's mean length is found, per worker.
_WAVE_STEPS = 20
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
        seconds, trace = timed(lambda: simulate(self.cluster, _WAVE_STEPS * workers))
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
        replaying = Replaying(self.workers, method, self.problem, self.commits)
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
            ensemble = Ensemble(self.cluster, method, self.problem, self.commits)
            found.append(turns.Contender(f"ensemble of {ensemble.seeds}", ensemble.commits, ensemble.run))
        return replaying, found

    def _commits_alone(self, method: Method) -> Any:
        """Return the replay of gradients that cost nothing, of a trace that takes about a turn."""

        def replaying(commits: int) -> Replaying:
            return Replaying(self.workers, method, self._without_gradients, commits)

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
