"""A forest as Python lists: what `jaxpar.decode.forest` must say, token by token."""

import dataclasses


@dataclasses.dataclass
class Segment:
    """A run of tokens, each with its place; it goes on from the parent's tokens whose places are under `cut`."""

    parent: int = -1
    cut: int = 0
    blocks: int = 0
    tokens: list = dataclasses.field(default_factory=list)

    @property
    def end(self):
        return max((place + 1 for _, place in self.tokens), default=0)


@dataclasses.dataclass
class Reader:
    """Of each segment that it sees: where it begins, and the first place that it does not see.

    Of several readers of one segment, `mine` are the tokens that one sees; None for all.
    """

    write: int
    position: int = 0
    begins: dict = dataclasses.field(default_factory=dict)
    until: dict = dataclasses.field(default_factory=dict)
    mine: set | None = None


class Row:
    """One row of a forest."""

    def __init__(self, segments, blocks, block):
        self.segments, self.most, self.free, self.block, self.refused = (
            {},
            segments,
            blocks,
            block,
            0,
        )

    def start(self, new, wanted, parent=-1):
        """Takes note of segments that were started, as many of `wanted` as there was room for."""
        lives = parent < 0 or parent in self.segments
        room = min(wanted, self.most - len(self.segments)) if lives else 0
        started = [number for number in new if number >= 0]
        assert len(set(started)) == len(started) == room and not set(started) & set(
            self.segments
        ), (new, room)
        for number in started:
            self.segments[number] = Segment(parent, self.segments[parent].end if parent >= 0 else 0)
        self.refused += wanted - room

    def reserve(self, number, slots):
        """Gives a segment its blocks, as long as there are some; returns how many."""
        if number < 0:
            return 0
        want = max(-(-slots // self.block) - self.segments[number].blocks, 0)
        given = min(want, self.free)
        self.segments[number].blocks += given
        self.free -= given
        self.refused += want - given
        return given

    def release(self, numbers):
        """Frees segments, children first, as long as some of them are nobody's parent; returns which."""
        asked, gone = set(numbers) & set(self.segments), set()
        while True:
            parents = {each.parent for each in self.segments.values()}
            leaves = asked - gone - parents
            if not leaves:
                break
            for number in leaves:
                self.free += self.segments.pop(number).blocks
            gone |= leaves
        self.refused += len(asked - gone)
        return gone

    def lineage(self, number):
        """The reader at the end of a segment."""
        reader, chain = Reader(number), []
        while number >= 0:
            chain.append(number)
            number = self.segments[number].parent
        for number in reversed(chain):  # from the root on, each begins where it left its parent
            reader.begins[number] = reader.position = reader.position + self.segments[number].cut
        for number, after in zip(chain, [None, *chain], strict=False):
            reader.until[number] = (
                self.segments[number].end if after is None else self.segments[after].cut
            )
        reader.position += self.segments[chain[0]].end if chain else 0
        return reader

    def arranged(self, numbers, write):
        """The reader of whole segments, one after the other."""
        reader = Reader(write)
        for number in numbers:
            if number >= 0:
                reader.begins[number], reader.until[number] = (
                    reader.position,
                    self.segments[number].end,
                )
                reader.position += self.segments[number].end
        if write >= 0:
            reader.begins.setdefault(write, reader.position)
            behind = numbers[numbers.index(write) + 1 :] if write in numbers else [write]
            if any(self.segments[number].tokens for number in behind if number >= 0):
                reader.write = -1  # it would not come last
        return reader

    def joined(self, numbers, write):
        """The reader of several lineages, after the longest."""
        reader = Reader(write)
        for each in map(self.lineage, numbers):
            reader.position = max(reader.position, each.position)
            reader.begins |= each.begins
            for number, until in each.until.items():
                reader.until[number] = max(until, reader.until.get(number, 0))
        if write >= 0 and self.segments[write].tokens:
            reader.write = -1
        elif write >= 0:
            reader.begins[write] = reader.position
        return reader

    def line(self, reader):
        """All that a reader sees: (position, token), in the order of positions."""
        return sorted(
            (reader.begins[number] + place, token)
            for number, until in reader.until.items()
            for token, place in self.segments[number].tokens
            if place < until and (reader.mine is None or token in reader.mine)
        )

    def write(self, readers, tokens):
        """Takes the tokens of each reader in turn; returns how many of each were taken."""
        begins = [reader.position - reader.begins.get(reader.write, 0) for reader in readers]
        taken = []
        for reader, begin, line in zip(readers, begins, tokens, strict=True):
            count = 0
            for token in line if reader.write >= 0 else []:
                segment = self.segments[reader.write]
                if len(segment.tokens) == segment.blocks * self.block:
                    self.refused += 1
                    continue
                segment.tokens.append((token, begin + count))
                count += 1
                reader.until[reader.write] = max(reader.until.get(reader.write, 0), begin + count)
                if reader.mine is not None:
                    reader.mine.add(token)
            reader.position += count
            taken.append(count)
        return taken
