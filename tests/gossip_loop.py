"""Clusters without a server as a plain loop over the rows of a trace, with attacks and failures.

The loop keeps every message. At any row the central variable adds up each message by the share of
it that nobody has mixed yet, and the replicas that were never sent.
"""

import numpy as np
import pandas as pd

LABELS, FLIP = "label_flip(workers=[1, 4])", "sign_flip(workers=2, scale=0.5)"
ZERO, ALIE = "zero(workers=2)", "alie(workers=2, z=1.5)"
PRODUCT = "inner_product(workers=[3], scale=0.1)"


def unchanged(vector):
    return vector


#: Byzantine workers, the change of a message, and the message formed from the known honest ones.
ATTACKS = {
    None: ([], unchanged, None),
    FLIP: ([0, 1], lambda vector: -0.5 * vector, None),
    LABELS: ([1, 4], unchanged, None),
    ZERO: ([0, 1], lambda vector: 0 * vector, None),
    ALIE: ([0, 1], unchanged, lambda known: known.mean(0) - 1.5 * known.std(0)),
    PRODUCT: ([3], unchanged, lambda known: -0.1 * known.mean(0)),
}


class Loop:
    """A run on ``curvature * (x - target)**2 / 2``, with a target for each worker.

    ``central[rows]`` is the central variable after so many gradients, ``x`` are the replicas at the
    end, biased ones of push-sum with the weights ``w``, and ``points`` where each worker has
    computed its last gradient. A message is the replica, its weight and the tracked gradient.
    """

    def __init__(
        self, trace, method, curvature, start, rate, targets, attack=None, radius=None, momentum=0
    ):
        n = trace.workers
        self.trace, self.frame, self.kind = trace, trace.frame, method.name.replace("osgp", "sgp")
        self.curvature, self.rate, self.radius = curvature, rate, radius
        self.momentum = momentum  # of the local steps
        byzantine, self.change, self.form = ATTACKS[attack]
        self.honest = ~np.isin(np.arange(n), byzantine)
        self.targets = targets.astype(float)
        if attack == LABELS:
            self.targets[byzantine] = self.targets.max() - self.targets[byzantine]
        self.x = np.array(np.broadcast_to(start, (n, len(curvature))), float)
        self.start, self.points, self.w = self.x.copy(), self.x.copy(), np.ones(n)
        self.y, self.g, self.m, self.v = (0 * self.x for _ in range(4))
        # Of each worker the share of its initial replica or copy, and the row of its last message.
        self.living, self.copied, self.last = np.ones(n, bool), np.ones(n), np.full(n, -1)
        self.sent, self.left = {}, {}  # of each row
        self.central = [self.mean()]
        spells, lost = trace.spells, trace.in_flight[trace.in_flight["taker"] < 0]
        events = [(spell.begin, self.end, spell.worker) for spell in spells.itertuples()]
        returns = spells.dropna(subset=["end"]).itertuples()
        events += [(spell.end, self.begin, spell) for spell in returns]
        events += [(flight.arrive_time, self.lose, flight) for flight in lost.itertuples()]
        events.sort(key=lambda event: event[0])
        for row in self.frame[self.frame["outcome"] == "applied"].itertuples():
            # A message that is lost at the instant of its sending is lost after it.
            while (
                events
                and events[0][0] <= row.commit_time
                and getattr(events[0][2], "row", -1) < row.commit
            ):
                _, change, what = events.pop(0)
                change(what)
            (self.meeting if self.meets else self.mixing)(row)
            self.central.append(self.mean())

    @property
    def meets(self):
        return self.kind in ("adpsgd", "momentum_too")

    def descend(self, worker):
        """Return the sum of a worker's local steps from its point."""
        at = self.points[worker]
        for _ in range(self.trace.window):
            gradient = self.curvature * (at - self.targets[worker])
            self.v[worker] = self.momentum * self.v[worker] + gradient
            at = at - self.rate * self.v[worker]
        return at - self.points[worker]

    # Failures

    def lose(self, flight):
        self.left[flight.row] -= flight.weight

    def end(self, worker):
        self.living[worker], self.copied[worker] = False, 0
        if self.last[worker] >= 0:
            self.left[self.last[worker]] -= self.trace.kept_after[self.last[worker]]
        self.last[worker] = -1

    def begin(self, spell):
        """Copy the replica that the worker read when it came back."""
        worker = spell.worker
        reads = pd.concat([self.frame, self.trace.open_reads])
        own = reads[(reads["worker"] == worker) & (reads["read_arrive_time"] == spell.end)]
        version, replica = own["read_version"].iloc[0], self.start[worker]
        if version:
            source = self.frame["worker"][self.frame["outcome"] == "applied"].iloc[version - 1]
            assert self.living[source]
            replica = self.x[source] / self.w[source]
            if not self.honest[source] and not self.meets:  # as it was sent
                x, w, _ = self.sent[self.last[source]]
                replica = x / (w or 1)
        self.x[worker] = self.points[worker] = replica
        self.living[worker], self.copied[worker], self.w[worker] = True, 1, 1

    # Meetings

    def meeting(self, row):
        i, step = row.worker, self.descend(row.worker)
        has_momentum = self.kind == "momentum_too"
        for states in [self.x, self.m][: 1 + has_momentum] if row.partner >= 0 else ():
            assert self.living[row.partner]
            states[[i, row.partner]] = (states[i] + states[row.partner]) / 2
        if has_momentum:
            step = self.m[i] = 0.9 * self.m[i] + step
        self.x[i] = self.points[i] = self.x[i] + step

    # Messages

    def mixing(self, row):
        i = row.worker
        for source, share in zip(row.sources, row.weights, strict=True):
            self.left[source] -= share
        if self.last[i] >= 0:
            self.left[self.last[i]] -= row.kept
        mixed = self.mix(row, self.x, 0)
        weight = self.mix(row, self.w, 1) if self.kind == "sgp" else 1.0
        tracked = self.mix(row, self.y, 2) if self.kind == "tracking" else None
        beside = self.kind in ("dpsgd", "robust_gossip")
        self.points[i] = self.x[i] if beside else mixed / weight
        step, self.w[i] = self.descend(i), weight
        if self.kind == "tracking":
            gradient = -step / self.rate
            self.y[i], self.g[i] = tracked + gradient - self.g[i], gradient
            step = -self.rate * self.y[i]
        self.x[i] = mixed + step
        self.copied[i], self.last[i], self.left[row.commit] = 0, row.commit, 1.0
        sent = [self.x[i].copy(), self.w[i], self.y[i].copy()]
        if not self.honest[i]:
            of_sum = self.kind == "sgp"  # which alone sends its weight
            sent = [self.change(p) if k != 1 or of_sum else p for k, p in enumerate(sent)]
        self.sent[row.commit] = sent

    def mix(self, row, states, part):
        own = states[row.worker]
        messages, shares = self.received(row, own, part), np.array(row.weights)
        if self.kind == "robust_gossip":
            return np.median([own, *messages], 0)
        if self.kind == "clipped_gossip":
            return own + self.clipped([message - own for message in messages], shares)
        return row.kept * own + sum(
            share * message for share, message in zip(shares, messages, strict=True)
        )

    def clipped(self, apart, shares):
        distances = np.array([np.linalg.norm(step) for step in apart])
        radius = self.radius
        if radius is None and len(apart):
            farthest = np.argmax(distances)
            near = np.arange(len(apart)) != farthest
            radius = np.sqrt(np.sum((shares * distances**2)[near]) / shares[farthest])
        return sum(
            (share * min(1, radius / distance if distance else 1) * step)
            for step, share, distance in zip(apart, shares, distances, strict=True)
        )

    def received(self, row, own, part):
        """Return a part of each message; those of Byzantine senders as formed for the receiver."""
        senders = [self.frame["worker"][source] for source in row.sources]
        messages = [self.sent[source][part] for source in row.sources]
        pairs = list(zip(senders, messages, strict=True))
        known = {sender: message for sender, message in pairs if self.honest[sender]}
        if self.honest[row.worker]:
            known[row.worker] = own
        if self.form is None or not known:
            return messages
        formed = self.form(np.array(list(known.values())))
        return [message if self.honest[sender] else formed for sender, message in pairs]

    def mean(self):
        if self.meets:
            counted = self.living & self.honest
            return self.x[counted].mean(0) if counted.any() else self.central[-1]
        shares = [
            (share, *self.sent[row][:2])
            for row, share in self.left.items()
            if self.honest[self.frame["worker"][row]]
        ]
        replicas = zip(self.copied * self.honest, self.x, strict=True)
        shares += [(share, x, 1.0) for share, x in replicas if share]
        return sum(share * x for share, x, _ in shares) / sum(share * w for share, _, w in shares)
