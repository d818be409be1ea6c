"""What staleness does to training, with each method at its best learning rate: four questions.

    asyncsim study delays optimizers        which optimizer at the server bears delay
    asyncsim study delays outer_momentum    whether outer momentum harms asynchronous DiLoCo
    asyncsim study delays best_momentum     which explicit momentum is best beside asynchrony's own
    asyncsim study delays pipeline          which layer of a network bears staleness

Each question has its own defaults. Staleness comes from fixed delays, from queues at a server with
the same mean, and from pipelines. A method counts at the rate with the least geometric mean loss,
in every case, so that none suffers from a rate that was tuned without delay; a run that ends above
its start counts with its start.

optimizers: with fixed delays, behind queues of the same mean staleness, and in a pipeline, whose
layers have different delays; behind queues also with the delay-adaptive rate, times
min(1, n / staleness). Published, one seed and rates not tuned again: with a delay of 2 the loss of
Muon rises by 0.14, of AdamH by 0.74 (marin issue 6431); with a delay of one AdamW loses more than
0.2 and Muon 0.012 (Zmushko et al. 2026, arXiv 2606.30634).

outer_momentum: momentum multiplies the server's rate by up to 1 / (1 - momentum), its effective
rate, which is tuned. Rules: Douillard et al. 2023, arXiv 2311.08105; Liu et al. 2024, arXiv
2401.09135. The largest stable rates are in `asyncsim.theory.momentum_stable_rate`.

best_momentum: asynchronous SGD of delay + 1 workers with momentum on the server, by default on a
quadratic::

    m       <- server_momentum * m - learning_rate * gradient
    central <- central + m

With one worker and exact gradients the best momentum is ``((sqrt(k) - 1) / (sqrt(k) + 1))**2`` for
the condition number k: 0.67 by default, where k is 100. Mitliagkas, Zhang, Hadjis and Ré (2016,
arXiv 1605.09774) report that it falls from 0.6 or 0.7 towards 0 with more workers, and below 0.

pipeline: the same mean staleness in one stage of layers, in all of them, or falling from the first
stage to none in the last, as in PipeDream with stashed weights, or rising. All stages are committed
at one instant.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.calls import called
from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.methods import METHODS, Method, async_local_sgd, server_optimizer
from asyncsim.problems import Problem
from asyncsim.problems.partition import partition
from asyncsim.simulation.simulate import simulate
from asyncsim.study.config import LawLike, MethodLike, ProblemLike, StudyConfig, check_values
from asyncsim.study.delays import Case, Question, Variant
from asyncsim.study.jobs import Result
from asyncsim.study.target import check_rates
from asyncsim.theory.momentum import MOMENTA
from asyncsim.traces.prescription import pipeline, prescribed
from asyncsim.traces.trace import Trace

#: Sources of staleness, and the rule of outer steps without momentum.
FIXED, QUEUE, PIPELINE, PLAIN = "fixed", "queue", "pipeline", "plain"
#: The optimizers: the rate that --tune multiplies, large without delay, and the steps, without
#: weight decay. Muon's biases, which are no matrices, have Adam's steps at the same rate.
OPTIMIZERS = {
    "sgd": (1.0, optax.sgd),
    "momentum": (0.1, functools.partial(optax.sgd, momentum=0.9)),
    "adamw_90": (0.04, functools.partial(optax.adamw, b1=0.9, weight_decay=0.0)),
    "adamw_95": (0.04, functools.partial(optax.adamw, b1=0.95, weight_decay=0.0)),
    "lion": (0.025, functools.partial(optax.lion, b1=0.9, weight_decay=0.0)),
    "muon": (0.08, functools.partial(optax.contrib.muon, beta=0.95)),
}


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the study of delays; the defaults of a question are in `SCALES`."""

    first = "question"
    example = "optimizers --optimizers adamw_90 muon"

    question: Literal["optimizers", "outer_momentum", "best_momentum", "pipeline"] = "optimizers"
    """The question; its name may stand first, without the option."""
    sources: tuple[Literal["fixed", "queue", "pipeline"], ...] = ("fixed", "queue", "pipeline")
    """Sources of staleness: fixed delays, queues at a server, a pipeline; all questions but that of
    pipelines."""
    delays: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Staleness (versions): fixed, or the mean of a queue of delay + 1 workers, or of stages."""
    tune: tuple[float, ...] = tuple(0.4**k for k in range(7))
    """Learning rates to try; of optimizers, times a rate that is large without delay; of outer
    momentum, effective rates."""
    gradients: int = 300
    """Gradients of each run, of all workers together."""
    workers: int = 1
    """Fewest workers that share a fixed delay."""
    seeds: int = 5
    """Number of seeds: 0, 1, ..."""
    compute: LawLike = "exponential(1)"
    """Law of the time of a local step (s)."""
    service: LawLike = "constant(0.05)"
    """Law of the server's time per visit (s)."""
    problem: ProblemLike = "digits(hidden=[16, 16, 16])"
    """Training problem; below 2,000 parameters all rates are computed together."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Optimizers at the server: sgd, momentum, adamw_90 and adamw_95 (by beta1), lion, muon."""
    server_momentum: tuple[float, ...] = (0.5, 0.9)
    """Momenta to compare: outer ones above 0, explicit ones above -1."""
    methods: tuple[MethodLike, ...] = ("downpour",)
    """Methods in a pipeline, each with all profiles: weight_prediction async_nesterov
    "server_optimizer(momentum=0.9)"."""
    stages: int = 4
    """Stages of a pipeline, each with a run of the problem's layers."""
    groups: tuple[str, ...] = ()
    """Parts of the problem's tree that form the stages, in place of --stages, for a problem whose
    layers have no order: embedding+positions block1 head."""

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        require_choice("question", self.question, QUESTIONS)
        if self.question != "pipeline" and self.methods != type(self).methods:
            raise InputError(
                f"methods = {', '.join(map(str, self.methods))}: the question {self.question} has "
                "its own; leave it out"
            )
        super().check()
        for name in ("sources", "delays", "optimizers", "server_momentum"):
            check_values(name, getattr(self, name))
        for name in self.optimizers:
            require_choice("optimizers", name, OPTIMIZERS)
        for delay in self.delays:
            require_count("delays", delay, minimum=0)
        least = 0 if self.question == "outer_momentum" else -1
        for value in self.server_momentum:
            if not least < value < 1:
                raise InputError(f"server_momentum = {value!r}: must be above {least} and below 1")
        if self.question == "optimizers" and 0 not in self.delays:
            raise InputError(
                f"delays = {self.delays}: losses are relative to a delay of 0; give that, too"
            )
        require_count("stages", self.stages)
        require_count("gradients", self.gradients)
        check_rates(self.tune)


#: The defaults of each question.
SCALES = {
    "optimizers": Config(),
    "outer_momentum": Config(
        question="outer_momentum",
        sources=("fixed", "queue"),
        delays=(0, 2, 7),
        tune=tuple(2.0**k for k in range(-5, 5)),
        gradients=2560,
        workers=8,
        window=8,
        service="constant(0.5)",
        learning_rate=0.1,
        problem="digits(hidden=[16, 16])",
    ),
    "best_momentum": Config(
        question="best_momentum",
        sources=("queue",),
        delays=(0, 1, 3, 7, 15, 31),
        tune=tuple(2.0 ** (k / 2) for k in range(-10, 5)),
        gradients=600,
        seeds=3,
        service="constant(0)",
        server_momentum=(-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.7, 0.8),
        problem="quadratic(curvature=[1, 0.3, 0.1, 0.03, 0.01], noise=0)",
        x64=True,
    ),
    "pipeline": Config(
        question="pipeline",
        delays=(6,),
        tune=tuple(0.025 * 2 ** (k / 2) for k in range(11)),
        gradients=800,
        problem="digits(hidden=[64, 64, 64])",
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    config.say_ignored(("steps",), "beside --gradients")
    if config.question != "outer_momentum":
        config.say_ignored(("learning_rate",), "beside --tune")
    return QUESTIONS[config.question].run(config)


def _cases(config: Config, problem: Problem) -> list[Case]:
    """Return fixed delays, queues of the same mean staleness, and a pipeline."""
    count = max(1, int(config.gradients // config.window))
    cases = []
    if FIXED in config.sources:
        cases += [
            Case(FIXED, delay, functools.partial(_fixed, config, delay, count))
            for delay in config.delays
        ]
    if QUEUE in config.sources:  # without delay it is a fixed delay
        cases += [_queue(config, problem, delay) for delay in config.delays if delay or not cases]
    if PIPELINE in config.sources:
        partition(problem.shapes, config.stages, "stages", by_layer=True)  # raises InputError
        mean = (config.stages - 1) / 2
        cases.append(Case(PIPELINE, mean, lambda seed: pipeline(config.stages, count)))
    return cases


def _fixed(config: Config, delay: int, commits: int, seed: int) -> Trace:
    """Return the trace of a fixed delay."""
    return prescribed(delay, commits, max(config.workers, delay + 1), config.window)


def _queue(config: Config, problem: Problem, delay: int) -> Case:
    """Return the case of a queue of delay + 1 workers."""
    cluster = config.at(workers=delay + 1).make_cluster(config.vector_bytes(problem))
    commits = max(1, int(config.gradients // cluster.mean_window))

    def trace(seed: int) -> Trace:
        return simulate(cluster, commits, seed, progress=False)

    # One program trains all seeds of many optimizers, on one trace.
    return Case(QUEUE, delay, trace, is_shared=config.question == "optimizers")


# Optimizers


def _variants_of_optimizers(config: Config, case: Case) -> list[Variant]:
    """Return the optimizers; behind a queue also with the delay-adaptive rate."""
    adaptive = [0.0, 1.0] if case.source == QUEUE else [0.0]
    variants = []
    for name in config.optimizers:
        rates = [OPTIMIZERS[name][0] * rate for rate in config.tune]
        factory = functools.partial(tried, optimizer=name)
        values = {"adaptive": adaptive, "learning_rate": rates}
        variants.append(Variant({"optimizer": name}, factory, values))
    return variants


def tried(learning_rate: Any, adaptive: Any, optimizer: str) -> Method:
    """Return a server optimizer at a rate; ``adaptive`` is 1.0 for the delay-adaptive rate, 0.0
    without.

    Unlike the switch of `asyncsim.methods.server_optimizer`, ``adaptive`` is a number, with which
    both variants share one program.
    """

    def shrink(steps: Any, state: Any, params: Any = None, *, visit: Any, **_: Any) -> Any:
        kind = jax.tree.leaves(steps)[0].dtype
        tau, n = (jnp.asarray(count, kind) for count in (visit.staleness, visit.workers))
        factor = (n / jnp.maximum(n, tau)) ** adaptive
        return jax.tree.map(lambda step: factor * step, steps), state

    shrinking = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), shrink)
    steps = optax.chain(OPTIMIZERS[optimizer][1](learning_rate), shrinking)
    method = server_optimizer(optimizer=steps, adaptive=False)
    values = {"learning_rate": learning_rate, "adaptive": adaptive, "optimizer": optimizer}
    return method._replace(name=optimizer, hyperparameters=values)


# Outer momentum


def _variants_of_outer_momentum(config: Config, case: Case) -> list[Variant]:
    """Return plain steps and both rules, at the rates and the effective rates of plain steps."""
    scales = (1, *(1 / (1 - momentum) for momentum in config.server_momentum))
    rates = tuple(sorted({rate * scale for rate in config.tune for scale in scales}))
    plain = (PLAIN, config.tune, (0.0,))
    choices = [plain, *((rule, rates, config.server_momentum) for rule in MOMENTA)]
    variants = []
    for rule, effective, momenta in choices:
        factory = functools.partial(outer, rule=rule, learning_rate=config.learning_rate)
        values = {"effective_rate": effective, "server_momentum": momenta}
        variants.append(Variant({"rule": rule}, factory, values, "effective_rate"))
    return variants


def outer(effective_rate: Any, server_momentum: Any, rule: str, learning_rate: float) -> Method:
    """Return asynchronous DiLoCo with an effective outer rate and an outer momentum."""
    rate = effective_rate * (1 - server_momentum)
    if rule == "heavy_ball":
        steps = optax.sgd(rate, momentum=server_momentum)
        method = async_local_sgd(learning_rate, server_optimizer=steps)
    else:
        method = async_local_sgd(learning_rate, rate, server_momentum)
    values = {"effective_rate": effective_rate, "server_momentum": server_momentum, "rule": rule}
    return method._replace(name=rule, hyperparameters={**values, "learning_rate": learning_rate})


# Best momentum


def _variants_of_best_momentum(config: Config, case: Case) -> list[Variant]:
    """Return all momenta as one variant."""
    values = {"server_momentum": config.server_momentum, "learning_rate": config.tune}
    return [Variant({}, heavy_ball, values)]


def heavy_ball(learning_rate: Any, server_momentum: Any) -> Method:
    """Return asynchronous SGD with momentum on the server, which may be negative."""
    method = async_local_sgd(learning_rate, server_optimizer=optax.sgd(1.0, server_momentum))
    values = {"learning_rate": learning_rate, "server_momentum": server_momentum}
    return method._replace(name="heavy_ball", hyperparameters=values)


# Pipelines


def profiles(stages: int, staleness: int) -> dict[str, list[int]]:
    """Return the staleness of each stage in all cases, by name; the mean is ``staleness``.

    Raises InputError for a mean with which the pipeline's would not be whole numbers.
    """
    if stages < 2:
        raise InputError(f"stages = {stages}: one stage has nothing to compare; give 2 or more")
    if 2 * staleness % (stages - 1):
        raise InputError(
            f"delays = {staleness}: with {stages} stages the pipeline's has no whole numbers of "
            f"versions; give a multiple of {(stages - 1) // (1 + stages % 2)}"
        )
    falling = [2 * staleness * (stages - 1 - stage) // (stages - 1) for stage in range(stages)]
    in_one = {
        f"stage {stage}": [stages * staleness * (stage == other) for other in range(stages)]
        for stage in range(stages)
    }
    whole = {"even": [staleness] * stages, "pipeline": falling, "reversed": falling[::-1]}
    return {**in_one, **whole}


def _cases_of_pipelines(config: Config, problem: Problem) -> list[Case]:
    """Return no staleness, and the profiles of each mean staleness over the stages."""
    argument = "groups" if config.groups else "stages"
    stages = config.groups or config.stages
    names = partition(problem.shapes, stages, argument, by_layer=True).names
    delays = {("none", 0): [0] * len(names)}
    for mean in filter(None, config.delays):
        of_mean = profiles(len(names), mean)
        delays |= {(profile, mean): of_stages for profile, of_stages in of_mean.items()}
    return [
        Case(profile, mean, functools.partial(_prescribed, config, names, of_stages))
        for (profile, mean), of_stages in delays.items()
    ]


def _prescribed(config: Config, names: Sequence[str], delays: Sequence[int], seed: int) -> Any:
    """Return the trace of a profile."""
    return prescribed(dict(zip(names, delays, strict=True)), config.gradients, config.workers)


def _variants_of_pipelines(config: Config, case: Case) -> list[Variant]:
    """Return the methods."""
    values = {"learning_rate": config.tune}
    return [
        Variant({"method": text}, functools.partial(_method, text), values)
        for text in map(str, config.methods)
    ]


def _method(text: str, learning_rate: Any) -> Method:
    """Return the method of a text at a rate."""
    if "learning_rate" in text:
        raise InputError(f"methods = {text!r}: its rate is tuned; leave it out, and give --tune")
    factories = {
        name: functools.partial(factory, learning_rate=learning_rate)
        for name, factory in METHODS.items()
    }
    method: Method = called("methods", text, factories)
    return method


QUESTIONS = {
    "optimizers": Question(
        _cases,
        _variants_of_optimizers,
        columns=("optimizer", "adaptive"),
        reference={"adaptive": 0.0, "source": FIXED, "delay": 0},
        compared=("optimizer", "adaptive"),
        what="optimizer",
        settings=("source",),
        ranks="ratio",
    ),
    "outer_momentum": Question(
        _cases,
        _variants_of_outer_momentum,
        columns=("rule", "server_momentum"),
        reference={"rule": PLAIN, "server_momentum": 0.0},
        compared=("rule", "server_momentum"),
        what="rule",
        settings=("source", "delay"),
    ),
    "best_momentum": Question(
        _cases,
        _variants_of_best_momentum,
        columns=("server_momentum",),
        reference={"server_momentum": 0.0},
        compared=("server_momentum",),
        what="momentum",
        settings=("source", "delay"),
    ),
    "pipeline": Question(
        _cases_of_pipelines,
        _variants_of_pipelines,
        columns=("method",),
        reference={"source": "none", "delay": 0},
        compared=("source", "delay"),
        what="profile",
        settings=("method",),
        evaluations=20,
        last=5,
    ),
}
