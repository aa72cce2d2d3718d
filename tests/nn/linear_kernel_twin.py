"""The sequential twin of linear attention's kernels: what each program reads, computes and writes, in NumPy, float64.

It has their tiling, masks, arguments and the order of their chunks; sums of decays are added up
pair by pair.
"""

import jax
import numpy as np

calls: list = []
"""The names of the kernels that were run."""


def stand_in(*arrays, out, grid, text, name, num_warps, num_stages, **sizes):
    """Has the signature of `jaxpar.lower.triton.call_kernel`; what no program writes is NaN."""
    assert f"def {name}(" in text and num_warps in (4, 8) and num_stages >= 1

    def run(*arrays):
        calls.append(name)
        given = [
            np.asarray(x) if x.dtype.kind in "ib" else np.float64(x)
            for x in map(np.asarray, arrays)
        ]
        outs = [np.full(each.shape, np.nan) for each in out]
        for number in range(grid[0]):
            PROGRAMS[name](Program(number, sizes), *given, *outs)
        return tuple(y.astype(each.dtype) for y, each in zip(outs, out, strict=True))

    return list(jax.pure_callback(run, tuple(out), *arrays, vmap_method="sequential"))


class Program:
    """A program's number, and what all programs compute of decays and documents."""

    def __init__(self, number: int, sizes: dict):
        """Sizes are the kernels' constants."""
        self.number = number
        self.__dict__.update(sizes)

    def at(self, batch: int, head: int, n: int) -> None:
        """Goes to a chunk."""
        self.batch, self.head, self.n = batch, head, n
        self.begin, self.end = n * self.CHUNK, min((n + 1) * self.CHUNK, self.LENGTH)
        self.group = head // (self.HEADS // self.GROUPS)
        self.size = self.end - self.begin

    def rows(self, x, head=None):
        """The chunk's tokens of an array [B, T, H, ...]."""
        return x[self.batch, self.begin : self.end, self.head if head is None else head]

    def log_decay(self, g, deep):
        """[C, DEEP] of the chunk, whatever kind of decay it is."""
        if self.KIND == 0:
            return np.zeros((self.size, self.DEEP))
        return (
            self.rows(g)[:, deep]
            if self.KIND == 2
            else np.repeat(self.rows(g)[:, None], self.DEEP, 1)
        )

    def sums(self, g, deep):
        """Of neighbours: to each token, from behind each on, of all, and [i, j] from behind j to i."""
        g, steps = self.log_decay(g, deep), range(self.size)
        late = 0 if self.EXCLUSIVE else 1
        before = np.stack([g[: i + late].sum(0) for i in steps])
        after = np.stack([g[i + 1 :].sum(0) for i in steps])
        pairs = np.stack([[g[j + 1 : i + late].sum(0) for j in steps] for i in steps])
        return before, after, g.sum(0), pairs

    def documents(self, number):
        """Which tokens are of the document before the chunk, of that behind it, of each other's; whether it is one."""
        if not self.DOCUMENTS:
            all_of = np.ones(self.size, bool)
            return all_of, all_of, np.ones((self.size, self.size), bool), True
        own, enters, leaves = (
            number[self.batch, i]
            for i in (np.arange(self.begin, self.end) + 1, self.begin, self.end)
        )
        return own == enters, own == leaves, own[:, None] == own[None], enters == leaves

    def weights(self, g, bonus, number, deep):
        """[i, j, k]: what row k's product of token j is worth at token i."""
        _, _, _, pairs = self.sums(g, deep)
        lower = np.tril(np.ones((self.size, self.size)), -1 if self.EXCLUSIVE else 0)[..., None]
        weights = np.exp(pairs) * lower * self.documents(number)[2][..., None]
        if self.EXCLUSIVE:
            weights += np.eye(self.size)[..., None] * bonus[self.head, deep]
        return weights


def write(y, place, value):
    """Writes where nobody has written."""
    assert np.isnan(y[place]).all()
    y[place] = value


def tiles_of(size: int, step: int):
    """Slices of so many columns; the kernels know no tile that is not full."""
    assert size % step == 0 and step >= 16
    return [slice(first, first + step) for first in range(0, size, step)]


def carry(p, x, y, ones, g, number, first, first_line, states, lines, last, last_line):
    """One tile of a head's state, over all chunks in turn."""
    deeps, wides = tiles_of(p.DEPTH, p.DEEP), tiles_of(p.WIDTH, p.WIDE)
    deep, wide = deeps[p.number % len(deeps)], wides[p.number // len(deeps) % len(wides)]
    batch, head = divmod(p.number // (len(deeps) * len(wides)), p.HEADS)
    state, line = first[batch, head, deep, wide], first_line[batch, head, deep] if p.NORM else None
    for n in range(p.CHUNKS)[:: -1 if p.REVERSE else 1]:
        p.at(batch, head, n)
        before, after, total, _ = p.sums(g, deep)
        enters, leaves, _, stays = p.documents(number)
        now = p.rows(x, p.group)[:, deep] * np.exp(before if p.REVERSE else after)
        now = now * (enters if p.REVERSE else leaves)[:, None]
        write(states, (batch, head, n, deep, wide), state)
        state = (np.exp(total) * stays)[:, None] * state + now.T @ p.rows(y)[:, wide]
        if p.NORM:
            if wide.start == 0:
                write(lines, (batch, head, n, deep), line)
            line = np.exp(total) * stays * line + now.T @ (
                p.rows(ones) if p.REVERSE else np.ones(p.size)
            )
    write(last, (batch, head, deep, wide), state)
    if p.NORM and wide.start == 0:
        write(last_line, (batch, head, deep), line)


def outputs(p, q, k, v, g, bonus, number, states, lines, floor, out, norm):
    """The outputs of a chunk."""
    place, n = divmod(p.number, p.CHUNKS)
    p.at(*divmod(place, p.HEADS), n)
    scores, read, normed = 0, 0, 0
    for deep in tiles_of(p.DEPTH, p.DEEP):
        query, key = (p.rows(x, p.group)[:, deep] for x in (q, k))
        scores = scores + np.einsum("ik,jk,ijk->ij", query, key, p.weights(g, bonus, number, deep))
        query = query * np.exp(p.sums(g, deep)[0]) * p.documents(number)[0][:, None]
        read = read + query @ states[p.batch, p.head, n, deep]
        normed = normed + (query @ lines[p.batch, p.head, n, deep] if p.NORM else 0)
    rows, result = (p.batch, slice(p.begin, p.end), p.head), scores @ p.rows(v) + read
    if p.NORM:
        normed = scores.sum(1) + normed
        write(norm, rows, normed)
    write(
        out,
        rows,
        result / np.maximum(np.abs(normed), p.rows(floor))[:, None] if p.FLOOR else result,
    )


def value_gradients(p, q, k, v, g, bonus, number, do, dnorm, dstates, dv, ds, dg):
    """Of a chunk: the gradients of values, of what queries and keys are multiplied to, of decays between its tokens."""
    place, n = divmod(p.number, p.CHUNKS)
    p.at(*divmod(place, p.HEADS), n)
    rows = p.batch, slice(p.begin, p.end), p.head
    scores, written = 0, 0
    for deep in tiles_of(p.DEPTH, p.DEEP):
        query, key = (p.rows(x, p.group)[:, deep] for x in (q, k))
        weights = p.weights(g, bonus, number, deep)
        scores = scores + np.einsum("ik,jk,ijk->ij", query, key, weights)
        key = key * np.exp(p.sums(g, deep)[1]) * p.documents(number)[1][:, None]
        written = written + key @ dstates[p.batch, p.head, n, deep]
    write(dv, rows, scores.T @ p.rows(do) + written)
    dscores = p.rows(do) @ p.rows(v).T + (p.rows(dnorm)[:, None] if p.NORM else 0)
    dscores = np.tril(dscores) * p.documents(number)[2]
    if p.KIND == 1:
        acts = scores * dscores
        write(dg, rows, [acts[t:, :t].sum() for t in range(p.size)])
        dscores = dscores * weights[..., 0]
    whole = np.zeros((p.CHUNK, p.CHUNK))
    whole[: p.size, : p.size] = dscores
    write(ds, (p.batch, p.head, n), whole)


def key_gradients(
    p, q, k, v, g, bonus, number, do, dnorm, states, lines, dstates, dlines, ds, dq, dk, dg, dbonus
):  # fmt: skip
    """Of a chunk and a few columns: the gradients of queries, keys, decays and the bonus."""
    deeps = tiles_of(p.DEPTH, p.DEEP)
    place, part = divmod(p.number, len(deeps))
    place, n = divmod(place, p.CHUNKS)
    p.at(*divmod(place, p.HEADS), n)
    deep, here = deeps[part], (p.batch, p.head, n)
    rows = p.batch, slice(p.begin, p.end), p.head, deep
    query, key = (p.rows(x, p.group)[:, deep] for x in (q, k))
    before, after, total, _ = p.sums(g, deep)
    enters, leaves, _, stays = p.documents(number)
    by_read = p.rows(do) @ states[here][deep].T
    by_write = p.rows(v) @ dstates[here][deep].T
    kept = (states[here][deep] * dstates[here][deep]).sum(1)
    if p.NORM:
        by_read = by_read + np.outer(p.rows(dnorm), lines[here][deep])
        by_write = by_write + dlines[here][deep]
        kept = kept + lines[here][deep] * dlines[here][deep]
    by_read, by_write = (
        by_read * np.exp(before) * enters[:, None],
        by_write * np.exp(after) * leaves[:, None],
    )
    kept = kept * np.exp(total) * stays
    dscores = ds[here][: p.size, : p.size, None]
    if p.KIND == 2:
        if p.EXCLUSIVE:
            own = np.diagonal(dscores[..., 0])[:, None]
            write(dbonus, (*here, deep), (own * query * key).sum(0))
        dscores = dscores * p.weights(g, bonus, number, deep)
    pairs = query[:, None] * key[None] * dscores
    write(dq, rows, by_read + (dscores * key[None]).sum(1))
    write(dk, rows, by_write + (dscores * query[:, None]).sum(0))
    late = 1 if p.EXCLUSIVE else 0  # a token's own decay comes after it is read
    read, written = query * by_read, key * by_write
    acts = [kept + read[t + late :].sum(0) + written[:t].sum(0) for t in range(p.size)]
    if p.KIND == 1:
        write(dg, (*rows[:3], part), np.sum(acts, 1))
    elif p.KIND == 2:
        write(dg, rows, [acts[t] + pairs[t + late :, :t].sum((0, 1)) for t in range(p.size)])


PROGRAMS = {f.__name__: f for f in (carry, outputs, value_gradients, key_gradients)}
