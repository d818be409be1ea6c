"""Replay: the real gradients of a trace, in batches that give exactly what a loop over its events gives."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from asyncsim.base.console import on_a_terminal
from asyncsim.base.errors import InputError, require_choice, require_count, require_switch
from asyncsim.base.threads import has_one_core
from asyncsim.base.tracing import forget_other_precision, jax_settings, require_threads
from asyncsim.byzantine.attacks import Attack, parse_attack
from asyncsim.methods.check import check_method
from asyncsim.methods.method import Method
from asyncsim.methods.policy_gradient import PolicyGradient
from asyncsim.problems.policy import PolicyProblem
from asyncsim.problems.problem import Problem, count_examples
from asyncsim.replays.attacked import among_the_living, under_attack, warn_of_weakness
from asyncsim.replays.local import Constants
from asyncsim.replays.observing import columns, require_recorders
from asyncsim.replays.plan import Plan
from asyncsim.replays.post_training import replay_members, require_rollouts
from asyncsim.replays.programs import compiled
from asyncsim.replays.recorders import Recorder, show_diagnostics
from asyncsim.replays.recording import LOSSES, Recording
from asyncsim.replays.run import Run
from asyncsim.replays.running import Running, start, tensor_names
from asyncsim.replays.state import ReplayState
from asyncsim.replays.suitable import require_arrived, require_one_server, require_server, require_timing
from asyncsim.replays.tuning import Form, default_devices, form_of, require_devices
from asyncsim.traces.trace import Trace

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
    method: Method | PolicyGradient,
    problem: Problem | PolicyProblem,
    seed: int = 0,
    *,
    precision: str = "float32",
    evaluate_every: int | None = None,
    evaluate_replicas: bool = False,
    attack: Attack | str | None = None,
    record: Sequence[Recorder] = (),
    devices: Sequence[Any] | None = None,
    progress: bool | None = None,
) -> Run:
    """Replay a trace with real gradients.

    Parameters
    ----------
    trace : Trace
        Simulated, prescribed, or recorded from real processes. Only messages that the server took up are replayed: a
        run's commits are those of `Trace.accepted`.
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
    evaluate_replicas : bool
        Without a server: evaluate each worker's replica, too, on the test data if the problem has any. Of each loss and
        accuracy `Run.evaluations` has the best, the mean and the worst, ``test_accuracy_worst`` say.
    attack : Attack or str, optional
        What some of the workers send in the place of their messages: ``asyncsim.attacks.alie(workers=3)``.
    record : sequence of Recorder
        What is recorded besides each commit's loss and the length of its step, `asyncsim.recorders`:
        ``[recorders.energy(momentum=0.9), recorders.diagnostics(every=5)]`` say.
    devices : sequence of jax.Device, optional
        Different ones of one kind, among which workers and gradients are divided. By default all accelerators that JAX
        has, if there is enough to divide, and the CPU: see `asyncsim.replays.tuning`.
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
    repeat byte for byte, with the same recorders. Methods that amplify round-off (GEM) reproduce in law, not in value,
    on another machine.

    A trace with rollouts is replayed by `asyncsim.replays.post_training.replay_members`, which says what its runs have.
    """
    if has_samples(trace, method, problem):
        for name, value in (("attack", attack), ("devices", devices), ("evaluate_replicas", evaluate_replicas or None)):
            if value is not None:
                raise InputError(f"{name} = {value!r}: is not for a replay with rollouts; leave it out")
        stops = None if evaluate_every is None else evaluation_stops(trace.accepted, evaluate_every)
        return replay_members(trace, method, problem, [seed], None, precision, stops, record)[0]  # type: ignore[arg-type]
    require_kinds(trace, method, problem)
    assert isinstance(method, Method) and isinstance(problem, Problem)
    if progress is not None:
        require_switch("progress", progress)
    with jax.enable_x64(require_choice("precision", precision, PRECISIONS) == "float64"):
        stops = evaluation_stops(trace.accepted, evaluate_every)
        _warn_of_evaluations(trace, problem, len(stops) + 1)
        warn_of_weakness(parse_attack(attack), trace.workers)
        running = Replay(
            trace,
            method,
            problem,
            seed,
            precision=precision,
            stops=stops,
            attack=attack,
            record=record,
            devices=devices,
            evaluate_replicas=evaluate_replicas,
        )
        run_to_the_end(running.running, stops, method.name, progress)
        return running.result()


class Replay:
    """A replay that can be stopped at chosen commits, and whose state can be looked at there.

    Parameters are those of `replay`; ``stops`` are the numbers of commits at which `advance` may stop, ``form`` is
    another form of computing than that of `asyncsim.replays.tuning`. For float64, make and use it inside
    ``jax.enable_x64(True)``.

    Attributes
    ----------
    devices : tuple of jax.Device
        Those that it uses.
    running : Running
        The loop on the host.
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
        attack: Attack | str | None = None,
        record: Sequence[Recorder] = (),
        devices: Sequence[Any] | None = None,
        form: Form | None = None,
        evaluate_replicas: bool = False,
    ):
        forget_other_precision()
        recorders = check_replay(trace, method, problem, record)
        seed = require_count("seed", seed, minimum=0)
        require_switch("evaluate_replicas", evaluate_replicas)
        if evaluate_replicas and trace.protocol != "gossip":
            raise InputError(
                "evaluate_replicas = True: with a server workers have no replicas of their own; leave it out"
            )
        self.trace, self.method, self.problem = trace.accepted, method, problem
        trace = self.trace
        attack = parse_attack(attack)
        self._config = {"seed": seed, "precision": precision, "attack": attack and attack.text, **jax_settings()}
        if attack is not None:
            method, problem = under_attack(method, problem, attack, trace.workers)
            recorders = check_replay(trace, method, problem, record)
        method = among_the_living(method, trace, attack)
        dtype = jnp.dtype(precision)
        if devices is None:
            devices = default_devices(problem.parameter_count)[: 1 if method.meet else None]
        elif len(require_devices(devices)) > 1 and method.meet:
            raise InputError(
                f"devices: {method.name} has one commit at a time, which touches two workers; give one device"
            )
        devices = tuple(devices)
        stops = np.union1d([] if stops is None else stops, len(trace)).astype(int)
        form = form or form_of(problem, devices)
        plan = Plan(trace, problem, seed, stops, look_every(recorders), dtype, devices, form, method.needs_key)
        program, numbers = compiled(method, recorders, problem, plan.layout(method), dtype, devices)
        params, key = start(problem, seed, dtype)
        recording = Recording(trace, tensor_names(params), columns(recorders))
        self.devices = devices
        self.running = Running(
            problem, plan, program, params, Constants(key, numbers), dtype, [recording], evaluate_replicas
        )

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
        rows = self.running.evaluate()
        if not rows:
            raise InputError(f"replay: diverged at commit {self.diverged_at}, and is not evaluated any more")
        return rows[0]

    def result(self) -> Run:
        """Return what has been replayed so far as a Run."""
        (params,), (replicas,) = self.running.params(), self.running.replicas()
        return self.running.recordings[0].run(self.method, self.problem, params, self._config, replicas)


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


def check_replay(trace: Any, method: Any, problem: Any, record: Any) -> tuple[Recorder, ...]:
    """Return the recorders; raise InputError unless the method can be replayed on this trace and problem.

    Where a method shows nothing, to look at it is left out: it would begin a chunk, which costs as much as hundreds of
    a small problem's commits.
    """
    require_kinds(trace, method, problem)
    recorders = require_recorders(record)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    shown = check_method(method, params, trace.workers)
    require_one_server(trace.servers, problem.parameter_count)
    require_server(method, trace)
    require_timing(method, trace)
    require_arrived(method, trace, params)
    if method.rounds is not None:
        method.rounds.require(trace.workers, trace.policy)
    _check_outcomes(trace)
    return tuple(one for one in recorders if shown or one.look is not show_diagnostics)


def look_every(recorders: Sequence[Recorder]) -> list[int]:
    """Return the worker steps between two looks of each recorder that looks."""
    return [one.every for one in recorders if one.look is not None]


def require_kinds(trace: Any, method: Any, problem: Any) -> None:
    """Raise InputError unless each is what its name says, and JAX can compute in this process."""
    require_threads()
    if has_samples(trace, method, problem):
        require_rollouts(trace, method, problem, ())
        raise InputError("method = 'policy_gradient': cannot be stopped and looked at; use asyncsim.replay")
    for name, value, kind in (("trace", trace, Trace), ("method", method, Method), ("problem", problem, Problem)):
        if not isinstance(value, kind):
            made = {Trace: "simulate(...)", Method: "methods.gem()", Problem: "problems.digits()"}[kind]
            hint = "; call it to make one" if callable(value) else f", which {made} returns"
            raise InputError(f"{name}: is a {type(value).__name__}, must be a {kind.__name__}{hint}")


def has_samples(trace: Any, method: Any, problem: Any) -> bool:
    """Return whether any of the three is for rollouts, of which then all must be."""
    of_policies = isinstance(method, PolicyGradient) or isinstance(problem, PolicyProblem)
    return of_policies or (isinstance(trace, Trace) and trace.rollouts is not None)


def _check_outcomes(trace: Trace) -> None:
    if not len(trace.accepted):
        raise InputError("trace: the server took up none of its messages, so that there is nothing to replay")
    if not trace.frame["local_steps"].between(1, trace.window).all():
        raise InputError(f"trace: local_steps must be from 1 to its window, {trace.window}, in every row")
    if trace.windows_differ:
        _check_windows(trace)


def _check_windows(trace: Trace) -> None:
    """Raise InputError unless each worker's jobs are alike: by their local steps its minibatches are counted."""
    steps = trace.frame.groupby("worker")["local_steps"].agg(["min", "max"])
    differing = steps[steps["min"] < steps["max"]]
    if len(differing):
        worker, least, most = next(differing.itertuples())
        raise InputError(
            f"trace: worker {worker} has jobs of {least} to {most} local_steps, so that minibatches would be drawn "
            "twice or left out; give all jobs of a worker the same local_steps"
        )


def _warn_of_evaluations(trace: Trace, problem: Problem, evaluations: int) -> None:
    """Warn where evaluations take seconds, and longer than the gradients; not in studies, which say what they do."""
    data = [part for part in (problem.train, problem.test) if part is not None]
    if evaluations <= _LEAST_EVALUATIONS or not data or problem.batch_size is None or has_one_core():
        return
    evaluated = evaluations * sum(count_examples("data", part) for part in data)
    computed = int(trace.accepted.frame["local_steps"].sum()) * problem.batch_size
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
