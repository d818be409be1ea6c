"""Published claims, list by list; the study ``claims`` tests them."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from asyncsim.claims.claim import Claim

#: The lists of claims, each a module of this folder with ``CLAIMS``.
ClaimList = Literal["gem", "agn", "lsgd", "parle", "gossip", "robust", "scaling", "ringmaster"]
LISTS: tuple[ClaimList, ...] = get_args(ClaimList)


def claims_of(name: ClaimList) -> "Sequence[Claim]":
    """Return the claims of a list."""
    module = importlib.import_module(f"asyncsim.claims.{name}")
    return tuple(module.CLAIMS)
