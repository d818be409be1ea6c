"""Replay: the real gradients of a trace, in batches that give exactly what a loop over its events gives."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from asyncsim.diagnosis import diagnostic_rows, diagnostics_table
from asyncsim.errors import InputError, require_choice, require_count, require_fraction
from asyncsim.methods.method import Method
from asyncsim.plan import Plan
from asyncsim.problems.problem import Problem
from asyncsim.programs import cast, compiled, on_devices
from asyncsim.replay_state import Records, ReplayState
from asyncsim.run import Run
from asyncsim.streams import stream_key
from asyncsim.trace import Trace
from asyncsim.tuning import current_devices

if TYPE_CHECKING:
    import pandas as pd

PRECISIONS = ("float32", "float64")
_EVALUATIONS = 20


def replay(
    trace: Trace,
    method: Method,
    problem: Problem,
    seed: int = 0,
    *,
    precision: str = "float32",
    evaluate_every: int | None = None,
    diagnose_every: int = 5,
    proxy_momentum: float = 0.9,
    devices: Sequence[Any] | None = None,
    progress: bool | None = None,
) -> Run:
    """Replay a trace with real gradients.

    Parameters
    ----------
    trace : Trace
        Simulated, prescribed, or recorded from real processes.
    method : Method
    problem : Problem
    seed : int
        Of the initial parameters, the minibatches and the problem's own randomness: named streams, so that two
        methods see the same ones.
    precision : {"float32", "float64"}
    evaluate_every : int, optional
        Worker steps (commits divided by workers) between evaluations on the whole data; else 20 evaluations. There
        is always one at the start and one at the end.
    diagnose_every : int
        Worker steps between two recordings of the method's costly diagnostics; 0 for none.
    proxy_momentum : float
        Momentum of the proxy whose energy is recorded beside methods that keep none themselves.
    devices : sequence of jax.Device, optional
        Among which the work is divided; by default all that JAX has of its kind, if there is enough to divide.
    progress : bool, optional
        Show a progress bar on standard error; by default if that is a terminal.

    Returns
    -------
    Run
        If a value stops being finite, the run ends there and says so in ``diverged_at``.

    Raises
    ------
    InputError
        For arguments outside their range, or a method that needs another timing than the trace has.

    Notes
    -----
    What a commit depends on decides which commits are computed together (see `asyncsim.waves`); the numbers are those
    of a loop over the events, up to the order of floating-point sums. On one machine and one configuration they repeat
    byte for byte. Methods that amplify round-off (GEM) reproduce in law, not in value, on another machine.
    """
    with jax.enable_x64(require_choice("precision", precision, PRECISIONS) == "float64"):
        stops = _evaluation_stops(trace, evaluate_every)
        running = Replay(
            trace,
            method,
            problem,
            seed,
            precision=precision,
            stops=stops,
            diagnose_every=diagnose_every,
            proxy_momentum=proxy_momentum,
            devices=devices,
        )
        show = sys.stderr.isatty() if progress is None else progress
        with tqdm(total=len(trace), desc=method.name, unit="commit", disable=not show, leave=False) as bar:
            evaluations = [running.evaluate()]
            for stop in stops:
                running.advance(stop)
                bar.update(running.position - bar.n)
                if running.diverged_at is not None:
                    break
                evaluations.append(running.evaluate())
                if running.diverged_at is not None:
                    break
        return running.result(evaluations)


class Replay:
    """A replay that can be stopped at chosen commits, and whose state can be looked at there.

    Parameters are those of `replay`; ``stops`` are the numbers of commits at which `advance` may stop.
    For float64, make and use it inside ``jax.enable_x64(True)``.

    Attributes
    ----------
    state : ReplayState
        After ``position`` commits. The next `advance` reuses its memory: copy what is to be kept.
    position : int
    diverged_at : int or None
    """

    def __init__(
        self,
        trace: Trace,
        method: Method,
        problem: Problem,
        seed: int = 0,
        *,
        precision: str = "float32",
        stops: np.ndarray | None = None,
        diagnose_every: int = 5,
        proxy_momentum: float = 0.9,
        devices: Sequence[Any] | None = None,
    ):
        for name, value, kind in (("trace", trace, Trace), ("method", method, Method), ("problem", problem, Problem)):
            if not isinstance(value, kind):
                hint = "; call it to make one" if callable(value) else ""
                raise InputError(f"{name} = {value!r}: must be a {kind.__name__}{hint}")
        require_count("seed", seed, minimum=0)
        require_count("diagnose_every", diagnose_every, minimum=0)
        require_fraction("proxy_momentum", proxy_momentum)
        _check_timing(method, trace)
        _check_outcomes(trace)
        self.trace, self.method, self.problem = trace, method, problem
        self.position = 0
        self.diverged_at: int | None = None
        self._config = {"seed": seed, "precision": precision, "proxy_momentum": proxy_momentum}

        dtype = jnp.dtype(precision)
        key = jax.random.wrap_key_data(jnp.asarray(stream_key(seed, "problem").view(np.uint32)[:2]))
        init_key, self._key = jax.random.split(key)
        params = cast(problem.init(init_key), dtype)
        self._names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
        self._stops = np.unique(np.r_[len(trace) if stops is None else stops])
        self._devices = tuple(devices or current_devices(problem.parameter_count))
        self._plan = Plan(trace, problem, seed, self._stops, diagnose_every, dtype, len(self._devices))
        layout = self._plan.layout(method, problem, float(proxy_momentum))
        self._program = compiled(method, problem, layout, dtype, self._devices)
        self._train, self._test = on_devices(problem, dtype, self._devices)
        problem_state = cast(problem.init_state(), dtype) if problem.init_state else ()
        waves = self._plan.waves
        self.state: ReplayState = self._program.initial_state(
            params, problem_state, waves.slots, waves.form_slots, trace.workers
        )
        self._recorded: list[dict[str, np.ndarray]] = []
        self._diagnosed: list[tuple[int, str, str, float, float]] = []

    def advance(self, stop: int) -> None:
        """Replay up to ``stop`` commits, or to the first commit of which a value is not finite."""
        if stop not in self._stops:
            raise InputError(f"stop = {stop}: not one of the stops that this replay was made with")
        pending: tuple[np.ndarray, Records, dict[str, Any]] | None = None
        for starts, pieces in self._plan.chunks(self.position, stop):
            # While the device works on a chunk, the host plans the next and looks at the one before.
            formed = self._program.before(self.state, pieces) if self._plan.diagnosed[starts[0]] else None
            self.state, records, first = self._program.advance(
                self.state, self._train, self._key, pieces, np.int32(len(starts) - 1)
            )
            diagnostics = {} if formed is None else self._program.diagnose(formed, first, pieces)
            if pending is not None:
                self._take(*pending)
            pending = (starts, records, diagnostics)
            if self.diverged_at is not None:
                return
        if pending is not None:
            self._take(*pending)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the central variable on the training and the test data: one row of `Run.evaluations`.

        A value that is not finite means that the run has diverged by the last commit.
        """
        frame, done = self.trace.frame, self.position
        row = {
            "commit": done,
            "commit_time": float(frame["commit_time"].iloc[done - 1]) if done else 0.0,
            "worker_step": done / self.trace.workers,
            "gradients": int(frame["local_steps"].iloc[:done].sum()),
        }
        # On one device: the same program there for any number of them.
        central, state, train, test = jax.device_put(
            (self.state.central, self._problem_state(), self._train, self._test), self._devices[0]
        )
        for part, data in (("train", train), ("test", test)):
            if part == "train" or data is not None:
                values = self._program.evaluate(central, state, data)
                row |= {f"{part}_{name}": float(value) for name, value in values.items()}
        if done and not np.isfinite(list(row.values())).all():
            self.diverged_at = done - 1
        return row

    def result(self, evaluations: list[dict[str, float]]) -> Run:
        """Return what has been replayed so far as a Run."""
        import pandas as pd

        central = jax.device_put(self.state.central, self._devices[0])
        params = jax.tree.map(np.asarray, self._program.flat.unravel(central))
        config = {
            "method": self.method.name,
            "hyperparameters": {k: _plain(v) for k, v in self.method.hyperparameters.items()},
            "problem": self.problem.name,
            "problem_config": self.problem.config,
            **self._config,
            "workers": self.trace.workers,
            "commits": len(self.trace),
            "trace_seed": self.trace.seed,
            "versions": {**self.trace.versions, "jax": jax.__version__},
        }
        return Run(
            commits=self._commits(),
            evaluations=pd.DataFrame(evaluations),
            diagnostics=diagnostics_table(self._diagnosed, self.trace.frame),
            params=params,
            diverged_at=self.diverged_at,
            config=config,
        )

    def _take(self, starts: np.ndarray, records: Records, diagnostics: dict[str, Any]) -> None:
        """Keep a chunk's records, up to the first commit that is not finite."""
        self._diagnosed += diagnostic_rows(int(starts[0]), diagnostics, self._names)
        sizes = np.diff(starts)
        valid = np.arange(records.loss.shape[1]) < sizes[:, None]
        columns = {name: np.asarray(getattr(records, name))[: len(sizes)][valid] for name in Records._fields}
        finite = np.logical_and.reduce([np.isfinite(column) for column in columns.values()])
        kept = len(finite)
        if not finite.all():
            first = int(np.argmin(finite))
            self.diverged_at, kept = int(starts[0]) + first, first + 1
        self._recorded.append({name: column[:kept] for name, column in columns.items()})
        self.position = int(starts[0]) + kept

    def _problem_state(self) -> Any:
        """Return the mean over the workers of the problem's non-trained state (None without one)."""
        if self.problem.init_state is None:
            return None
        return jax.tree.map(
            lambda leaf: jnp.mean(leaf, 0) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0],
            self.state.workers.learner.problem,
        )

    def _commits(self) -> "pd.DataFrame":
        frame = self.trace.frame.iloc[: self.position]
        columns = ["commit", "commit_time", "worker", "job", "staleness"]
        table = frame[columns].rename(columns={"job": "worker_step"}).reset_index(drop=True)
        for name in Records._fields:
            parts = [recorded[name] for recorded in self._recorded]
            table[name] = np.concatenate(parts) if parts else np.empty(0)
        return table


def _check_timing(method: Method, trace: Trace) -> None:
    has = {"workers": trace.workers, "protocol": trace.protocol, "window": trace.window}
    for name, needed in method.timing._asdict().items():
        if needed is not None and has[name] != needed:
            raise InputError(
                f"method = {method.name!r}: needs a trace with {name} = {needed!r}, this one has {has[name]!r}; "
                f"simulate one with Cluster({name}={needed!r})"
            )


def _check_outcomes(trace: Trace) -> None:
    if not (trace.frame["outcome"] == "applied").all():
        raise InputError("trace: has messages that were not applied, and a replay so far applies every one")
    if not (trace.frame["local_steps"] == trace.window).all():
        raise InputError(f"trace: local_steps must be its window, {trace.window}, in every row")


def _evaluation_stops(trace: Trace, evaluate_every: int | None) -> np.ndarray:
    commits = len(trace)
    if evaluate_every is None:
        return np.unique(np.linspace(0, commits, _EVALUATIONS + 1).round().astype(int)[1:])
    step = require_count("evaluate_every", evaluate_every) * trace.workers
    return np.unique(np.r_[np.arange(step, commits, step), commits])


def _plain(value: Any) -> Any:
    if callable(value):
        return "schedule"  # a function's text is not the same in every run
    return value if isinstance(value, int | float | str | bool | None) else repr(value)
