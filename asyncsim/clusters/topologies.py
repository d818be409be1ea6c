"""Topologies: which worker sends to which, and what share of itself, on clusters without a server.

A topology gives a finite cycle of matrices for any number of workers, of which a worker uses the next after each of its
gradients. ``P[i, j]`` is the share that worker ``i`` takes up of what ``j`` sends, ``P[j, j]`` the share that ``j``
keeps. Columns sum to one, so that nothing is lost; where rows do, too, the mean of the replicas stays where it is
without push-sum's weights.

Topologies are values, as laws and policies are, and may be given as their text: ``topology="random_regular(4)"``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from asyncsim.base.calls import from_text, write
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_list,
    require_memory,
    require_positive,
    shown,
)

#: How the shares of an adjacency matrix are chosen.
WEIGHTS = ("metropolis", "uniform", "given")
#: By how much a column of given shares may miss one.
_ROUND_OFF = 1e-9
#: How often a random graph is drawn anew until it is connected.
_DRAWS = 1_000
#: Memory (bytes) that an edge takes in a simulation.
_EDGE_BYTES = 200


class Edges(NamedTuple):
    """One matrix of a topology without its diagonal: each edge's ``sender``, ``taker`` and ``share``."""

    sender: np.ndarray
    taker: np.ndarray
    share: np.ndarray

    def kept(self, workers: int) -> np.ndarray:
        """Return the share that each worker keeps, ``[workers]``."""
        sent = np.bincount(self.sender, self.share, workers)
        return np.where(sent > 1 - _ROUND_OFF, 0.0, 1 - sent)


@dataclass(frozen=True)
class Topology:
    """Who sends to whom; made by the function of the same name.

    Attributes
    ----------
    name : str
    degree : int or None
        Neighbours of each worker.
    seed : int or None
        Names the random graph.
    matrix : tuple or None
        Rows of a given matrix, or a tuple of such matrices.
    weights : str or None
        How the shares follow from a given matrix.
    slow : tuple or None
        Links that take longer, see `slow_links`.
    """

    name: str
    degree: int | None = None
    seed: int | None = None
    matrix: tuple[Any, ...] | None = None
    weights: str | None = None
    slow: tuple[tuple[int, int, float], ...] | None = None

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in ("degree", "seed", "matrix", "weights"))
        text = f"{self.name}({', '.join(f'{name}={write(value)}' for name, value in given if value is not None)})"
        return text if self.slow is None else f"slow_links({text}, {write(self.slow)})"

    def __repr__(self) -> str:
        """Show a large matrix by its size."""
        if self.matrix is None or len(self.matrix) <= 4:
            return str(self)
        text = f"{self.name}(<matrix of {len(self.matrix)}>, weights={self.weights})"
        return text if self.slow is None else f"slow_links({text}, {write(self.slow)})"

    def edges(self, workers: int) -> list[Edges]:
        """Return the cycle for a number of workers, matrix by matrix.

        Raises
        ------
        InputError
            The graph does not fit the number of workers, or is not connected.
        """
        workers = require_count("workers", workers)
        if workers == 1 and self.matrix is None:
            return [_edges([])]
        match self.name:
            case "ring":
                return [_uniform([(j, (j + step) % workers) for j in range(workers) for step in (1, workers - 1)])]
            case "exponential":
                hops = [2**k for k in range((workers - 1).bit_length())]
                return [_uniform([(j, (j + hop) % workers) for j in range(workers) for hop in hops])]
            case "one_peer_exponential":
                hops = [2**k for k in range((workers - 1).bit_length())]
                return [_uniform([(j, (j + hop) % workers) for j in range(workers)]) for hop in hops]
            case "complete":
                _require_memory(self, workers * (workers - 1))
                return [_uniform([(j, i) for j in range(workers) for i in range(workers) if i != j])]
            case "random_regular":
                return [_uniform(_random_regular(self, workers))]
            case "base2":
                return [_edges(pairs) for pairs in _base2(workers)]
        return _of_matrix(self, workers)

    def matrices(self, workers: int) -> np.ndarray:
        """Return the cycle of matrices for a number of workers, ``[cycle, workers, workers]``.

        Raises
        ------
        InputError
            As `edges`.
        """
        cycle = self.edges(workers)
        _require_memory(self, len(cycle) * workers * workers / 10)
        dense = np.zeros((len(cycle), workers, workers))
        for matrix, edges in zip(dense, cycle, strict=True):
            matrix[edges.taker, edges.sender] = edges.share
            np.fill_diagonal(matrix, edges.kept(workers))
        return dense

    def sends(self, workers: int) -> list[list[list[tuple[int, float]]]]:
        """Return to whom each worker sends which share, ``[cycle][workers]``."""
        cycle = []
        for edges in self.edges(workers):
            takers: list[list[tuple[int, float]]] = [[] for _ in range(workers)]
            for sender, taker, share in zip(*(column.tolist() for column in edges), strict=True):
                takers[sender].append((taker, share))
            cycle.append(takers)
        return cycle

    def slowness(self, workers: int) -> dict[tuple[int, int], float]:
        """Return from sender and taker how many times as long as on others messages take on the slow links.

        Raises
        ------
        InputError
            There is no such link.
        """
        there = self.neighbours(workers) if self.slow else []
        for i, j, _ in self.slow or ():
            if max(i, j) >= workers or (j not in there[i] and i not in there[j]):
                raise InputError(
                    f"topology = {self!r}: among {workers} workers there is no link between {i} and {j}; name one that "
                    "there is"
                )
        return {pair: times for i, j, times in self.slow or () for pair in ((i, j), (j, i))}

    def neighbours(self, workers: int) -> list[list[int]]:
        """Return to whom each worker sends in any of the matrices, in ascending order."""
        found: list[set[int]] = [set() for _ in range(workers)]
        for edges in self.edges(workers):
            for sender, taker in zip(edges.sender.tolist(), edges.taker.tolist(), strict=True):
                found[sender].add(taker)
        return [sorted(takers) for takers in found]


def ring() -> Topology:
    """Return the ring: every worker has two neighbours, one on each side; a third of everything goes each way."""
    return Topology("ring")


def exponential() -> Topology:
    """Return the static exponential graph: worker ``i`` sends to ``i + 1, i + 2, i + 4, ...``; directed, equal shares.

    References
    ----------
    Assran et al. 2019, arXiv 1811.10792; Ying et al. 2021, arXiv 2110.13363.
    """
    return Topology("exponential")


def one_peer_exponential() -> Topology:
    """Return the one-peer exponential graph: worker ``i`` sends half to ``i + 2**k``, ``k`` going round; directed.

    ``k`` runs over ``0 .. floor(log2(workers - 1))``. For a power of two one cycle averages exactly.

    References
    ----------
    Assran, Loizou, Ballas and Rabbat 2019, "Stochastic gradient push", arXiv 1811.10792.
    """
    return Topology("one_peer_exponential")


def complete() -> Topology:
    """Return the complete graph: everybody sends to everybody, equal shares."""
    return Topology("complete")


def random_regular(degree: int, seed: int = 0) -> Topology:
    """Return a random connected graph in which every worker has ``degree`` neighbours; equal shares.

    Raises
    ------
    InputError
        For a degree or a seed that cannot be used.
    """
    return Topology("random_regular", degree=require_count("degree", degree), seed=require_count("seed", seed, 0))


def base2() -> Topology:
    """Return the Base-2 graph: pairs, whose matrices average any number of workers exactly within a cycle.

    The cycle has at most ``2 log2(workers) + 2`` matrices, all symmetric; one of ``log2(workers)`` for a power of two.

    References
    ----------
    Takezawa, Sato, Bao, Niwa and Yamada 2023, arXiv 2305.11420, algorithms 1 to 3 with k = 1, and their program, in
    which workers that have nothing to do repeat their last averages.
    """
    return Topology("base2")


def adjacency(matrix: Any, weights: str | None = None) -> Topology:
    """Return the topology of an adjacency matrix, or of a networkx graph.

    Parameters
    ----------
    matrix : array-like ``[workers, workers]``, or networkx graph
        ``matrix[i][j]`` is not zero where ``j`` sends to ``i``; the diagonal says nothing. Workers are the nodes of
        networkx in their order there; the edges of a directed graph begin at the sender.
    weights : str, optional
        - ``"metropolis"``, of undirected graphs, whose default it is: ``1 / (1 + larger degree of the two)``. Symmetric
          and doubly stochastic.
        - ``"uniform"``, the default of directed graphs: ``1 / (1 + receivers of the sender)``. Columns sum to one, rows
          need not: for push-sum.
        - ``"given"``: the entries are the shares, with the diagonal; or a list of such matrices, the cycle.

    Raises
    ------
    InputError
        No square matrix of finite numbers that are zero or above; Metropolis' shares of a directed graph; given shares
        whose columns do not sum to one; a graph that is not connected, or not strongly.
    """
    if hasattr(matrix, "adjacency") and hasattr(matrix, "nodes"):
        place = {node: index for index, node in enumerate(matrix.nodes)}
        array = np.zeros((len(place), len(place)))
        for sender, takers in matrix.adjacency():
            array[[place[taker] for taker in takers], place[sender]] = 1.0
    else:
        try:
            array = np.asarray(matrix, np.float64)
        except (TypeError, ValueError):
            raise InputError(f"matrix = {shown(repr(matrix))}: must be a square matrix of numbers") from None
    cycle = array[None] if array.ndim == 2 else array
    if cycle.ndim != 3 or cycle.shape[1] != cycle.shape[2] or 0 in cycle.shape:
        raise InputError(f"matrix of shape {array.shape}: must be square, with a row and a column for each worker")
    if not (np.isfinite(cycle).all() and (cycle >= 0).all()):
        raise InputError("matrix: its entries must be finite and zero or above")
    there = cycle.any(axis=0) & ~np.eye(cycle.shape[1], dtype=bool)
    symmetric = bool((there == there.T).all())
    weights = ("metropolis" if symmetric else "uniform") if weights is None else weights
    require_choice("weights", weights, WEIGHTS)
    if weights != "given" and len(cycle) > 1:
        raise InputError(f"weights = {weights!r}: a cycle of matrices holds the shares; give weights='given'")
    if weights == "metropolis" and not symmetric:
        raise InputError(
            "weights = 'metropolis': of a directed graph; give weights='uniform', whose columns sum to one"
        )
    if weights == "given":
        sums = cycle.sum(axis=1)
        if (abs(sums - 1) > _ROUND_OFF).any():
            at, worker = np.argwhere(abs(sums - 1) > _ROUND_OFF)[0]
            place_of = f"matrix {at}, " if len(cycle) > 1 else ""
            raise InputError(
                f"matrix: {place_of}column {worker} sums to {sums[at, worker]:g}; the shares of what a worker sends "
                "and keeps must sum to one"
            )
    else:
        array = there.astype(np.int64)
    _require_connected("matrix", [list(np.flatnonzero(column)) for column in there.T], not symmetric)
    return Topology("adjacency", matrix=_frozen(array.tolist()), weights=weights)


def slow_links(topology: Topology | str, links: Any) -> Topology:
    """Return a topology with some links on which messages take longer, in both directions.

    Parameters
    ----------
    topology : Topology or text
        The graph, and the shares.
    links : list of [worker, worker, times]
        Between which two workers, and how many times as long as on the others: of the latency and of the bytes over the
        bandwidth.

    Raises
    ------
    InputError
        For anything else; where a cluster is made, also for a link that is not there.
    """
    found = []
    for i, link in enumerate(require_list("links", links)):
        if not (isinstance(link, list | tuple) and len(link) == 3):
            raise InputError(f"links[{i}] = {link!r}: must be two workers and a number, [0, 1, 5] say")
        pair = sorted(require_count(f"links[{i}]: worker", one, 0) for one in link[:2])
        found.append((pair[0], pair[1], require_positive(f"links[{i}]: times", link[2])))
    if not found or len({link[:2] for link in found}) < len(found):
        raise InputError(f"links = {links!r}: must name one link or more, each once")
    return replace(as_topology(topology), slow=tuple(sorted(found)))


#: The topologies by their names on the command line.
TOPOLOGIES: Mapping[str, Callable[..., Topology]] = {
    one.__name__: one
    for one in (ring, exponential, one_peer_exponential, complete, random_regular, base2, adjacency, slow_links)
}


def as_topology(value: Any) -> Topology:
    """Return a topology from itself or its text, ``"ring()"``; brackets without parameters may be left out.

    Raises
    ------
    InputError
        For anything else.
    """
    return from_text("topology", value, Topology, TOPOLOGIES, "asyncsim.topologies.", "ring()")


def is_symmetric(topology: Topology, workers: int) -> bool:
    """Return whether the shares go both ways alike, in every matrix."""
    for edges in topology.edges(workers):
        there = dict(zip(zip(edges.sender.tolist(), edges.taker.tolist(), strict=True), edges.share, strict=True))
        if any(abs(there.get((taker, sender), 0.0) - share) > _ROUND_OFF for (sender, taker), share in there.items()):
            return False
    return True


def _edges(entries: list[tuple[int, int, float]]) -> Edges:
    sender, taker, share = zip(*entries, strict=True) if entries else ((), (), ())
    return Edges(np.array(sender, np.int64), np.array(taker, np.int64), np.array(share, np.float64))


def _uniform(pairs: list[tuple[int, int]]) -> Edges:
    """Return edges from (sender, taker) whose senders keep as much as they send to each; repeated ones count once."""
    table = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2)
    sender = table[:, 0]
    return Edges(sender, table[:, 1], 1.0 / (1 + np.bincount(sender)[sender]))


def _require_memory(topology: Topology, edges: float) -> None:
    require_memory(f"topology = {topology!r}", f"its {edges:,.0f} edges", edges * _EDGE_BYTES)


def _frozen(rows: Any) -> Any:
    return tuple(map(_frozen, rows)) if isinstance(rows, list) else rows


def _require_connected(argument: str, takers: list[list[int]], directed: bool) -> None:
    """Raise InputError unless everybody reaches everybody; in ``takers`` are the receivers of each worker."""
    senders: list[list[int]] = [[] for _ in takers]
    for sender, row in enumerate(takers):
        for taker in row:
            senders[taker].append(sender)
    for graph, way in ((takers, "from"), (senders, "to")):
        reached, waiting = {0}, [0]
        while waiting:
            new = set(graph[waiting.pop()]) - reached
            reached |= new
            waiting += new
        if len(reached) < len(takers):
            apart = min(set(range(len(takers))) - reached)
            how = f"not strongly connected: nothing gets {way} worker 0 {'to' if way == 'from' else 'from'}"
            subject = f"{how} worker {apart}" if directed else f"not connected: worker {apart} is apart from worker 0"
            raise InputError(f"{argument}: the graph is {subject}; add edges, or leave workers out")


def _of_matrix(topology: Topology, workers: int) -> list[Edges]:
    assert topology.matrix is not None
    cycle = np.asarray(topology.matrix, np.float64)
    cycle = cycle[None] if cycle.ndim == 2 else cycle
    if cycle.shape[1] != workers:
        raise InputError(
            f"topology = {topology!r}: a graph of {cycle.shape[1]} workers, and there are {workers}; give as many"
        )
    result = []
    for matrix in cycle:
        off = matrix * ~np.eye(workers, dtype=bool)
        sender, taker = np.nonzero(off.T)
        if topology.weights == "given":
            share = off[taker, sender]
        else:
            degree = np.bincount(sender, minlength=workers)
            larger = np.maximum(degree[sender], degree[taker]) if topology.weights == "metropolis" else degree[sender]
            share = 1.0 / (1 + larger)
        result.append(Edges(sender, taker, share))
    return result


def _random_regular(topology: Topology, workers: int) -> list[tuple[int, int]]:
    """Return the edges, each way, of a random connected graph of one degree.

    Half-edges are paired at random, and those of pairs that cannot be are paired again (Steger and Wormald 1999). A
    graph of many edges is what a graph of few leaves out.
    """
    degree = topology.degree
    assert degree is not None and topology.seed is not None
    subject = f"topology = {topology}: with {workers} workers"
    if degree >= workers:
        raise InputError(f"{subject} the degree can be at most {workers - 1}; give less, or more workers")
    if degree * workers % 2:
        raise InputError(f"{subject} the edges would have {degree * workers} ends, an odd number; change one of them")
    _require_memory(topology, degree * workers)
    generator = np.random.default_rng(topology.seed)
    inverted = degree > (workers - 1) / 2
    pairs_each = workers - 1 - degree if inverted else degree
    for _ in range(_DRAWS):
        pairs = _paired(pairs_each, workers, generator)
        if pairs is None:
            continue
        there = {(i, j) for pair in pairs for i, j in (pair, pair[::-1])}
        if inverted:
            there = {(i, j) for i in range(workers) for j in range(workers) if i != j} - there
        takers: list[list[int]] = [[] for _ in range(workers)]
        for sender, taker in there:
            takers[sender].append(taker)
        try:
            _require_connected("", takers, directed=False)
        except InputError:
            continue
        return sorted(there)
    raise InputError(f"{subject} no connected graph was found in {_DRAWS} draws; give a degree of at least 3")


def _paired(degree: int, workers: int, generator: np.random.Generator) -> set[tuple[int, int]] | None:
    """Return pairs of workers, ``degree`` of each, or None where the last ones do not fit."""
    pairs: set[tuple[int, int]] = set()
    ends = np.repeat(np.arange(workers), degree)
    while len(ends):
        ends = generator.permutation(ends)
        left: list[int] = []
        for one, other in np.sort(ends.reshape(-1, 2), axis=1).tolist():
            if one == other or (one, other) in pairs:
                left += [one, other]
            else:
                pairs.add((one, other))
        rest = sorted(set(left))
        if left and not any((i, j) not in pairs for i in rest for j in rest if i < j):
            return None
        ends = np.array(left, np.int64)
    return pairs


def _hypercube(nodes: list[int]) -> list[list[tuple[int, int, float]]]:
    """Return the rounds in which a power of two of workers averages exactly: both halves of every pair."""
    rounds = [2**k for k in range(len(nodes).bit_length() - 1)]
    return [[(nodes[i], nodes[i ^ hop], 0.5) for i in range(len(nodes))] for hop in rounds]


def _simple_base2(nodes: list[int]) -> list[list[tuple[int, int, float]]]:
    """Return the rounds of the simple Base-2 graph (algorithm 2).

    The workers are split into groups by the binary digits of their number, largest first. Each group averages. Then in
    round ``m`` each worker of the later groups exchanges with one of group ``m``, by as much as makes the mean of group
    ``m`` that of all; and each group averages again.
    """
    count = len(nodes)
    if count & (count - 1) == 0:
        return _hypercube(nodes)
    groups: list[list[int]] = []
    first = 0
    for power in reversed(range(count.bit_length())):
        if count >> power & 1:
            groups.append(nodes[first : first + 2**power])
            first += 2**power
    cubes = [_hypercube(group) for group in groups]
    longest, last = len(cubes[0]), len(groups) - 1
    rounds: list[list[tuple[int, int, float]]] = []
    for m in range(2 * longest + 1):
        pairs: list[tuple[int, int, float]] = []
        at = m - longest  # the group that the later ones exchange with
        free = list(groups[at]) if 0 <= at < last else []
        for place, cube in enumerate(cubes):
            begin = min(place + 1, last)  # the last group has all of it by its exchanges, and repeats its averages
            if cube and (m < longest or at >= begin):
                pairs += cube[(m if m < longest else at - begin) % len(cube)]
        if free:
            rest = sum(map(len, groups[at:]))
            for group in reversed(groups[at + 1 :]):
                for node in group:
                    other, share = free.pop(), len(groups[at]) / rest
                    pairs += [(node, other, share), (other, node, share)]
            for one, two in zip(free[::2], free[1::2], strict=False):
                pairs += [(one, two, 0.5), (two, one, 0.5)]
        rounds.append(pairs)
    return rounds


def _base2(workers: int) -> list[list[tuple[int, int, float]]]:
    """Return the rounds of the Base-2 graph (algorithm 3): the shorter of two ways.

    Either the simple graph of all, or that of groups of an odd size, and then hypercubes across the groups.
    """
    simple = _simple_base2(list(range(workers)))
    groups = workers & -workers
    odd = workers // groups
    inside = [_simple_base2(list(range(odd * group, odd * (group + 1)))) for group in range(groups)]
    across = [_hypercube(list(range(place, workers, odd))) for place in range(odd)]
    if odd == 1 or len(simple) < len(inside[0]) + len(across[0]):
        return simple
    return [
        [pair for part in parts for pair in part] for rounds in (inside, across) for parts in zip(*rounds, strict=True)
    ]
