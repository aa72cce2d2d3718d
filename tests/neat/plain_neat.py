"""Slow twins in plain Python, one genome at a time: networks, distances, species, offspring; and random genomes."""

import math

import numpy as np

from jaxpar.neat.genome import Genomes


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def clip(z, limit):
    return max(-limit, min(limit, z))


ACTIVATIONS = {
    "sigmoid": lambda z: sigmoid(clip(5 * z, 60)),
    "steep_sigmoid": lambda z: sigmoid(clip(4.9 * z, 300)),
    "tanh": lambda z: math.tanh(clip(2.5 * z, 60)),
    "sin": lambda z: math.sin(clip(5 * z, 60)),
    "gauss": lambda z: math.exp(-5 * clip(z, 3.4) ** 2),
    "relu": lambda z: max(z, 0),
    "elu": lambda z: z if z > 0 else math.exp(z) - 1,
    "lelu": lambda z: z if z > 0 else 0.005 * z,
    "selu": lambda z: 1.0507009873554805 * (z if z > 0 else 1.6732632423543772 * (math.exp(z) - 1)),
    "softplus": lambda z: 0.2 * math.log(1 + math.exp(clip(5 * z, 60))),
    "identity": lambda z: z,
    "clamped": lambda z: clip(z, 1),
    "inv": lambda z: 1 / z if z else 0.0,
    "log": lambda z: math.log(max(z, 1e-7)),
    "exp": lambda z: math.exp(clip(z, 60)),
    "abs": abs,
    "hat": lambda z: max(0.0, 1 - abs(z)),
    "square": lambda z: z**2,
    "cube": lambda z: z**3,
}
AGGREGATIONS = {
    "sum": sum,
    "product": math.prod,
    "max": lambda x: max(x, default=0.0),
    "min": lambda x: min(x, default=0.0),
    "maxabs": lambda x: max(x, key=abs, default=0.0),
    "median": lambda x: float(np.median(x)) if x else 0.0,
    "mean": lambda x: sum(x) / len(x) if x else 0.0,
}


def random_genomes(rng, config, count, hidden=None, conns=None):
    """Genomes of any legal shape: slots with holes, some edges disabled, cycles only where they are allowed."""
    shape_n, shape_c = (count, config.max_nodes), (count, config.max_conns)
    g = {name: np.zeros(shape_n, np.float32) for name in ("bias", "response", "time_constant")}
    g |= {name: np.zeros(shape_n, np.int32) for name in ("node_id", "activation", "aggregation")}
    g |= {name: np.zeros(shape_c, np.int32) for name in ("innovation", "source", "target")}
    g |= {"node_on": np.zeros(shape_n, bool), "weight": np.zeros(shape_c, np.float32)}
    g |= {"enabled": np.zeros(shape_c, bool), "on": np.zeros(shape_c, bool)}
    ends, inputs = config.num_io, config.num_inputs
    for p in range(count):
        most = config.max_nodes - ends
        slots = rng.permutation(np.arange(ends, config.max_nodes))[
            : rng.integers(0, most + 1) if hidden is None else hidden
        ]
        live = np.concatenate([np.arange(ends), slots]).astype(int)
        g["node_on"][p, live] = True
        g["node_id"][p, live] = np.concatenate(
            [np.arange(ends), ends + rng.permutation(200)[: len(slots)]]
        )
        g["bias"][p, live], g["response"][p, live] = rng.normal(size=(2, len(live)))
        g["time_constant"][p, live] = rng.uniform(0.1, 2, len(live))
        g["activation"][p, live] = rng.integers(0, len(config.activations), len(live))
        g["aggregation"][p, live] = rng.integers(0, len(config.aggregations), len(live))
        order = {
            slot: place
            for place, slot in enumerate(
                [*range(inputs), *rng.permutation(slots), *range(inputs, ends)]
            )
        }
        pairs = [(s, t) for s in live for t in live if t >= inputs]
        if config.kind == "feedforward":
            pairs = [(s, t) for s, t in pairs if order[s] < order[t] and not inputs <= s < ends]
        most = min(len(pairs), config.max_conns)
        chosen = rng.permutation(len(pairs))[
            : rng.integers(0, most + 1) if conns is None else min(conns, most)
        ]
        rows = rng.permutation(config.max_conns)[: len(chosen)]
        for row, at in zip(rows, chosen, strict=True):
            g["source"][p, row], g["target"][p, row] = pairs[at]
        g["innovation"][p, rows] = rng.permutation(max(300, len(rows)))[: len(rows)]
        g["weight"][p, rows] = rng.normal(size=len(rows))
        g["enabled"][p, rows] = rng.random(len(rows)) < 0.8
        g["on"][p, rows] = True
    return Genomes(**g)


class Network:
    """A network as a dictionary of nodes, computed in float64, node by node."""

    def __init__(self, config, one):
        self.config, self.one = config, one
        self.into = {int(n): [] for n in np.flatnonzero(one.node_on) if n >= config.num_inputs}
        for c in np.flatnonzero(one.on & one.enabled):
            self.into[int(one.target[c])].append((int(one.source[c]), float(one.weight[c])))
        self.values = {int(n): 0.0 for n in np.flatnonzero(one.node_on)}

    def node(self, n, values):
        one, config = self.one, self.config
        terms = [values[s] * w for s, w in self.into[n]]
        total = AGGREGATIONS[config.aggregations[one.aggregation[n]]](terms)
        z = float(one.bias[n]) + float(one.response[n]) * total
        return ACTIVATIONS[config.activations[one.activation[n]]](z)

    def __call__(self, x):
        inputs = dict(enumerate(map(float, x)))
        config = self.config
        if config.kind == "feedforward":
            values = dict(inputs)

            def value(n):
                if n not in values:
                    for s, _ in self.into[n]:
                        value(s)
                    values[n] = self.node(n, values)
                return values[n]

            return [value(n) for n in range(config.num_inputs, config.num_io)]
        for _ in range(config.sub_steps):
            before = self.values | inputs
            after = {n: self.node(n, before) for n in self.into}
            if config.kind == "ctrnn":
                rate = {
                    n: -math.expm1(-config.time_step / float(self.one.time_constant[n]))
                    for n in self.into
                }
                after = {n: before[n] + rate[n] * (after[n] - before[n]) for n in self.into}
            self.values = before | after
        return [self.values[n] for n in range(config.num_inputs, config.num_io)]


def genes(one):
    """Weights by mark."""
    return {int(one.innovation[c]): float(one.weight[c]) for c in np.flatnonzero(one.on)}


def distance(config, rates, one, two):
    """Equation 1 of the paper, on dictionaries of genes."""
    a, b = genes(one), genes(two)
    common = set(a) & set(b)
    apart = set(a) ^ set(b)
    excess = {m for m in apart if m > (max(b, default=-1) if m in a else max(a, default=-1))}
    if config.mode == "fast":
        excess = set()
    most = max(len(a), len(b))
    divisor = 1 if most < rates.small else max(most, 1)
    unlike = rates.excess * len(excess) + rates.disjoint * (len(apart) - len(excess))
    return unlike / divisor + rates.difference * sum(abs(a[m] - b[m]) for m in common) / max(
        len(common), 1
    )


def speciate(config, rates, genomes, centres):
    """Genomes one by one; `centres` are (number, genome) of the living species, in any order. No bound on species."""
    known = dict(centres)
    old = set(known)
    found = []
    for p in range(len(genomes.on)):
        one = genomes.rows(p)
        near = {
            n: d
            for n, c in known.items()
            if (d := distance(config, rates, one, c)) < rates.threshold
        }
        if config.mode == "fast" and set(near) & old:
            near = {n: d for n, d in near.items() if n in old}
            chosen = min(near, key=lambda n: near[n])
        elif near:
            chosen = min(near)
        else:
            chosen = max(known, default=-1) + 1
            known[chosen] = one
        found.append(chosen)
    return found


def offspring_counts(population, sizes, means, may):
    """Children by slot: running sums of the shares, rounded."""
    means = [m if ok else 0.0 for m, ok in zip(means, may, strict=True)]
    running, counts, before = 0.0, [], 0
    for mean in means:
        running += mean / sum(means)
        counts.append(round(population * running) - before)
        before += counts[-1]
    return counts
