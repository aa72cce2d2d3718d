"""Exact answers to small problems by plain Python: every subset, tables, and Bellman's recursions."""

import functools
import itertools


def best_packing(weights, values, capacity):
    """(value, items) of the best subset of all 2^n."""
    every = (
        c for k in range(len(weights) + 1) for c in itertools.combinations(range(len(weights)), k)
    )
    return max(
        (sum(values[i] for i in c), c) for c in every if sum(weights[i] for i in c) <= capacity
    )


def packing_table(weights, values, capacity):
    """The best value by the table over capacities, for whole weights."""
    table = [0] * (capacity + 1)
    for weight, value in zip(weights, values, strict=True):
        for room in range(capacity, weight - 1, -1):
            table[room] = max(table[room], table[room - weight] + value)
    return table[capacity]


def best_tour(distance):
    """(length, cities) of the shortest tour from city 0 and back; Held and Karp, O(2^n n^2)."""
    n = len(distance)

    @functools.cache
    def to_end(visited, last):
        if visited == (1 << n) - 1:
            return distance[last][0], ()
        options = []
        for city in range(n):
            if not visited >> city & 1:
                length, path = to_end(visited | 1 << city, city)
                options.append((distance[last][city] + length, (city, *path)))
        return min(options)

    return to_end(1, 0)


def best_routes(distance, demand, capacity):
    """(length, stops) of the shortest set of routes from depot 0, customers 1 to n; a table over subsets.

    Every subset's best single route by trying all orders, then the best split into routes.
    """
    n = len(distance) - 1

    @functools.cache
    def route(members):
        return min(
            (sum(distance[a][b] for a, b in itertools.pairwise((0, *order, 0))), order)
            for order in itertools.permutations(members)
        )

    @functools.cache
    def split(left):
        if not left:
            return 0.0, ()
        first, *others = left
        options = []
        for size in range(len(others) + 1):
            for more in itertools.combinations(others, size):
                members = (first, *more)
                if sum(demand[i] for i in members) <= capacity:
                    length, order = route(members)
                    rest, stops = split(tuple(i for i in left if i not in members))
                    options.append((length + rest, (*order, 0, *stops)))
        return min(options)

    return split(tuple(range(1, n + 1)))


def best_schedule(machine, duration, most=10**9):
    """(makespan, jobs in order of dispatch) of the shortest schedule; branch and bound over active schedules.

    Giffler and Thompson: of all next operations take the one that can end first; on its machine one
    of those that can start before that end comes next. Bounded by what is left of every job and of
    every machine.
    """
    jobs, machines = len(machine), len(machine[0])
    best = [most, None]

    def search(done, job_free, machine_free, order):
        ready = [j for j in range(jobs) if done[j] < machines]
        if not ready:
            if max(job_free) < best[0]:
                best[:] = max(job_free), order
            return
        bound = max(job_free[j] + sum(duration[j][done[j] :]) for j in range(jobs))
        for m in range(machines):
            ops = [(j, k) for j in ready for k in range(done[j], machines) if machine[j][k] == m]
            if ops:
                heads = [
                    max(machine_free[m], job_free[j] + sum(duration[j][done[j] : k]))
                    for j, k in ops
                ]
                tails = [sum(duration[j][k + 1 :]) for j, k in ops]
                bound = max(bound, min(heads) + sum(duration[j][k] for j, k in ops) + min(tails))
        if bound >= best[0]:
            return
        start = {j: max(job_free[j], machine_free[machine[j][done[j]]]) for j in ready}
        first = min(ready, key=lambda j: start[j] + duration[j][done[j]])
        ends, m = start[first] + duration[first][done[first]], machine[first][done[first]]
        rivals = [j for j in ready if machine[j][done[j]] == m and start[j] < ends]
        for j in sorted(rivals, key=lambda j: (start[j], -sum(duration[j][done[j] :]))):
            end = start[j] + duration[j][done[j]]
            search(
                (*done[:j], done[j] + 1, *done[j + 1 :]),
                (*job_free[:j], end, *job_free[j + 1 :]),
                (*machine_free[:m], end, *machine_free[m + 1 :]),
                (*order, j),
            )

    search((0,) * jobs, (0,) * jobs, (0,) * machines, ())
    return tuple(best)


def longest_path(machine, duration, start):
    """The makespan from the order alone: the longest path through jobs and, as they are ordered, machines."""
    jobs, machines = len(machine), len(machine[0])
    on = {
        m: sorted(
            (start[j][k], j, k) for j in range(jobs) for k in range(machines) if machine[j][k] == m
        )
        for m in range(machines)
    }
    before = {(j, k): [(j, k - 1)] if k else [] for j in range(jobs) for k in range(machines)}
    for ops in on.values():
        for (_, j, k), (_, i, h) in itertools.pairwise(ops):
            before[i, h].append((j, k))

    @functools.cache
    def end(j, k):
        return duration[j][k] + max((end(*op) for op in before[j, k]), default=0)

    return max(end(j, machines - 1) for j in range(jobs))
