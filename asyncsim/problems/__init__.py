"""Problems: what the workers learn, one task a file."""

from collections.abc import Callable

from asyncsim.problems.custom import custom
from asyncsim.problems.digits import digits
from asyncsim.problems.mnist import mnist
from asyncsim.problems.problem import Problem
from asyncsim.problems.quadratic import quadratic

#: What the command line offers, by name.
PROBLEMS: dict[str, Callable[..., Problem]] = {"digits": digits, "mnist": mnist, "quadratic": quadratic}

__all__ = ["PROBLEMS", "Problem", "custom", "digits", "mnist", "quadratic"]
