"""The methods' update rules as NumPy loops, each written from its paper and sharing no code with
the package.

A rule is a function ``rule(w, server, x, visit)`` that returns the new central variable: ``w`` is
what belongs to one worker, with ``w.read``, what it read last; ``visit`` has the trace's facts of a
commit and ``steps(start)``, the list of the window's local steps, ``-RATE * gradient`` each, from a
start. A rule that replies sets ``w.reply``. A rule has the name of its method, or a function of
that name makes it of the method's options.

Leaders differ only if replicas do: `diverse` rates are those of an optimizer that steps further for
later workers.
"""

import functools
import inspect
import types
from fractions import Fraction

import jax
import numpy as np

from asyncsim.base.streams import stream_key

RATE, MU = 0.05, 0.9
CURVATURE, START = np.linspace(0.1, 1.5, 16), np.linspace(-2, 1, 16)


def rule_of(name, **options):
    """Return the rule of a method with its options."""
    make = globals()[name]
    names = inspect.signature(make).parameters
    return (
        make
        if "visit" in names
        else make(**{name: options[name] for name in names if name in options})
    )


def run(rule, trace, rate=RATE):
    """Return the central variable after every commit of a trace, ``[commits + 1, parameters]``."""
    frame, n = trace.accepted.frame, trace.workers
    fresh = types.SimpleNamespace
    workers = [fresh(read=START, x=START, v=0 * START, steps=0) for _ in range(n)]
    server, path, versions = fresh(workers=workers), [START], {0: START}
    before = 0
    for row in frame.itertuples():
        w, x = workers[row.worker], path[-1]
        if not hasattr(w, "reply"):
            w.read = versions[row.read_version]

        def steps(start, count=row.local_steps):
            taken = []
            for _ in range(count):
                taken.append(-rate * CURVATURE * (start + sum(taken)))
            return taken

        visit = fresh(
            tau=row.staleness, n=n, worker=row.worker, completes=row.version > before, steps=steps
        )
        visit.key = functools.partial(key, row.worker, w.steps)
        w.steps += 1
        x = rule(w, server, x, visit)
        if hasattr(w, "reply"):
            w.read = w.reply
        path.append(x)
        if visit.completes:  # what is only buffered is read by nobody
            versions[row.version], before = x, row.version
    return np.array(path)


def key(*numbers, seed=0):
    """The key of a worker's draws at a visit: the generator is the run's, which is all that a
    formula does not say.
    """
    drawn = jax.random.wrap_key_data(stream_key(seed, "method").view(np.uint32)[:2])
    for number in numbers:
        drawn = jax.random.fold_in(drawn, number)
    return drawn


def gradient(at):
    return CURVATURE * at


def collecting(value, complete):
    """A rule that collects a value of each message, and moves the central variable once a version
    completes: ``complete(server, x, values)``.
    """

    def rule(w, server, x, visit):
        server.buffer = [*getattr(server, "buffer", []), value(w, visit)]
        if visit.completes:
            x, server.buffer = complete(server, x, server.buffer), []
        return x

    return rule


# Parameter server


def downpour(w, server, x, visit):
    return x + sum(visit.steps(w.read))


hogwild = ringmaster = downpour


def dynsgd(w, server, x, visit):
    return x + sum(visit.steps(w.read)) / (visit.tau + 1)


adaptive_staleness = dynsgd


def agn(w, server, x, visit):
    a = visit.steps(w.read)
    return x + sum(a) / len(a)


def adag(form, gamma, averaged):
    def rule(w, server, x, visit):
        residual = sum(visit.steps(w.read)) / (len(visit.steps(w.read)) if averaged else 1)
        over = {"scaled": gamma, "original": RATE, "squared": gamma**2}[form]
        return x + residual / (1 + (x - w.read) ** 2 / over)

    return rule


def qsgd(levels, bucket):
    def rule(w, server, x, visit):
        update, size = sum(visit.steps(w.read)), bucket or len(x)
        shape = -(-len(update) // size), size
        sent, drawn = 0 * update, np.ravel(jax.random.uniform(visit.key(), shape, float))
        for begin in range(0, len(update), size):
            part = slice(begin, begin + size)
            norm = np.sqrt(np.sum(update[part] ** 2))
            for i in range(len(update))[part]:
                a = levels * abs(update[i]) / norm
                level = int(a) + (1 if drawn[i] < a - int(a) else 0)
                sent[i] = norm * np.sign(update[i]) * level / levels
        return x + sent

    return rule


def mem_sgd(fraction, memory):
    def rule(w, server, x, visit):
        whole = getattr(w, "kept", 0) + sum(visit.steps(w.read))
        sent = np.zeros_like(whole)
        for i in sorted(range(len(whole)), key=lambda i: -abs(whole[i]))[: int(fraction * len(x))]:
            sent[i] = whole[i]
        w.kept = whole - sent if memory else 0
        return x + sent

    return rule


def factor(law, strength, tau):
    """The laws of damping by staleness."""
    return {
        "constant": 1,
        "inverse": 1 / (1 + tau),
        "exponential": np.exp(-strength * tau),
        "polynomial": (1 + tau) ** -strength,
    }[law]


def damping(law, strength):
    def rule(w, server, x, visit):
        server.seen = [*getattr(server, "seen", []), visit.tau]
        if law == "rank":
            share = np.mean(np.array(server.seen) <= visit.tau)
            scale = 1 + strength * (1 - 2 * share)
        else:
            scale = factor(law, strength, visit.tau)
        return x + scale * sum(visit.steps(w.read))

    return rule


def delay_adaptive(rule, smoothness):
    def scaled(w, server, x, visit):
        tau, n = visit.tau, visit.n
        scale = {
            "mishchenko": n / max(n, tau),
            "koloskova": 1 if tau <= n else min(RATE, 1 / (4 * smoothness * tau)) / RATE,
            "drop": float(tau <= n),
        }[rule]
        return x + scale * sum(visit.steps(w.read))

    return scaled


def softsync(modulated):
    return collecting(
        lambda w, visit: gradient(w.read) / ((modulated and visit.tau) or 1),
        lambda server, x, rows: x - RATE * np.mean(rows, 0),
    )


def rennala():
    return softsync(False)


batch_sgd = rennala


def robust():
    return collecting(
        lambda w, visit: gradient(w.read), lambda server, x, rows: x - RATE * np.median(rows, 0)
    )


# Elastic averaging


def sgd(w, server, x, visit):
    w.v = MU * w.v + sum(visit.steps(w.read))
    return x + w.v


def gem(variant):
    """Each update scaled so that the workers' common energy is the proxy's."""

    def rule(w, server, x, visit):
        (u,) = visit.steps(w.read)
        size = np.abs(u) + 1e-16 if variant == "paper" else np.abs(u + 1e-12)  # never zero
        w.v = MU * w.v + u
        d, w.pulled = x - getattr(w, "pulled", START), x
        return x + np.clip((np.abs(w.v) - np.abs(d)) / size, 0, 5) * u

    return rule


def aeasgd(alpha, beta, order):
    """dist-keras: pull, E = alpha (W - center), W -= E, commit E, then train on the batch at the
    moved W. The paper: x remembered, the exchange, then the gradient at the remembered x onto the
    moved replica.
    """

    def rule(w, server, x, visit):
        if order == "moved":
            w.x = w.x + sum(visit.steps(w.x))
        else:
            # The gradient of the iteration before was computed while others visited.
            w.x = w.x - RATE * gradient(getattr(w, "remembered", START))
            w.remembered = w.x
        elastic = (alpha or beta / visit.n) * (w.x - x)
        w.x = w.x - elastic
        return x + elastic

    return rule


def eamsgd(beta):
    def rule(w, server, x, visit):
        for _ in visit.steps(w.x):
            w.v = MU * w.v - RATE * gradient(w.x + MU * w.v)
            w.x = w.x + w.v
        elastic = beta / visit.n * (w.x - x)
        w.x = w.x - elastic
        return x + elastic

    return rule


def easgd(beta):
    """A round of all workers, both lines with the old values."""

    def meet(server, x, pairs):
        old = [w.x for w, _ in pairs]
        for w, visit in pairs:
            w.x = w.x + sum(visit.steps(w.x)) - beta / visit.n * (w.x - x)
        return (1 - beta) * x + beta * np.mean(old, 0)

    return collecting(lambda *pair: pair, meet)


# Compensation and gap


def dc_asgd(compensation, adaptive):
    def rule(w, server, x, visit):
        g, strength = gradient(w.read), compensation
        if adaptive:
            server.square = 0.95 * getattr(server, "square", 0) + 0.05 * g * g
            strength = compensation / np.sqrt(server.square + 1e-7)
        return x - RATE * (g + strength * g * g * (x - w.read))

    return rule


def gap_aware(w, server, x, visit):
    past, rate = getattr(server, "past", []), diverse(visit)
    server.largest = max(rate, getattr(server, "largest", 0))
    g = gradient(w.read)
    if past:
        ages = np.arange(len(past))[::-1, None]
        mean = np.sum(0.001 * 0.999**ages * np.square(past), 0) / (1 - 0.999 ** len(past))
        g = g / (1 + np.abs(x - w.read) / (server.largest * (np.sqrt(mean) + 1e-8)))
    v = MU * (past[-1] if past else 0) + g
    server.past = [*past, v]
    return x - rate * v


def dana_zero(w, server, x, visit):
    w.v = MU * w.v + gradient(w.read)
    x = x - RATE * w.v
    w.reply = x - RATE * MU * sum(worker.v for worker in server.workers)
    return x


def dana_slim(w, server, x, visit):
    g = gradient(w.read)
    w.v = MU * w.v + g
    return x - RATE * (MU * w.v + g)


def weight_prediction(w, server, x, visit):
    server.v = MU * getattr(server, "v", 0) - RATE * gradient(w.read)
    x = x + server.v
    w.reply = x + visit.tau * server.v
    return x


def async_nesterov(look_ahead):
    def rule(w, server, x, visit):
        displaced = MU * (x - getattr(server, "before", x))
        server.before, x = x, x + displaced - RATE * (1 - MU) * gradient(w.read)
        if look_ahead:
            w.reply = x + MU * (x - server.before)
        return x

    return rule


# Federated, and of the scale of language models


def end_of(w, visit):
    return w.read + sum(visit.steps(w.read))


averaging = collecting(end_of, lambda server, x, ends: np.mean(ends, 0))


def fedasync(mixing, law, strength, rho):
    def rule(w, server, x, visit):
        weight = mixing * factor(law, strength, visit.tau)
        end = w.read
        for _ in visit.steps(w.read):
            end = end - RATE * (gradient(end) + rho * (end - w.read))
        return (1 - weight) * x + weight * end

    return rule


def outer_step(server, delta, rate, momentum, outer="nesterov"):
    """Nesterov's step as in exogym, or heavy ball as in gensyn's program."""
    server.m = momentum * getattr(server, "m", 0) + delta
    return rate * (delta + momentum * server.m if outer == "nesterov" else server.m)


def fedbuff(server_rate, server_momentum, law, strength):
    def step(server, x, deltas):
        return x - outer_step(server, np.mean(deltas, 0), server_rate, server_momentum)

    return collecting(
        lambda w, visit: factor(law, strength, visit.tau) * (w.read - end_of(w, visit)), step
    )


def diloco(server_rate, server_momentum, outer):
    """A round of all workers."""

    def step(server, x, ends):
        return x - outer_step(server, x - np.mean(ends, 0), server_rate, server_momentum, outer)

    return collecting(end_of, step)


def async_local_sgd(server_rate, server_momentum, law, strength):
    def rule(w, server, x, visit):
        g = -factor(law, strength, visit.tau) * sum(visit.steps(w.read))
        return x - outer_step(server, g, server_rate, server_momentum)

    return rule


def delayed_nesterov(server_rate, server_momentum, period, spread, law, strength):
    mu, c = server_momentum, spread

    def rule(w, server, x, visit):
        count = period or visit.n
        g = -factor(law, strength, visit.tau) * sum(visit.steps(w.read))
        server.buffer = [*getattr(server, "buffer", []), g]
        m = getattr(server, "m", 0)
        if len(server.buffer) % count:
            return x - server_rate * (c * mu * m + g / count)
        server.m = mu * m + sum(server.buffer) / count
        server.buffer = []
        return x - server_rate * ((1 - c * count + c) * mu * server.m + g / count)

    return rule


def streaming_diloco(fragments, overlap, blend, server_rate, server_momentum, eager):
    """Runs of parameters as fragments, as the papers print it: a table of the workers' progress in
    each round.
    """
    rate, mu, parts = server_rate, server_momentum, np.array_split(np.arange(16), fragments)

    def rule(w, server, x, visit):
        if not hasattr(server, "round"):
            server.round, server.table, server.m = 0, {}, [0 * START[part] for part in parts]
            for worker in server.workers:
                worker.outer, worker.momentum, worker.sent = START.copy(), 0 * START, {}
        k, part = server.round, parts[server.round % fragments]
        w.x = w.x + sum(visit.steps(w.x))
        progress = w.x[part] - (w.outer if eager else x)[part]
        server.table.setdefault(k, []).append(progress)
        if eager:
            # The mean of the round before, with this worker's share replaced by its new one.
            late = server.table.get(k - fragments, [0 * progress] * visit.n)
            own = w.sent.get(k - fragments, 0 * progress)
            mixed = sum(late) / visit.n - own / visit.n + progress / visit.n
            w.sent[k] = progress
            w.momentum[part] = mu * w.momentum[part] + mixed
            w.outer[part] = w.outer[part] + rate * (mu * w.momentum[part] + mixed)
            w.x[part] = w.outer[part]
        if not visit.completes:
            return x
        due, server.round = k - overlap, k + 1
        if due >= 0:
            part, x = parts[due % fragments], x.copy()
            mean = sum(server.table[due]) / visit.n
            m = server.m[due % fragments] = mu * server.m[due % fragments] + mean
            x[part] = x[part] + rate * (mu * m + mean)
            for worker in server.workers if not eager else []:
                worker.x[part] = blend * worker.x[part] + (1 - blend) * x[part]
        return x

    return rule


def decoupled_diloco(fragments, overlap, blend, server_rate, server_momentum, tensors, average):
    """Learners that never wait, by the paper's weights: tokens^2 / steps, eight tokens a step."""
    mu, parts = server_momentum, np.array_split(np.arange(16), fragments)
    groups = [[part] for part in parts]
    if tensors:
        pieces = np.split(np.arange(16), np.cumsum(tensors)[:-1])
        groups = [pieces[f::fragments] for f in range(fragments)]
        parts = [np.concatenate(group) for group in groups]

    def merge(rows, weights):
        mean = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
        if average == "mean":
            return mean
        lengths = [np.sqrt(np.sum(row**2)) for row in rows]
        length = sum(w * of for w, of in zip(weights, lengths, strict=True)) / sum(weights)
        u = sum(w * row / of for w, row, of in zip(weights, rows, lengths, strict=True))
        return length * u / np.sqrt(np.sum(u**2)) if u.any() else mean

    def rule(w, server, x, visit):
        if not hasattr(server, "version"):
            server.version, server.box, server.due = 0, {}, {}
            server.m = 0 * START
            for worker in server.workers:
                worker.x, worker.seen, worker.count = START.copy(), START, [0] * fragments
        for f, part in enumerate(parts):
            if (w.read[part] != w.seen[part]).any():
                w.x[part] = blend * w.x[part] + (1 - blend) * w.read[part]
                w.count[f] = 0
        steps = visit.steps(w.x)
        w.seen, w.x = w.read, w.x + sum(steps)
        w.count = [c + len(steps) for c in w.count]
        server.box[visit.worker] = w.x.copy(), list(w.count)
        if not visit.completes:
            return x
        k, f = server.version, server.version % fragments
        merged = 0 * START
        for piece in groups[f]:
            rows = [row[piece] - x[piece] for row, _ in server.box.values()]
            weights = [(8 * c[f]) ** 2 / c[f] for _, c in server.box.values()]
            merged[piece] = merge(rows, weights)
        server.due[k] = merged
        server.version, server.box = k + 1, {}
        if k >= overlap:
            part, x, d = parts[(k - overlap) % fragments], x.copy(), server.due[k - overlap]
            server.m[part] = mu * server.m[part] + d[part]
            x[part] = x[part] + server_rate * (mu * server.m[part] + d[part])
        return x

    return rule


def mindflayer(success, rule):
    """One trial of each worker a round."""
    p = np.broadcast_to(success, 7)

    def apply(server, x, rows):
        steps = [step for row in rows for step in row]
        if rule == "mean":
            return x + np.mean(steps, 0) / (1 - np.prod(1 - p))
        return x + sum(steps) / sum(p)

    return collecting(lambda w, visit: visit.steps(w.read), apply)


# Leaders


def diverse(visit):
    return (1 + visit.worker / 4) / 16  # exact in either precision


def walk(visit, start, window):
    """The end of a window's steps of a diverse rate from a start, and the mean loss of the points
    on the way.
    """
    x, losses = start, []
    for _ in range(window):
        losses.append(np.sum(CURVATURE * x**2) / 2)
        x = x - diverse(visit) * gradient(x)
    return x, np.mean(losses)


def lsgd(window, pull, groups, global_pull, global_every, step_pull):
    """The poster's loop, a worker's own visits being the triggers; the authors' pulls at every
    step.
    """

    def rule(w, server, x, visit):
        everyone, n = server.workers, visit.n
        mine = visit.worker * groups // n
        group = [worker for j, worker in enumerate(everyone) if j * groups // n == mine]
        x, w.loss = walk(visit, w.read, window)
        if step_pull:
            last = getattr(w, "leader", START), getattr(w, "overall", START)
            if groups > 1:
                x = (1 - step_pull / global_every) * x + step_pull / global_every * last[1]
            x = (1 - step_pull) * x + step_pull * last[0]
        w.x, w.visits = x, getattr(w, "visits", 0) + 1
        w.leader, overall = (
            min(some, key=lambda worker: getattr(worker, "loss", np.inf)).x
            for some in (group, everyone)
        )
        x = x - pull * (x - w.leader)
        if groups > 1 and w.visits % global_every == 0:
            w.overall = overall
            x = x - global_pull * (x - w.overall)
        w.reply = x
        return np.mean([worker.x for worker in everyone], 0)

    return rule


def lgd(window, pull):
    """A round of all workers: the leader is the best of the old replicas."""

    def follow(server, x, pairs):
        walks = [walk(visit, w.x, window) for w, visit in pairs]
        leader = pairs[int(np.argmin([loss for _, loss in walks]))][0].x
        for (w, _), (end, _) in zip(pairs, walks, strict=True):
            w.x = end - pull * (w.x - leader)
        return leader

    return collecting(lambda *pair: pair, follow)


# Entropy-SGD, and Parle in rounds


def entropy_sgd(window, gamma, scoping, noise, decay, momentum, outer_rate, gamma_least, rho=None):
    """A worker's inner loop with Langevin noise around its replica, which is then pulled."""

    def scoped(first, least, w):
        return max(first * (1 - scoping) ** (w.steps - 1), min(least, first))

    def replica(w, visit):
        rate, y, z = diverse(visit), w.x, w.x
        for k in range(window):
            d = gradient(y) + (y - w.x) / scoped(gamma, gamma_least, w)
            w.v = momentum * w.v + d
            drawn = jax.random.normal(visit.key(2**32 - 1, k, 0), START.shape, float)
            langevin = noise * np.sqrt(2 * rate) * np.asarray(drawn)
            y = y - rate * (d + momentum * w.v) + langevin
            z = decay * z + (1 - decay) * y
        pull = (w.x - w.read) / scoped(*rho, w) if rho else 0
        w.x = w.x - outer_rate * (w.x - z) - outer_rate * pull
        return w.x

    return collecting(replica, lambda server, x, replicas: np.mean(replicas, 0))


def parle(window, gamma, scoping, noise, decay, momentum, outer_rate, gamma_least, rho, rho_least):
    pulled = (rho, rho_least) if rho else None
    return entropy_sgd(
        window, gamma, scoping, noise, decay, momentum, outer_rate, gamma_least, pulled
    )


# Ringleader, with its tables in full


def ringleader(restart):
    def rule(w, server, x, visit):
        n, j = visit.n, visit.worker
        if not hasattr(server, "table"):
            server.table, server.following = [[[] for _ in range(n)] for _ in range(2)]
            server.due = None  # phase 1
        g = gradient(w.read)
        moves = False
        if server.due is None:
            server.table[j].append(g)
            if all(server.table):
                moves, server.due = True, set(range(n))
        elif j in server.due:
            server.table[j].append(g)
            moves = True
        else:
            server.following[j].append(g)
        if moves:
            x = x - RATE / n * sum(sum(rows) / len(rows) for rows in server.table)
            server.due.discard(j)
            w.x = x
            if not server.due:
                server.table, server.following = server.following, [[] for _ in range(n)]
                server.due = None
        if restart == "step":
            w.reply = w.x
        return x

    return rule


def malenia(count):
    """Gradients at any other point than the newest are discarded."""

    def rule(w, server, x, visit):
        table = vars(server).setdefault("table", [[] for _ in range(visit.n)])
        if np.array_equal(w.read, x):
            table[visit.worker].append(gradient(w.read))
        if all(table) and visit.n / sum(Fraction(1, len(rows)) for rows in table) >= Fraction(
            count, visit.n
        ):
            x = x - RATE / visit.n * sum(sum(rows) / len(rows) for rows in table)
            del server.table
        return x

    return rule


def ia2sgd(w, server, x, visit):
    table = vars(server).setdefault("table", {})
    is_full = len(table) == visit.n
    table[visit.worker] = gradient(w.read)
    return x - RATE * np.mean(list(table.values()), 0) if is_full else x


def rescaled_asgd(w, server, x, visit):
    w.visits = getattr(w, "visits", 0) + 1
    frequency = w.visits / sum(getattr(worker, "visits", 0) for worker in server.workers)
    return x - RATE / (visit.n * frequency) * gradient(w.read)


# Optimizers at the server


def server_optimizer(step, adaptive=True):
    def rule(w, server, x, visit):
        scale = min(1, visit.n / visit.tau) if adaptive and visit.tau else 1
        return x - scale * step(server, gradient(w.read), x)

    return rule


def adamw(rate, b1, b2, epsilon, decay):
    def step(server, g, x):
        past = vars(server).setdefault("past", [])
        past.append(g)
        ages = np.arange(len(past))[::-1, None]
        m = np.sum((1 - b1) * b1**ages * past, 0) / (1 - b1 ** len(past))
        v = np.sum((1 - b2) * b2**ages * np.square(past), 0) / (1 - b2 ** len(past))
        return rate * (m / (np.sqrt(v) + epsilon) + decay * x)

    return step


def lion(rate, b1, b2, decay):
    def step(server, g, x):
        m = getattr(server, "m", 0)
        server.m = b2 * m + (1 - b2) * g
        return rate * (np.sign(b1 * m + (1 - b1) * g) + decay * x)

    return step


#: Of the Newton-Schulz steps of Ringmaster LMO and of Muon.
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
JORDAN = [(3.4445, -4.7750, 2.0315)] * 5


def newton_schulz(matrix, coefficients, epsilon):
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (np.sqrt(np.sum(matrix**2)) + epsilon)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def by_tensors(shapes, step, x):
    """Apply a step to each tensor of a vector, and concatenate the results."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(x, ends[:-1])
    return np.concatenate(
        [np.ravel(step(part.reshape(shape))) for part, shape in zip(parts, shapes, strict=True)]
    )


def ringmaster_lmo(shapes, beta=0.95):
    def oracle(u):
        if u.ndim < 2:
            return u
        rows, columns = u.shape
        return newton_schulz(u, POLAR_EXPRESS, 1e-7) * np.sqrt(max(1, rows / columns))

    def rule(w, server, x, visit):
        g = gradient(w.read)
        server.m = beta * getattr(server, "m", 0) + (1 - beta) * g
        u = beta * server.m + (1 - beta) * g
        return x - RATE * by_tensors(shapes, oracle, u)

    return rule


def muon(rate, shapes, beta=0.95):
    """Muon as in optax, of matrices ``[inputs, outputs]``; its means start at zero and are
    corrected for it.
    """

    def oracle(u):
        inputs, outputs = u.shape
        return newton_schulz(u, JORDAN, 1e-8) * np.sqrt(max(1, outputs / inputs))

    def step(server, g, x):
        server.t = getattr(server, "t", 0) + 1
        server.m = beta * getattr(server, "m", 0) + (1 - beta) * g
        u = beta * server.m / (1 - beta ** (server.t + 1)) + (1 - beta) * g / (1 - beta**server.t)
        return rate * by_tensors(shapes, oracle, u)

    return step


# Workers of whom some may send anything


def kardam(window, f, law, strength):
    """What changes too fast for the quantile is dropped, and what would be one worker's too often;
    no two alike.
    """

    def rule(w, server, x, visit):
        n, j = visit.n, visit.worker
        log, k = vars(server).setdefault("log", []), vars(server).setdefault("k", {})
        u = walk(visit, w.read, window)[0] - w.read
        passes = True
        if hasattr(w, "last"):
            moved = np.sqrt(np.sum((w.read - w.last[1]) ** 2))
            changed = np.sqrt(np.sum((u - w.last[0]) ** 2))
            k[j] = changed / moved if moved else np.inf if changed else 0.0
            known = sorted(k.values())
            passes = f == 0 or k[j] <= known[int(np.ceil(round(len(known) * (n - f) / n, 9))) - 1]
        if f:
            passes = passes and log[-2 * f :].count(j) + 1 <= f
        tau = len(log) - getattr(w, "seen", 0)
        if passes:
            x = x + factor(law, strength, tau) * u
            log.append(j)
        w.last, w.seen = (u, w.read), len(log)
        return x

    return rule


def basgd(count, rule):
    aggregate = {"median()": np.median, "mean()": np.mean}[rule]

    def fill(w, server, x, visit):
        buckets = vars(server).setdefault("buckets", [[] for _ in range(count)])
        buckets[visit.worker % count].append(gradient(w.read))
        if all(buckets):
            assert visit.completes
            x = x - RATE * aggregate([np.mean(bucket, 0) for bucket in buckets], axis=0)
            server.buckets = [[] for _ in range(count)]
        return x

    return fill


def zeno_pp(trusted, rho, epsilon):
    def rule(w, server, x, visit):
        g = gradient(w.read)
        if visit.worker == (visit.n - 1 if trusted is None else trusted):
            server.v = g
        elif hasattr(server, "v"):
            u = g * np.sqrt(np.sum(server.v**2) / np.sum(g**2))
            if RATE * server.v @ u - rho * u @ u + RATE * epsilon >= 0:
                x = x - RATE * u
        return x

    return rule


# Closed forms of single mechanisms


def crash_rate(law, every, lasts):
    """Computations per second of a worker that a crash restarts: attempts succeed with probability
    ``L = E[exp(-X / every)]`` and take ``every (1 - L)`` on average.
    """
    points = (np.arange(200_000) + 0.5) / 200_000
    success = np.mean(law.cdf(-np.log(points) * every))
    return every / (every + lasts) * success / (every * (1 - success))


def elastic_round_robin(n, step, alpha):
    """The map of a round of elastic exchanges in turn, each followed by a step; the last row is the
    central variable.
    """
    round_map = np.eye(n + 1)
    for worker in range(n):
        visit = np.eye(n + 1)
        visit[worker, [worker, n]] = 1 - step - alpha, alpha
        visit[n, [worker, n]] = alpha, 1 - alpha
        round_map = visit @ round_map
    return round_map


def elastic_synchronous(n, step, alpha):
    """The map of a round in which all exchange at once, then step."""
    round_map = (1 - step - alpha) * np.eye(n + 1)
    round_map[:n, n] = round_map[n, :n] = alpha
    round_map[n, n] = 1 - n * alpha
    return round_map
