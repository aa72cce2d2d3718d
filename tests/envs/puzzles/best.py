"""Exact answers to small problems by plain Python: every subset, tables, and Bellman's recursions."""

import functools
import itertools


def best_packing(weights, values, capacity):
    """(value, items) of the best subset of all 2^n."""
    every = (c for k in range(len(weights) + 1) for c in itertools.combinations(range(len(weights)), k))
    return max((sum(values[i] for i in c), c) for c in every if sum(weights[i] for i in c) <= capacity)


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
