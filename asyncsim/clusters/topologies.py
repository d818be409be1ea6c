"""Topologies: who sends to whom, and with which shares, on clusters without a server.

A topology gives a finite cycle of matrices for any number of workers; a worker uses the next one
after each of its gradients. ``P[i, j]`` is the share of ``j``'s state that worker ``i`` takes up,
``P[j, j]`` the share that ``j`` keeps. Columns sum to one, so that nothing is lost; if rows do,
too, the mean of the replicas is preserved without push-sum's weights.

Topologies are values, like laws and policies, and may be given as their text:
``topology="random_regular(4)"``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from asyncsim.base.calls import write
from asyncsim.base.declared import Count, Natural, Value, from_text
from asyncsim.base.errors import (
    InputError,
    require_count,
    require_list,
    require_memory,
    require_name,
    require_positive,
)

#: Tolerance for the sum of a column of given shares.
_ROUND_OFF = 1e-9
#: Draws of a random graph before it counts as impossible to connect.
_DRAWS = 1_000
#: Memory (bytes) of an edge in a simulation.
_EDGE_BYTES = 200
#: The most workers of a matrix that a title shows.
_TITLE_WORKERS = 4


class Edges(NamedTuple):
    """One matrix of a topology without its diagonal: each edge's ``sender``, ``taker`` and
    ``share``.
    """

    sender: np.ndarray
    taker: np.ndarray
    share: np.ndarray

    def kept(self, workers: int) -> np.ndarray:
        """Return the share that each worker retains, ``[workers]``."""
        sent = np.bincount(self.sender, self.share, workers)
        return np.where(sent > 1 - _ROUND_OFF, 0.0, 1 - sent)


def _numbers(argument: str, matrix: Any) -> tuple[Any, ...]:
    """Check a matrix, a cycle of them or a networkx graph; return the rows."""
    if hasattr(matrix, "adjacency") and hasattr(matrix, "nodes"):
        place = {node: index for index, node in enumerate(matrix.nodes)}
        array = np.zeros((len(place), len(place)))
        for sender, takers in matrix.adjacency():
            array[[place[taker] for taker in takers], place[sender]] = 1.0
    else:
        try:
            array = np.asarray(matrix, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{argument} = {matrix!r:.80}: must be a square matrix of numbers"
            ) from None
    if array.ndim not in (2, 3) or array.shape[-1] != array.shape[-2] or 0 in array.shape:
        value = f" = {matrix!r:.80}" if array.ndim < 2 else ""
        raise InputError(
            f"{argument}{value}: of shape {array.shape}; must be square, with a row and a column "
            "for each worker"
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InputError(f"{argument}: its entries must be finite and zero or above")
    return _frozen(array.tolist())


def _links(argument: str, value: Any) -> tuple[tuple[int, int, float], ...]:
    """Check slow links; return two workers, in order, and the factor of each."""
    slow = []
    for i, link in enumerate(require_list(argument, value)):
        if not (isinstance(link, list | tuple) and len(link) == 3):
            raise InputError(
                f"{argument}[{i}] = {link!r}: must be two workers and a number, such as [0, 1, 5]"
            )
        pair = sorted(require_count(f"{argument}[{i}]: worker", worker, 0) for worker in link[:2])
        slow.append((pair[0], pair[1], require_positive(f"{argument}[{i}]: times", link[2])))
    if len({link[:2] for link in slow}) < len(slow):
        raise InputError(f"{argument} = {value!r}: must name each link once")
    return tuple(sorted(slow))


class Topology(Value):
    """Who sends to whom. ``repr`` is the text for titles, short also for a large matrix."""

    kind: ClassVar[str] = "topology"

    def edges(self, workers: int) -> list[Edges]:
        """Return the cycle of matrices for a number of workers, as edges.

        Raises
        ------
        InputError
            If the graph does not fit the number of workers, or is not connected.
        """
        return self._cycle(workers) if require_count("workers", workers) > 1 else [_edges([])]

    def _cycle(self, workers: int) -> list[Edges]:
        """Return `edges` of two workers or more."""
        raise NotImplementedError  # each topology has its cycle

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
        """Return each worker's receivers and their shares, ``[cycle][workers]``."""
        cycle = []
        for edges in self.edges(workers):
            takers: list[list[tuple[int, float]]] = [[] for _ in range(workers)]
            for sender, taker, share in zip(*(column.tolist() for column in edges), strict=True):
                takers[sender].append((taker, share))
            cycle.append(takers)
        return cycle

    def slowness(self, workers: int) -> dict[tuple[int, int], float]:
        """Return the factors of the transfer times on slow links, by sender and receiver.

        Raises
        ------
        InputError
            For a link that does not exist.
        """
        return {}

    def neighbours(self, workers: int) -> list[list[int]]:
        """Return the receivers of each worker in any of the matrices, in ascending order."""
        cycle = self.sends(workers)
        return [sorted({taker for sends in cycle for taker, _ in sends[i]}) for i in range(workers)]


@dataclass(frozen=True)
class ring(Topology):
    """The ring: every worker sends a third to each of its two neighbours."""

    def _cycle(self, workers: int) -> list[Edges]:
        return [_circulant(workers, (1, workers - 1))]


@dataclass(frozen=True)
class exponential(Topology):
    """The static exponential graph: ``i`` sends to ``i + 1, i + 2, i + 4, ...``.

    It is directed, with equal shares.

    References
    ----------
    Assran et al. 2019, arXiv 1811.10792; Ying et al. 2021, arXiv 2110.13363.
    """

    def _cycle(self, workers: int) -> list[Edges]:
        return [_circulant(workers, _hops(workers))]


@dataclass(frozen=True)
class one_peer_exponential(Topology):
    """The one-peer exponential graph: ``i`` sends half to ``i + 2**k``, with ``k`` in turn.

    It is directed. ``k`` runs over ``0 .. floor(log2(workers - 1))``. For a power of two one cycle
    averages exactly.

    References
    ----------
    Assran, Loizou, Ballas and Rabbat 2019, "Stochastic gradient push", arXiv 1811.10792.
    """

    def _cycle(self, workers: int) -> list[Edges]:
        return [_circulant(workers, [hop]) for hop in _hops(workers)]


@dataclass(frozen=True)
class complete(Topology):
    """The complete graph: every worker sends equal shares to all others."""

    def _cycle(self, workers: int) -> list[Edges]:
        _require_memory(self, workers * (workers - 1))
        return [_circulant(workers, range(1, workers))]


@dataclass(frozen=True)
class random_regular(Topology):
    """A random connected graph with ``degree`` neighbours of every worker and equal shares."""

    degree: Count
    seed: Natural = 0

    def _cycle(self, workers: int) -> list[Edges]:
        return [_uniform(self._pairs(workers))]

    def _pairs(self, workers: int) -> list[tuple[int, int]]:
        """Draw the edges, both ways.

        Half-edges are paired at random, and impossible pairs are paired again (Steger and Wormald
        1999). A graph of many edges is the complement of a graph of few.
        """
        degree, subject = self.degree, f"topology = {self}: with {workers} workers"
        if degree >= workers:
            raise InputError(
                f"{subject} the degree can be at most {workers - 1}; give less, or more workers"
            )
        if degree * workers % 2:
            raise InputError(
                f"{subject} the edges would have {degree * workers} ends, an odd number; "
                "change one of them"
            )
        _require_memory(self, degree * workers)
        generator = np.random.default_rng(self.seed)
        inverted = degree > (workers - 1) / 2
        pairs_each = workers - 1 - degree if inverted else degree
        for _ in range(_DRAWS):
            pairs = _paired(pairs_each, workers, generator)
            if pairs is None:
                continue
            edges = {(i, j) for pair in pairs for i, j in (pair, pair[::-1])}
            if inverted:
                edges = {(i, j) for i in range(workers) for j in range(workers) if i != j} - edges
            sender, taker = np.array([*edges]).T
            try:
                _require_connected("", _graph(sender, taker, 1.0, workers), directed=False)
            except InputError:
                continue
            return sorted(edges)
        raise InputError(
            f"{subject} no connected graph was found in {_DRAWS} draws; give a degree of at least 3"
        )


@dataclass(frozen=True)
class base2(Topology):
    """The Base-2 graph: pairs that average any number of workers exactly within a cycle.

    The cycle has at most ``2 log2(workers) + 2`` matrices, all symmetric; one of ``log2(workers)``
    for a power of two.

    References
    ----------
    Takezawa, Sato, Bao, Niwa and Yamada 2023, arXiv 2305.11420, algorithms 1 to 3 with k = 1, and
    their program, in which idle workers repeat their last averages.
    """

    def _cycle(self, workers: int) -> list[Edges]:
        return [_edges(pairs) for pairs in _base2(workers)]


@dataclass(frozen=True)
class adjacency(Topology):
    """The topology of an adjacency matrix, or of a networkx graph.

    Parameters
    ----------
    matrix : array-like ``[workers, workers]``, or networkx graph
        ``matrix[i][j]`` is not zero if ``j`` sends to ``i``; the diagonal is ignored. Workers are
        the nodes of networkx in their order; the edges of a directed graph begin at the sender.
    weights : {"metropolis", "uniform", "given"}, optional
        - ``"metropolis"``, the default of undirected graphs:
          ``1 / (1 + larger degree of the two)``. Symmetric and doubly stochastic.
        - ``"uniform"``, the default of directed graphs: ``1 / (1 + receivers of the sender)``.
          Columns sum to one, rows need not: for push-sum.
        - ``"given"``: the entries are the shares, including the diagonal; or a list of such
          matrices, the cycle.
    label : str, optional
        Short name in tables, titles and file names, instead of the matrix.

    Raises
    ------
    InputError
        Unless the label can be a file's name; unless the matrix is square with finite entries of
        zero or above; for Metropolis' shares of a directed graph; for given shares whose columns do
        not sum to one; for a graph that is not (strongly) connected.
    """

    matrix: Annotated[Any, _numbers]
    weights: Literal["metropolis", "uniform", "given"] | None = None
    label: Annotated[str, require_name] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cycle = self._matrices
        present = cycle.any(axis=0) & ~np.eye(cycle.shape[1], dtype=bool)
        symmetric = bool((present == present.T).all())
        weights = self.weights or ("metropolis" if symmetric else "uniform")
        if weights != "given" and len(cycle) > 1:
            raise InputError(
                f"weights = {weights!r}: a cycle of matrices holds the shares; give weights='given'"
            )
        if weights == "metropolis" and not symmetric:
            raise InputError(
                "weights = 'metropolis': of a directed graph; give weights='uniform', whose "
                "columns sum to one"
            )
        if weights == "given":
            _require_shares(cycle)
        else:
            object.__setattr__(self, "matrix", _frozen(present.astype(np.int64).tolist()))
        object.__setattr__(self, "weights", weights)
        sender, taker = np.nonzero(present.T)
        graph = _graph(sender, taker, 1.0, len(present))
        _require_connected("matrix", graph, not symmetric)

    def __repr__(self) -> str:
        """Write the label, or the text, of a large matrix without its entries."""
        if self.label is None and len(self.matrix) > _TITLE_WORKERS:
            return f"{self.name}(<matrix of {len(self.matrix)}>, weights={self.weights})"
        return self.label or str(self)

    def edges(self, workers: int) -> list[Edges]:
        """Return the cycle of matrices, as edges."""
        cycle = self._matrices
        if cycle.shape[1] != workers:
            raise InputError(
                f"topology = {self!r}: a graph of {cycle.shape[1]} workers, and there are "
                f"{workers}; give as many"
            )
        return [self._edges(matrix * ~np.eye(workers, dtype=bool)) for matrix in cycle]

    def _edges(self, matrix: np.ndarray) -> Edges:
        sender, taker = np.nonzero(matrix.T)
        if self.weights == "given":
            return Edges(sender, taker, matrix[taker, sender])
        degree = np.bincount(sender, minlength=len(matrix))
        ends = degree[sender]
        if self.weights == "metropolis":
            ends = np.maximum(ends, degree[taker])
        return Edges(sender, taker, 1.0 / (1 + ends))

    @property
    def _matrices(self) -> np.ndarray:
        """The cycle of matrices, ``[cycle, workers, workers]``."""
        array = np.asarray(self.matrix, np.float64)
        return array[None] if array.ndim == 2 else array


@dataclass(frozen=True)
class slow_links(Topology):
    """A topology with some slower links, in both directions.

    Parameters
    ----------
    topology : Topology or text
        The graph, and the shares.
    links : list of [worker, worker, times]
        The two workers, and the factor of their latency and of the transfer time of their messages,
        relative to the other links.

    Raises
    ------
    InputError
        For another form; where a cluster is made, also for a link that does not exist.
    """

    topology: Annotated[Topology, lambda argument, value: as_topology(value)]
    links: Annotated[Any, _links]

    def __repr__(self) -> str:
        """Write the text, with the graph's text for titles."""
        return f"{self.name}({self.topology!r}, {write(self.links)})"

    def edges(self, workers: int) -> list[Edges]:
        """Return the graph's edges."""
        return self.topology.edges(workers)

    def slowness(self, workers: int) -> dict[tuple[int, int], float]:
        """Return the factors of the transfer times on slow links, by sender and receiver."""
        neighbours = self.neighbours(workers)
        for i, j, _ in self.links:
            if max(i, j) >= workers or (j not in neighbours[i] and i not in neighbours[j]):
                raise InputError(
                    f"topology = {self!r}: among {workers} workers there is no link between {i} "
                    f"and {j}; name an existing link"
                )
        slow = {pair: times for i, j, times in self.links for pair in ((i, j), (j, i))}
        return self.topology.slowness(workers) | slow


#: The topologies by their names on the command line.
TOPOLOGIES: Mapping[str, type[Topology]] = {
    topology.__name__: topology
    for topology in (
        *(ring, exponential, one_peer_exponential, complete),
        *(random_regular, base2, adjacency, slow_links),
    )
}


def as_topology(value: Any) -> Topology:
    """Convert a topology or its text, ``"ring()"``, to a topology; empty brackets may be omitted.

    Raises
    ------
    InputError
        For another value.
    """
    return from_text("topology", value, Topology, TOPOLOGIES, "asyncsim.topologies.ring()")


def is_symmetric(topology: Topology, workers: int) -> bool:
    """Return whether the shares are equal in both directions, in every matrix."""
    graphs = (_graph(*edges, workers) for edges in topology.edges(workers))
    return all(abs(graph - graph.T).max() <= _ROUND_OFF for graph in graphs)


def _edges(entries: list[tuple[int, int, float]]) -> Edges:
    sender, taker, share = zip(*entries, strict=True) if entries else ((), (), ())
    return Edges(np.array(sender, np.int64), np.array(taker, np.int64), np.array(share, np.float64))


def _uniform(pairs: list[tuple[int, int]]) -> Edges:
    """Create edges from (sender, taker) pairs with equal shares; repeated pairs count once."""
    table = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2)
    sender = table[:, 0]
    return Edges(sender, table[:, 1], 1.0 / (1 + np.bincount(sender)[sender]))


def _circulant(workers: int, hops: Iterable[int]) -> Edges:
    """Create the edges to the workers at these distances, with equal shares."""
    return _uniform([(j, (j + hop) % workers) for hop in hops for j in range(workers)])


def _hops(workers: int) -> list[int]:
    """Return the powers of two below the number of workers."""
    return [2**k for k in range((workers - 1).bit_length())]


def _require_memory(topology: Topology, edges: float) -> None:
    require_memory(f"topology = {topology!r}", f"its {edges:,.0f} edges", edges * _EDGE_BYTES)


def _frozen(rows: Any) -> Any:
    return tuple(map(_frozen, rows)) if isinstance(rows, list) else rows


def _require_shares(cycle: np.ndarray) -> None:
    """Check that the columns of given shares sum to one."""
    sums = cycle.sum(axis=1)
    if (wrong := np.argwhere(abs(sums - 1) > _ROUND_OFF)).size:
        index, worker = wrong[0]
        place = f"matrix {index}, " if len(cycle) > 1 else ""
        raise InputError(
            f"matrix: {place}column {worker} sums to {sums[index, worker]:g}; the shares that "
            "a worker sends and keeps must sum to one"
        )


def _graph(sender: np.ndarray, taker: np.ndarray, share: Any, workers: int) -> Any:
    """Return a sparse matrix of shares, ``[sender, taker]``."""
    from scipy.sparse import coo_array  # not at the top: most clusters have a server

    share = np.broadcast_to(share, len(sender))
    return coo_array((share, (sender, taker)), (workers, workers)).tocsr()


def _require_connected(argument: str, graph: Any, directed: bool) -> None:
    """Check that every worker reaches every other."""
    from scipy.sparse.csgraph import connected_components

    _, component = connected_components(graph, connection="strong")
    apart = component != component[0]
    if apart.any():
        raise InputError(
            f"{argument}: the graph is not {'strongly ' * directed}connected: worker "
            f"{np.argmax(apart)} and worker 0 do not reach each other; add edges, or leave workers "
            "out"
        )


def _paired(
    degree: int, workers: int, generator: np.random.Generator
) -> set[tuple[int, int]] | None:
    """Pair the workers, ``degree`` times each; None if the last ones do not fit."""
    pairs: set[tuple[int, int]] = set()
    ends = np.repeat(np.arange(workers), degree)
    while len(ends):
        ends = generator.permutation(ends)
        unpaired: list[int] = []
        for i, j in np.sort(ends.reshape(-1, 2), axis=1).tolist():
            if i == j or (i, j) in pairs:
                unpaired += [i, j]
            else:
                pairs.add((i, j))
        rest = sorted(set(unpaired))
        if unpaired and not any((i, j) not in pairs for i in rest for j in rest if i < j):
            return None
        ends = np.array(unpaired, np.int64)
    return pairs


def _hypercube(nodes: list[int]) -> list[list[tuple[int, int, float]]]:
    """Return the rounds in which a power of two of workers averages exactly; edges both ways."""
    rounds = [2**k for k in range(len(nodes).bit_length() - 1)]
    return [[(nodes[i], nodes[i ^ hop], 0.5) for i in range(len(nodes))] for hop in rounds]


def _simple_base2(nodes: list[int]) -> list[list[tuple[int, int, float]]]:
    """Return the rounds of the simple Base-2 graph (algorithm 2).

    The workers are split into groups by the binary digits of their number, largest first. Each
    group averages. Then in round ``m`` each worker of the later groups exchanges with one worker of
    group ``m``, with the share that makes the mean of group ``m`` equal to the mean of all; and
    each group averages again.
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
        at = m - longest  # the group with which the later groups exchange
        free = list(groups[at]) if 0 <= at < last else []
        for place, cube in enumerate(cubes):
            begin = min(place + 1, last)  # the last group only repeats its averages
            if cube and (m < longest or at >= begin):
                pairs += cube[(m if m < longest else at - begin) % len(cube)]
        if free:
            rest = sum(map(len, groups[at:]))
            for group in reversed(groups[at + 1 :]):
                for node in group:
                    partner, share = free.pop(), len(groups[at]) / rest
                    pairs += [(node, partner, share), (partner, node, share)]
            for first, second in zip(free[::2], free[1::2], strict=False):
                pairs += [(first, second, 0.5), (second, first, 0.5)]
        rounds.append(pairs)
    return rounds


def _base2(workers: int) -> list[list[tuple[int, int, float]]]:
    """Return the rounds of the Base-2 graph (algorithm 3): the shorter of two constructions.

    Either the simple graph of all workers, or simple graphs of groups of an odd size, then
    hypercubes across the groups.
    """
    simple = _simple_base2(list(range(workers)))
    groups = workers & -workers
    odd = workers // groups
    inside = [_simple_base2(list(range(odd * group, odd * (group + 1)))) for group in range(groups)]
    across = [_hypercube(list(range(place, workers, odd))) for place in range(odd)]
    if odd == 1 or len(simple) < len(inside[0]) + len(across[0]):
        return simple
    return [
        [pair for part in parts for pair in part]
        for rounds in (inside, across)
        for parts in zip(*rounds, strict=True)
    ]
