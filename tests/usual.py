import numpy as np, simpy
from asyncsim.delays import delays
def usual(cluster, commits, seed=0):
    env = simpy.Environment()
    n = cluster.workers
    comp = delays(cluster.compute_laws, seed, "compute", cluster.window)
    serv = delays([cluster.service] * n, seed, "service")
    server = simpy.Resource(env)
    log = []
    done = env.event()
    def worker(i):
        while True:
            start = env.now
            yield env.timeout(comp(i))
            arrive = env.now
            with server.request() as request:
                yield request
                serve = env.now
                yield env.timeout(serv(i))
            log.append((i, start, arrive, serve, env.now))
            if len(log) == commits:
                done.succeed()
    for i in range(n): env.process(worker(i))
    env.run(until=done)
    return log[:commits]
