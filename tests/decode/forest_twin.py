"""A forest and its twin of Python lists, which take the same steps and are compared after each."""

import copy
import dataclasses

import jax
import numpy as np
from fast import jit
from hypothesis import strategies as st
from plain_forest import Row

from jaxpar.decode import chain
from jaxpar.decode import forest as tables

ROWS, READERS, LENGTH = 2, 3, 3
SEGMENTS, BLOCKS, BLOCK = 5, 6, 2
SHAPE = ROWS, READERS

spawn, fork = jit(tables.spawn, static_argnums=1), jit(tables.fork, static_argnums=2)
reserve, release, write = (
    jit(tables.reserve),
    jit(tables.release),
    jit(tables.write, static_argnums=3),
)
lineage_view, arranged_view = jit(tables.lineage_view), jit(tables.arranged_view)


@jit
def joined_view(forest, segments, targets, others):
    """A reader that joins, beside others at the ends of segments."""
    views = tables.joined_view(forest, segments, targets), tables.lineage_view(forest, others)
    return jax.tree.map(lambda *x: jax.numpy.concatenate(x, 1), *views)


OFTEN = {
    "spawn": 2,
    "fork": 3,
    "reserve": 1,
    "release": 2,
    "lineage": 3,
    "arranged": 3,
    "joined": 3,
    "reorder": 2,
    "write": 9,
}
steps = st.lists(
    st.tuples(
        st.sampled_from([name for name, often in OFTEN.items() for _ in range(often)]),
        st.binary(min_size=24, max_size=24),
    ),
    min_size=8,
    max_size=24,
)
"""Steps by name, each with the bytes that make its choices."""


def ints(lists):
    return np.array(lists, np.int32)


class Twin:
    """Both forests, the last view, and which token lies in which slot.

    `masked` says whether views have slots of their own, `tree` what is written from: a path of it.
    """

    def __init__(self, masked=False, tree=None, cache=None):
        self.forest = jax.device_get(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK))
        self.rows = [Row(SEGMENTS, BLOCKS, BLOCK) for _ in range(ROWS)]
        self.stored = np.full((ROWS, BLOCKS, BLOCK), -1)
        self.masked, self.tree, self.cache = (
            masked,
            chain(LENGTH - 1) if tree is None else tree,
            cache,
        )
        self.view, self.readers, self.tokens = None, None, 0

    def run(self, steps):
        for name, choices in steps:
            self.choices = iter(choices * 8)
            getattr(self, name)()
            self.check()

    def choose(self, options):
        return options[next(self.choices) % len(options)]

    def segment(self, row):
        return self.choose([-1, *sorted(row.segments)])

    def for_readers(self, choice, count=READERS):
        return [[choice(row) for _ in range(count)] for row in self.rows]

    # ---------------------------------------------------------------- steps

    def spawn(self):
        count = self.choose([1, 2])
        self.forest, new = jax.device_get(spawn(self.forest, count))
        for row, started in zip(self.rows, new.tolist(), strict=True):
            row.start(started, count)

    def fork(self):
        """Also of what is no segment, or none any more."""
        count, parents = self.choose([1, 2]), [self.choose(range(-1, SEGMENTS)) for _ in self.rows]
        self.forest, new = jax.device_get(fork(self.forest, ints(parents), count))
        for row, parent, started in zip(self.rows, parents, new.tolist(), strict=True):
            row.start(started, count if parent >= 0 else 0, parent)

    def reserve(self):
        self.take_blocks(
            self.for_readers(self.segment), self.for_readers(lambda row: self.choose(range(8)))
        )

    def take_blocks(self, which, slots):
        which = [
            [x if x not in line[:place] else -1 for place, x in enumerate(line)] for line in which
        ]
        before = self.forest.owner
        self.forest, fresh = jax.device_get(reserve(self.forest, ints(which), ints(slots)))
        assert (fresh == (self.forest.owner != before)).all() and (before[fresh] == -1).all()
        for row, *line in zip(self.rows, which, slots, strict=True):
            for number, size in zip(*line, strict=True):
                row.reserve(number, size)
        if self.cache:
            self.cache.clear(fresh)

    def release(self):
        """Also of what is no segment any more, and of one named twice."""
        which = self.for_readers(lambda row: self.choose(range(-1, SEGMENTS)))
        before = self.forest.owner
        self.forest = jax.device_get(release(self.forest, ints(which)))
        for place, (row, named) in enumerate(zip(self.rows, which, strict=True)):
            gone = row.release(named)
            freed = np.isin(before[place], list(gone))
            assert (freed == (self.forest.owner[place] != before[place])).all()
            self.stored[place, freed] = -1
            if self.readers and any(
                {reader.write, *reader.begins} & gone for reader in self.readers[place]
            ):
                self.view = self.readers = None
        if self.cache:
            self.cache.poison(self.forest.owner < 0)

    def lineage(self):
        ends = self.for_readers(self.segment)
        readers = [
            [row.lineage(end) for end in line] for row, line in zip(self.rows, ends, strict=True)
        ]
        self.look(lineage_view(self.forest, ints(ends)), readers)

    def arranged(self):
        def choice(row):
            first, last = self.segment(row), self.segment(row)
            first = -1 if first == last else first
            return (first, last), self.choose([-1, last, last, last, *row.segments])

        chosen = self.for_readers(choice)
        which, targets = (
            ints([[x for x, _ in line] for line in chosen]),
            ints([[x for _, x in line] for line in chosen]),
        )
        readers = [
            [row.arranged(*each) for each in line]
            for row, line in zip(self.rows, chosen, strict=True)
        ]
        self.look(arranged_view(self.forest, which, targets), readers)

    def joined(self):
        which, targets, others, readers = self.for_readers(self.segment, 2), [], [], []
        for row, segments in zip(self.rows, which, strict=True):
            used = {number for each in segments for number in row.lineage(each).until}
            roots = [x for x, each in row.segments.items() if each.parent < 0 and x not in used]
            targets.append(self.choose([-1, *roots]))
            others.append([self.segment(row) for _ in range(READERS - 1)])
            readers.append([row.joined(segments, targets[-1]), *map(row.lineage, others[-1])])
        self.look(joined_view(self.forest, ints(which), ints(targets), ints(others)), readers)

    def look(self, view, readers):
        self.view, self.readers = jax.device_get(view), readers
        if self.masked:
            for row, line in zip(self.rows, readers, strict=True):
                for reader in line:
                    reader.mine = {token for _, token in row.line(reader)}
            slots = [
                [np.isin(stored, list(reader.mine)) for reader in line]
                for stored, line in zip(self.stored, readers, strict=True)
            ]
            self.view = dataclasses.replace(self.view, slots=np.array(slots))

    def reorder(self):
        """Readers go on as others, as beams do."""
        if self.view is None:
            return
        chosen = self.for_readers(lambda row: self.choose(range(READERS)))
        self.view = jax.tree.map(lambda x: x[np.arange(ROWS)[:, None], chosen], self.view)
        self.readers = [
            [copy.deepcopy(line[r]) for r in which]
            for line, which in zip(self.readers, chosen, strict=True)
        ]

    def write(self):
        """A window of tokens for each reader, of which the first few on a path are kept."""
        if self.view is None:
            self.lineage()
        if self.choose([True, True, True, False]):  # else some blocks may be missing
            targets = [[reader.write for reader in line] for line in self.readers]
            wanted = self.for_readers(lambda row: self.choose([2, 4, 9]))
            wanted = [
                [
                    more + len(row.segments[x].tokens) if x >= 0 else 0
                    for x, more in zip(*line, strict=True)
                ]
                for row, *line in zip(self.rows, targets, wanted, strict=True)
            ]
            self.take_blocks(targets, wanted)
        nodes = self.tree.size
        tokens = self.tokens + np.arange(ROWS * READERS * nodes).reshape(*SHAPE, nodes)
        self.tokens += tokens.size
        if self.cache:
            self.cache.attend(self, tokens)
        path = self.tree.paths[self.for_readers(lambda row: self.choose(range(nodes)))]
        counts = np.minimum(
            self.for_readers(lambda row: self.choose(range(LENGTH + 1))), (path >= 0).sum(-1)
        )
        length = path.shape[-1]
        self.forest, self.view, slots = jax.device_get(
            write(self.forest, self.view, ints(counts), length)
        )
        none, nodes_to = BLOCKS * BLOCK, np.full(tokens.shape, BLOCKS * BLOCK)
        for row, line in enumerate(self.readers):
            kept = [
                list(tokens[row, r, path[row, r, :count]]) for r, count in enumerate(counts[row])
            ]
            taken = self.rows[row].write(line, kept)
            for r, count in enumerate(taken):
                here = slots[row, r]
                assert (here[count:] == none).all()
                assert (self.stored[row].flat[here[:count]] == -1).all() and len(
                    set(here[:count])
                ) == count
                self.stored[row].flat[here[:count]] = kept[r][:count]
                nodes_to[row, r, path[row, r, :count]] = here[:count]
        if self.cache:
            self.cache.store(nodes_to)

    # ---------------------------------------------------------------- comparison

    def check(self):
        forest = self.forest
        kinds = {leaf.dtype for leaf in jax.tree.leaves((forest, self.view))}
        assert kinds <= {np.dtype("int32"), np.dtype(bool)}, "a loop could not carry it"
        assert forest.refused.tolist() == [row.refused for row in self.rows]
        for number, row in enumerate(self.rows):
            assert np.flatnonzero(forest.live[number]).tolist() == sorted(row.segments)
            owner, order, place, stored = (
                x[number] for x in (forest.owner, forest.order, forest.place, self.stored)
            )
            assert (owner == -1).sum() == row.free and (place[owner == -1] == -1).all()
            for segment, plain in row.segments.items():
                assert forest.length[number, segment] == len(plain.tokens)
                assert (
                    forest.parent[number, segment] == plain.parent
                    and forest.cut[number, segment] == plain.cut
                )
                blocks = np.flatnonzero(owner == segment)
                blocks = blocks[np.argsort(order[blocks])]
                assert order[blocks].tolist() == list(range(plain.blocks))
                room = plain.blocks * BLOCK - len(plain.tokens)
                assert (
                    stored[blocks].reshape(-1).tolist()
                    == [token for token, _ in plain.tokens] + [-1] * room
                )
                assert (
                    place[blocks].reshape(-1).tolist()
                    == [place for _, place in plain.tokens] + [-1] * room
                )
        if self.view is not None:
            self.check_view()

    def check_view(self):
        view = self.view
        for number, (row, readers) in enumerate(zip(self.rows, self.readers, strict=True)):
            owner, place = self.forest.owner[number], self.forest.place[number]
            for r, reader in enumerate(readers):
                sees = (
                    (owner[:, None] >= 0)
                    & (place >= 0)
                    & (place < view.seen[number, r][owner][:, None])
                )
                if view.slots is not None:
                    sees &= view.slots[number, r]
                positions = place + view.offset[number, r][owner][:, None]
                line = zip(
                    positions[sees].tolist(), self.stored[number][sees].tolist(), strict=True
                )
                assert sorted(line) == row.line(reader)
                assert (view.write[number, r], view.position[number, r]) == (
                    reader.write,
                    reader.position,
                )
                if reader.write >= 0:
                    assert view.offset[number, r, reader.write] == reader.begins[reader.write]
