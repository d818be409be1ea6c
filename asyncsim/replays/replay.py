"""Replay: the real gradients of a trace, in batches, with the results of an event loop."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.console import Progress
from asyncsim.base.errors import InputError, require_choice, require_count, require_switch
from asyncsim.base.tracing import forget_other_precision, jax_settings
from asyncsim.byzantine.attacks import Attack, parse_attack
from asyncsim.methods.method import Method
from asyncsim.methods.policy_gradient import PolicyGradient
from asyncsim.problems.policy import PolicyProblem
from asyncsim.problems.problem import Problem
from asyncsim.replays.attacked import among_the_living, under_attack, warn_of_weakness
from asyncsim.replays.check import check_method
from asyncsim.replays.observing import require_additive, require_recorders
from asyncsim.replays.plan import runs_of
from asyncsim.replays.post_training import replay_members, require_rollouts
from asyncsim.replays.programs import on_vectors
from asyncsim.replays.recorders import Recorder, show_diagnostics
from asyncsim.replays.recording import LOSSES
from asyncsim.replays.run import Run
from asyncsim.replays.running import Running
from asyncsim.replays.suitable import (
    require_arrived,
    require_server,
    require_shards,
    require_timing,
)
from asyncsim.replays.tuning import Form, default_device, form_of
from asyncsim.traces.trace import Trace

PRECISIONS = ("float32", "float64")
_EVALUATIONS = 20
#: Of the commits so far, the distance to the next early evaluation.
_GROWTH = 0.1


def replay(
    trace: Trace,
    method: Method | PolicyGradient,
    problem: Problem | PolicyProblem,
    seed: int = 0,
    *,
    precision: str = "float32",
    evaluate_every: int | None = None,
    evaluate_until: Callable[[Mapping[str, float]], bool] | None = None,
    attack: Attack | str | None = None,
    record: Sequence[Recorder] = (),
    progress: bool | None = None,
) -> Run:
    """Replay a trace with real gradients.

    Parameters
    ----------
    trace : Trace
        Simulated, prescribed, or recorded from real processes. Only messages that the server took
        up are replayed: a run's commits are the rows of `Trace.accepted`.
    method : Method
    problem : Problem
    seed : int
        Of the initial parameters, the minibatches, the problem's randomness and the methods' draws:
        named streams, so that two methods see the same ones.
    precision : {"float32", "float64"}
        Of products of matrices, too, on any device, unless ``jax_default_matmul_precision`` is set.
    evaluate_every : int, optional
        Worker steps (commits divided by workers) between evaluations on the whole data; else 20
        evaluations. The start and the end are always evaluated. The evaluation of three examples
        takes about as long as the gradient of one.
    evaluate_until : callable, optional
        Also evaluates more densely, until it returns True for an evaluation: after every commit at
        first, then after each tenth more commits, where this is closer than ``evaluate_every``.
    attack : Attack or str, optional
        Replaces the messages of some workers: ``asyncsim.attacks.alie(workers=3)``.
    record : sequence of Recorder
        Quantities to record besides each commit's loss and step length, see `asyncsim.recorders`:
        ``[recorders.energy(momentum=0.9), recorders.diagnostics(every=5)]``.
    progress : bool, optional
        Show a progress bar on standard error; by default if that is a terminal.

    Returns
    -------
    Run
        If a value stops being finite, the run ends there; ``diverged_at`` is that commit.

    Raises
    ------
    InputError
        For arguments outside their range, or a trace without the timing that the method needs.

    Notes
    -----
    A computation that was cancelled, or whose message was discarded, leaves nothing behind: its
    worker continues with the states of the local optimizer, the replica and the method from before
    it, and draws other examples.

    The dependencies of commits decide which are computed together (see `asyncsim.replays.waves`);
    the numbers equal a loop over the events, up to the order of floating-point sums. On one machine
    and one configuration they repeat byte for byte, with the same recorders. Methods that amplify
    round-off (GEM) reproduce in law, not in value, on another machine.

    A replay runs on JAX's default device; ``with jax.default_device(device):`` chooses another.

    Traces with rollouts: see `asyncsim.replays.post_training.replay_members`.
    """
    if has_samples(trace, method, problem):
        if attack is not None:
            raise InputError(
                f"attack = {attack!r}: is not for a replay with rollouts; leave it out"
            )
        stops = None if evaluate_every is None else evaluation_stops(trace.accepted, evaluate_every)
        runs = replay_members(
            trace,
            method,  # type: ignore[arg-type]  # `replay_members` refuses other methods,
            problem,  # type: ignore[arg-type]  # and other problems
            [seed],
            None,
            precision,
            stops,
            record,
        )
        return runs[0]
    require_kinds(trace, method, problem)
    assert isinstance(method, Method) and isinstance(problem, Problem)
    if progress is not None:
        require_switch("progress", progress)
    with jax.enable_x64(require_choice("precision", precision, PRECISIONS) == "float64"):
        regular = evaluation_stops(trace.accepted, evaluate_every)
        stops = regular
        if evaluate_until is not None:
            stops = evaluation_stops(trace.accepted, evaluate_every, growing=True)
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
        )
        run_to_the_end(running, regular, method.name, progress, stops, evaluate_until)
        return running.result()


class Replay(Running):
    """A replay that stops at chosen commits, where its state can be read.

    Parameters as of `replay`. `advance` may stop at the numbers of commits in ``stops``; ``form``
    overrides the form of computing that `asyncsim.replays.tuning` chooses. For float64, make and
    use it inside ``jax.enable_x64(True)``.

    Attributes
    ----------
    state : ReplayState
        After ``position`` commits. The next `advance` reuses its memory: copy arrays to keep.
    position : int
        Commits made so far.
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
        form: Form | None = None,
    ):
        forget_other_precision()
        recorders = check_replay(trace, method, problem, record)
        seed = require_count("seed", seed, minimum=0)
        self.method, self.problem, trace = method, problem, trace.accepted
        attack = parse_attack(attack)
        require_shards(trace.servers, problem.parameter_count, method, attack)
        self._config = configuration(precision, attack) | {"seed": seed}
        dtype = jnp.dtype(precision)
        method, problem = replayed_as(method, problem, trace, attack, dtype)
        recorders = check_replay(trace, method, problem, record)
        device = default_device()
        stops = np.union1d([] if stops is None else stops, len(trace)).astype(int)
        form = form or form_of(problem, device)
        super().__init__(trace, problem, [(seed, method)], recorders, stops, dtype, device, form)

    @property
    def diverged_at(self) -> int | None:
        """The first commit with a value that is not finite."""
        return self.recordings[0].diverged_at

    def evaluate(self) -> dict[str, float]:
        """Evaluate the central variable on all data; return the new row of `Run.evaluations`.

        A loss that is not finite means that the run has diverged by the last commit.
        """
        rows = self.evaluate_members()
        if not rows:
            raise InputError(
                f"replay: diverged at commit {self.diverged_at}, and is not evaluated any more"
            )
        return rows[0]

    def result(self) -> Run:
        """Build the Run of the commits so far."""
        (params,), (replicas,) = self.params(), self.replicas()
        (recording,) = self.recordings
        return recording.run(self.method, self.problem, params, self._config, replicas)


def configuration(precision: str, attack: Attack | None) -> dict[str, Any]:
    """Return the settings of a replay, for `Run.config`."""
    return {"precision": precision, "attack": attack and attack.text, **jax_settings()}


def replayed_as(
    method: Method, problem: Problem, trace: Trace, attack: Attack | None, dtype: Any
) -> tuple[Method, Problem]:
    """Return the method of vectors and the problem, under attack and of the living workers."""
    method, problem = under_attack(
        on_vectors(method, problem, dtype), problem, attack, trace.workers
    )
    return among_the_living(method, trace, attack), problem


def run_to_the_end(
    running: Running,
    stops: np.ndarray,
    description: str,
    progress: bool | None,
    early_stops: Sequence[int] | np.ndarray = (),
    evaluate_until: Callable[[Mapping[str, float]], bool] | None = None,
) -> None:
    """Advance to the last commit, evaluate at each stop, and show the progress.

    At the early stops, too, until an evaluation satisfies ``evaluate_until``.
    """
    commits = len(running.trace)
    with Progress(commits, description, "commit", progress) as bar:

        def evaluate() -> list[dict[str, float]]:
            bar.say("evaluating")
            rows = running.evaluate_members()
            bar.say("")
            return rows

        evaluated = evaluate()
        for row in evaluated:
            _require_finite(row)
        for stop in np.unique(np.r_[stops, early_stops, commits]).astype(int):
            try:
                running.advance(stop)
            except jax.errors.UnexpectedTracerError as error:  # does not name the place
                raise InputError(
                    f"{description}: a function of the method or the problem keeps a value from "
                    "one call to the next, "
                    "in a list or a global say; return it as its state instead"
                ) from error
            bar.advance(running.position)
            is_early = evaluate_until is not None and not any(map(evaluate_until, evaluated))
            if (is_early or stop in stops) and not running.over:
                evaluated += evaluate()
            if running.over:
                break


def _require_finite(row: Mapping[str, float]) -> None:
    """Raise InputError unless the losses at the start, before any commit, are finite."""
    for name in LOSSES:
        if not math.isfinite(row.get(name, 0.0)):
            raise InputError(
                f"problem: its {name.replace('_', ' ')} is {row[name]} at the initial parameters, "
                "before any commit; "
                "look at init, loss, evaluate and the data"
            )


def check_replay(trace: Any, method: Any, problem: Any, record: Any) -> tuple[Recorder, ...]:
    """Return the recorders; raise InputError unless the method fits the trace and the problem."""
    require_kinds(trace, method, problem)
    recorders = require_recorders(record)
    params = problem.shapes
    has_diagnostics = check_method(method, params, trace.workers)
    require_shards(trace.servers, problem.parameter_count, method)
    runs_of(trace, problem)
    require_server(method, trace)
    require_timing(method, trace)
    require_arrived(method, trace)
    if method.rounds is not None:
        method.rounds.require(trace.workers, trace.policy)
    _check_outcomes(trace)
    # Without diagnostics a look shows nothing, but begins a chunk, which costs as much as hundreds
    # of a small problem's commits.
    recorders = tuple(
        recorder
        for recorder in recorders
        if has_diagnostics or recorder.look is not show_diagnostics
    )
    if trace.servers > 1:
        require_additive(recorders, trace.servers)
    return recorders


def require_kinds(trace: Any, method: Any, problem: Any) -> None:
    """Raise InputError unless each argument has its type."""
    if has_samples(trace, method, problem):
        require_rollouts(trace, method, problem, ())
        raise InputError(
            "method = 'policy_gradient': cannot be stopped and looked at; use asyncsim.replay"
        )
    for name, value, kind in (
        ("trace", trace, Trace),
        ("method", method, Method),
        ("problem", problem, Problem),
    ):
        if not isinstance(value, kind):
            maker = {Trace: "simulate(...)", Method: "methods.gem()", Problem: "problems.digits()"}[
                kind
            ]
            hint = "; call it to make one" if callable(value) else f", which {maker} returns"
            raise InputError(
                f"{name}: is a {type(value).__name__}, must be a {kind.__name__}{hint}"
            )


def has_samples(trace: Any, method: Any, problem: Any) -> bool:
    """Return whether any of the three is for rollouts; then all must be."""
    of_policies = isinstance(method, PolicyGradient) or isinstance(problem, PolicyProblem)
    return of_policies or (isinstance(trace, Trace) and trace.rollouts is not None)


def _check_outcomes(trace: Trace) -> None:
    if not len(trace.accepted):
        raise InputError(
            "trace: the server took up none of its messages, so that there is nothing to replay"
        )
    if not trace.frame["local_steps"].between(1, trace.window).all():
        raise InputError(
            f"trace: local_steps must be from 1 to its window, {trace.window}, in every row"
        )
    if trace.windows_differ:
        _check_windows(trace)


def _check_windows(trace: Trace) -> None:
    """Raise InputError unless each worker's jobs have equal local steps: they count minibatches."""
    steps = trace.frame.groupby("worker")["local_steps"].agg(["min", "max"])
    differing = steps[steps["min"] < steps["max"]]
    if len(differing):
        worker, fewest, greatest = next(differing.itertuples())
        raise InputError(
            f"trace: worker {worker} has jobs of {fewest} to {greatest} local_steps, so that "
            "minibatches would be drawn twice or left out; give all jobs of a worker the same "
            "local_steps"
        )


def evaluation_stops(trace: Trace, evaluate_every: int | None, growing: bool = False) -> np.ndarray:
    """Return the numbers of commits after which a run is evaluated; the trace is an accepted one.

    ``growing``: also after every commit at first, at distances that grow up to the regular one.

    Each completes a version: in between a server that waits for several messages may have moved the
    central variable, which no worker reads before the version is complete.
    """
    commits = len(trace)
    if evaluate_every is None:
        targets = np.linspace(0, commits, _EVALUATIONS + 1).round().astype(int)
    else:
        step = require_count("evaluate_every", evaluate_every) * trace.workers
        targets = np.r_[np.arange(step, commits, step), commits]
    if growing:
        step, early = int(targets[0] if evaluate_every is not None else commits // _EVALUATIONS), 0
        while (gap := max(1, int(early * _GROWTH))) < step:
            early += gap
            targets = np.append(targets, early)
        targets = np.unique(np.minimum(targets, commits))
    complete = 1 + np.flatnonzero(trace.frame["outcome"] == "applied")
    before = np.searchsorted(complete, targets, side="right")
    # The start is always evaluated, and is no stop.
    return np.unique(complete[before[before > 0] - 1])
