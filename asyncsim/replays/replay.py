"""Replay: the real gradients of a trace, in batches that give exactly what a loop over its events gives."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from asyncsim.errors import InputError, require_choice, require_count, require_switch
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem, count_examples
from asyncsim.replays.plan import Plan
from asyncsim.replays.programs import compiled
from asyncsim.replays.recording import LOSSES, Recording
from asyncsim.replays.replay_check import check_replay, require_kinds
from asyncsim.replays.replay_state import PROXY_MOMENTUM, ReplayState
from asyncsim.replays.run import Run
from asyncsim.replays.running import Running, start, tensor_names
from asyncsim.replays.ways import default_devices, way_of
from asyncsim.threads import has_one_core
from asyncsim.traces.trace import Trace
from asyncsim.tracing import forget_other_precision
from asyncsim.wording import on_a_terminal

PRECISIONS = ("float32", "float64")
_EVALUATIONS = 20
#: Evaluations to which there is no option: at the start and at the end.
_LEAST_EVALUATIONS = 2
#: Examples that are evaluated with the operations of the gradient of one, which goes forward and twice backward.
_EXAMPLES_A_GRADIENT = 3
#: Examples times parameters whose evaluation is worth a word: 9 s of MNIST's network on two cores, less of the thesis'
#: perceptron (1.5 s), as a convolution uses its weights many times.
_WORTH_A_WORD = 1e11


def replay(
    trace: Trace,
    method: Method,
    problem: Problem,
    seed: int = 0,
    *,
    precision: str = "float32",
    evaluate_every: int | None = None,
    diagnose_every: int = 5,
    diagnose_energy: bool = False,
    proxy_momentum: float = PROXY_MOMENTUM,
    devices: Sequence[Any] | None = None,
    progress: bool | None = None,
) -> Run:
    """Replay a trace with real gradients.

    Parameters
    ----------
    trace : Trace
        Simulated, prescribed, or recorded from real processes. Only messages that the server took up are replayed: a
        run's commits are those of `Trace.taken_up`.
    method : Method
    problem : Problem
    seed : int
        Of the initial parameters, the minibatches, the problem's own randomness and what methods draw: named streams,
        so that two methods see the same ones.
    precision : {"float32", "float64"}
        Of products of matrices, too, on any device; unless ``jax_default_matmul_precision`` says otherwise.
    evaluate_every : int, optional
        Worker steps (commits divided by workers) between evaluations on the whole data; else 20 evaluations. There
        is always one at the start and one at the end. To evaluate three examples takes about as long as the gradient of
        one: of a short run on much data a warning says that evaluations take longer than all else.
    diagnose_every : int
        Worker steps between two recordings of the method's costly diagnostics, and one commit more if there are several
        workers; 0 for none.
    diagnose_energy : bool
        Whether the energies of each tensor and the distribution of their ratio over the weights are among the
        diagnostics, for any method.
    proxy_momentum : float
        Momentum of the proxy whose energy is recorded beside methods that keep none themselves.
    devices : sequence of jax.Device, optional
        Different ones of one kind, among which the work is divided. By default all accelerators that JAX has, if there
        is enough to divide, and one CPU device, whose cores share the work in the way that was measured to be the
        quickest: see `asyncsim.replays.ways`. (Several CPU devices, if JAX was given them, for problems of 2,000 to a
        million parameters that say ``map_on_cpu``, where gradients cannot be computed side by side.)
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
    A computation whose message was discarded, or that was cancelled, leaves nothing behind: its worker goes on with the
    local optimizer's state, the replica and the method's own state that it had when it began, and draws other examples.

    What a commit depends on decides which commits are computed together (see `asyncsim.replays.waves`); the numbers are
    those of a loop over the events, up to the order of floating-point sums. On one machine and one configuration they
    repeat byte for byte; with one core, as in a study, and with several they may differ by round-off. Methods that
    amplify round-off (GEM) reproduce in law, not in value, on another machine.
    """
    require_kinds(trace, method, problem)
    if progress is not None:
        require_switch("progress", progress)
    with jax.enable_x64(require_choice("precision", precision, PRECISIONS) == "float64"):
        stops = evaluation_stops(trace.taken_up, evaluate_every)
        _warn_of_evaluations(trace, problem, len(stops) + 1)
        running = Replay(
            trace,
            method,
            problem,
            seed,
            precision=precision,
            stops=stops,
            diagnose_every=diagnose_every,
            diagnose_energy=diagnose_energy,
            proxy_momentum=proxy_momentum,
            devices=devices,
        )
        run_to_the_end(running.running, stops, method.name, progress)
        return running.result()


class Replay:
    """A replay that can be stopped at chosen commits, and whose state can be looked at there.

    Parameters are those of `replay`; ``stops`` are the numbers of commits at which `advance` may stop.
    For float64, make and use it inside ``jax.enable_x64(True)``.

    Attributes
    ----------
    devices : tuple of jax.Device
        Those that it uses.
    running : Running
        The loop on the host.
    state : ReplayState
        After ``position`` commits. The next `advance` may reuse its memory: copy what is to be kept. Where commits are
        dispatched a few at a time, or threads have halves of it, it is made anew each time it is asked for.
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
        diagnose_energy: bool = False,
        proxy_momentum: float = PROXY_MOMENTUM,
        devices: Sequence[Any] | None = None,
    ):
        forget_other_precision()
        diagnostics = check_replay(trace, method, problem, diagnose_every, proxy_momentum)
        require_switch("diagnose_energy", diagnose_energy)
        # A diagnosed commit begins a chunk, which costs as much as hundreds of a small problem's commits.
        diagnose_every = diagnose_every if diagnostics or diagnose_energy else 0
        seed = require_count("seed", seed, minimum=0)
        self.trace, self.method, self.problem = trace.taken_up, method, problem
        trace = self.trace
        self._config = {"seed": seed, "precision": precision, "proxy_momentum": proxy_momentum}
        dtype = jnp.dtype(precision)
        devices = default_devices(trace, method, problem) if devices is None else _require_devices(devices)
        stops = np.union1d([] if stops is None else stops, len(trace)).astype(int)
        way = way_of(trace, method, problem, devices)
        plan = Plan(trace, problem, seed, stops, diagnose_every, dtype, len(devices), way, method.draws)
        layout = plan.layout(method, problem, float(proxy_momentum), diagnose_energy)
        program = compiled(method, problem, layout, dtype, devices)
        params, key = start(problem, seed, dtype)
        self.devices = devices
        self.running = Running(problem, plan, program, params, key, dtype, [Recording(trace, tensor_names(params))])

    @property
    def state(self) -> ReplayState:
        """The replay between two pieces."""
        return self.running.state

    @property
    def position(self) -> int:
        """Commits made so far."""
        return self.running.position

    @property
    def diverged_at(self) -> int | None:
        """The first commit of which a value is not finite."""
        return self.running.recordings[0].diverged_at

    def advance(self, stop: int) -> None:
        """Replay up to ``stop`` commits, or to the first commit of which a value is not finite."""
        self.running.advance(stop)

    def wait(self) -> None:
        """Wait until the devices have made all commits so far."""
        self.running.wait()

    def go_on_from(self, state: ReplayState) -> None:
        """Go on from another state, as if the commits so far had led there: one that real processes were in, say.

        Raises
        ------
        InputError
            The replay is divided among several devices.
        """
        self.running.go_on_from(state)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the central variable on the training and the test data: the next row of `Run.evaluations`.

        A loss that is not finite means that the run has diverged by the last commit.
        """
        return self.running.evaluate()[0]

    def result(self) -> Run:
        """Return what has been replayed so far as a Run."""
        (params,) = self.running.params()
        return self.running.recordings[0].run(self.method, self.problem, params, self._config)


def run_to_the_end(running: Running, stops: np.ndarray, description: str, progress: bool | None) -> None:
    """Advance from stop to stop, evaluate at each, and go on to the last commit; show how far it is."""
    commits = len(running.trace)
    show = on_a_terminal() if progress is None else progress
    with tqdm(total=commits, desc=description, unit="commit", disable=not show, leave=False) as bar:

        def evaluate() -> list[dict[str, float]]:
            bar.set_postfix_str("evaluating")
            rows = running.evaluate()
            bar.set_postfix_str("")
            return rows

        for row in evaluate():
            _require_finite(row)
        for stop in np.union1d(stops, commits):
            try:
                running.advance(stop)
            except jax.errors.UnexpectedTracerError as error:  # says nothing of where
                raise InputError(
                    f"{description}: a function of the method or the problem keeps a value from one call to the next, "
                    "in a list or a global say; return it as its state instead"
                ) from error
            bar.update(running.position - bar.n)
            if stop in stops and not running.over:
                evaluate()
            if running.over:
                break


def _require_finite(row: Mapping[str, float]) -> None:
    """Raise InputError unless the losses of the evaluation at the start are finite: no commit is to blame for them."""
    for name in LOSSES:
        if not math.isfinite(row.get(name, 0.0)):
            raise InputError(
                f"problem: its {name.replace('_', ' ')} is {row[name]} at the initial parameters, before any commit; "
                "look at init, loss, evaluate and the data"
            )


def _require_devices(devices: Sequence[Any]) -> tuple[Any, ...]:
    found = tuple(devices) if isinstance(devices, Sequence) else ()
    kinds = {device.platform for device in found if isinstance(device, jax.Device)}
    if len(kinds) != 1 or len(set(found)) < len(found) or not all(isinstance(one, jax.Device) for one in found):
        raise InputError(
            f"devices = {devices!r}: must be one or more different devices of one kind, as in jax.devices()"
        )
    return found


def _warn_of_evaluations(trace: Trace, problem: Problem, evaluations: int) -> None:
    """Warn where evaluations take seconds, and longer than the gradients; not in studies, which say what they do."""
    data = [part for part in (problem.train, problem.test) if part is not None]
    if evaluations <= _LEAST_EVALUATIONS or not data or problem.batch_size is None or has_one_core():
        return
    evaluated = evaluations * sum(count_examples("data", part) for part in data)
    computed = int(trace.taken_up.frame["local_steps"].sum()) * problem.batch_size
    if evaluated > _EXAMPLES_A_GRADIENT * computed and evaluated * problem.parameter_count > _WORTH_A_WORD:
        warnings.warn(
            f"{evaluations} evaluations of {evaluated // evaluations:,} examples take longer than the gradients of "
            f"{computed:,}; a larger evaluate_every (worker steps between two) makes them fewer",
            stacklevel=3,
        )


def evaluation_stops(trace: Trace, evaluate_every: int | None) -> np.ndarray:
    """Return the numbers of commits after which a run is evaluated, of a trace of what was taken up.

    After each a version is complete: in between a server that waits for several messages may have moved the central
    variable, which nobody reads before the version is there.
    """
    commits = len(trace)
    if evaluate_every is None:
        wanted = np.linspace(0, commits, _EVALUATIONS + 1).round().astype(int)
    else:
        step = require_count("evaluate_every", evaluate_every) * trace.workers
        wanted = np.r_[np.arange(step, commits, step), commits]
    complete = 1 + np.flatnonzero(trace.frame["outcome"] == "applied")
    before = np.searchsorted(complete, wanted, side="right")
    # The start is evaluated in any case.
    return np.unique(complete[before[before > 0] - 1])
