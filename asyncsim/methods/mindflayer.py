"""MindFlayer SGD: the mean of the trials of a round that ended in time."""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError, require_list, require_share
from asyncsim.clusters.laws import Law, as_law
from asyncsim.methods.buffer import sum_messages
from asyncsim.methods.declared import PolicyLike, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Method,
    Timing,
    count_living,
    gradient_steps,
)


@declared
def mindflayer(
    learning_rate: Rate = LEARNING_RATE,
    success: float | str | Law | Sequence[Any] = 1.0,
    rule: Literal["expected", "mean"] = "expected",
    policy: PolicyLike = "trials(time=1)",
) -> Method:
    """Return MindFlayer SGD, for traces whose computations are trials that are cut.

    With the gradients ``g`` that ended in time among the ``B_i`` trials of each worker ``i``, all
    from one version, and ``p_i`` the probability that a trial of its ends in time::

        central <- central - learning_rate * (sum of g) / (sum over i of p_i B_i)

    Parameters
    ----------
    success : float, law, or list of one per worker
        ``p_i``, in (0, 1]: `asyncsim.theory.trial_success` computes it for a cluster. A law or its
        text, ``"exponential(1)"``, is of the time of a computation (s); with the times of
        ``policy`` it gives ``p_i``. With 1, a cut trial counts as a gradient of zero.
    rule : {"expected", "mean"}
        "expected": the paper's, above. "mean", the authors' program: the mean of the gradients,
        divided by the probability that a round has one, ``1 - product of (1 - p_i)^B_i``. The
        expectation of both is the gradient.
    policy : Policy or text, optional
        `asyncsim.trials` with the times and the numbers ``B_i`` of trials. None accepts any trace,
        with one trial of each worker per version.

    Raises
    ------
    InputError
        For a probability outside (0, 1], a policy without trials, a law without the policy's times,
        or lists of different lengths.

    Notes
    -----
    The simulation cuts the trials; a round without a gradient makes no version. On a trace with
    failures the sums are over the workers that the server counts at the end of a round. The paper
    and the program are known second-hand.

    References
    ----------
    Maranjyan, Shaikh Omar and Richtarik 2025, "MindFlayer SGD: efficient parallel SGD in the
    presence of heterogeneous and random worker compute times", arXiv 2410.04285.
    """
    if policy is not None and policy.time is None:
        raise InputError(
            f"policy = {str(policy)!r}: has no trials; give one such as 'trials(1.0, count=2)'"
        )
    times: Any = None if policy is None else policy.time
    counts: Any = 1 if policy is None else policy.count
    lists = {
        name: value
        for name, value in (("success", success), ("time", times), ("count", counts))
        if not isinstance(value, str) and isinstance(value, Sequence)
    }
    workers = len(require_list(*next(iter(lists.items())))) if lists else None
    for name, value in lists.items():
        if len(value) != workers:
            raise InputError(
                f"{name} = {value!r}: has length {len(value)}, and {next(iter(lists))} has length "
                f"{workers}; give each an entry per worker"
            )
    entries, trial_times = (
        lists.get(name, [value] * (workers or 1))
        for name, value in (("success", success), ("time", times))
    )
    values = [
        _probability(f"success[{worker}]" if "success" in lists else "success", entry, time)
        for worker, (entry, time) in enumerate(zip(entries, trial_times, strict=True))
    ]
    probability = values[0] if workers is None else np.array(values)

    def over_workers(of_worker, visit, dtype):
        """Add up a number of each worker that the server counts, one number or ``[workers]``."""
        if workers is None:
            return of_worker * count_living(visit).astype(dtype)
        counted = True if isinstance(visit.counted, tuple) else visit.counted
        return jnp.sum(jnp.where(counted, of_worker, 0))

    def combine(server, central, messages, visits):
        dtype = central.dtype
        p, trials = jnp.asarray(probability, dtype), jnp.asarray(counts, dtype)
        total = sum_messages(messages, visits)
        if rule == "expected":
            return Applied(central + total / over_workers(p * trials, visits, dtype), server)
        empty_round = jnp.exp(over_workers(trials * jnp.log1p(-p), visits, dtype))
        mean = total / jnp.asarray(visits.messages, dtype)
        return Applied(central + mean / (1 - empty_round), server)

    return Method(
        gradient_steps(learning_rate),
        combine=combine,
        coordinatewise=True,
        timing=Timing(policy=policy, workers=workers),
    )


def _probability(argument: str, success: Any, time: float | None) -> Any:
    """Check a probability, or compute a law's for a duration of at most ``time``."""
    if isinstance(success, str | Law):
        if time is None:
            raise InputError(
                f"{argument} = {success}: a law needs the times of trials; give policy, or a number"
            )
        try:
            number = float(as_law(argument, success).cdf(time))
        except InputError as error:
            reason = str(error).removeprefix(f"{argument}: ").removeprefix(f"{success!r}: ")
            raise InputError(f"{argument} = {success!r}: {reason}") from None
        if not number:
            raise InputError(
                f"{argument} = {success!r}: no computation ends within {time:g} s; give longer "
                "trials"
            )
        return number
    if isinstance(success, int | float) and not isinstance(success, bool):
        return require_share(argument, success)
    if hasattr(success, "aval"):  # traced, in a program for several numbers
        return success
    raise InputError(f"{argument} = {success!r}: must be a probability, a law, or a list of them")
