"""BinPack against plain loops; its spaces by trying all boxes; the fullest container by trying all places."""

import copy
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from following import follow, replay

import envs
from envs.puzzles.bin_pack import BinPack, Split, given
from jaxpar.types import UsageError


def apart(a, b):
    """Whether two boxes, each a pair of corners, share no volume."""
    return any(a[1][c] <= b[0][c] or b[1][c] <= a[0][c] for c in range(3))


def inside(a, b):
    return all(b[0][c] <= a[0][c] and a[1][c] <= b[1][c] for c in range(3))


class Twin:
    """Spaces as pairs of corners, or None, in the environment's slots."""

    def __init__(self, state):
        self.whole = (0, 0, 0), tuple(state.level.container.tolist())
        self.sizes, self.volume = state.level.size.tolist(), int(np.prod(state.level.container))
        self.spaces, self.boxes = [self.whole] + [None] * (len(state.reach) - 1), {}

    def legal(self):
        def fits(space, i):
            low, high = space or ((0, 0, 0), (0, 0, 0))
            return i not in self.boxes and all(
                high[c] - low[c] >= self.sizes[i][c] for c in range(3)
            )

        return [bool(fits(space, i)) for space in self.spaces for i in range(len(self.sizes))]

    def step(self, action):
        if not self.legal()[action]:
            return -1.0, True
        space, item = divmod(action, len(self.sizes))
        low = self.spaces[space][0]
        box = low, tuple(low[c] + self.sizes[item][c] for c in range(3))
        self.boxes[item] = box
        parts = []
        for face in range(6):  # above the box on x, y, z; then below it
            c = face % 3
            for old in self.spaces:
                if old and not apart(old, box):
                    corners = [list(old[0]), list(old[1])]
                    corners[face // 3][c] = box[1 - face // 3][c]
                    if corners[0][c] < corners[1][c]:
                        parts.append((tuple(corners[0]), tuple(corners[1])))
        kept = [old if old and apart(old, box) else None for old in self.spaces]
        others = [space for space in kept if space]
        parts = [
            p
            for i, p in enumerate(parts)
            if not any(inside(p, q) for q in others + parts[:i] + parts[i + 1 :])
        ]
        left = [size for i, size in enumerate(self.sizes) if i not in self.boxes]
        least = [min(size[c] for size in left) for c in range(3)] if left else [1 << 30] * 3
        wide = lambda s: s if s and all(s[1][c] - s[0][c] >= least[c] for c in range(3)) else None  # noqa: E731
        parts = [p for p in parts if wide(p)]
        self.spaces = [wide(space) or (parts.pop(0) if parts else None) for space in kept]
        assert not parts
        return np.prod(self.sizes[item]) / self.volume, not any(self.legal())

    def same(self, state):
        spaces = [
            (tuple((-r[:3]).tolist()), tuple(r[3:].tolist())) if r.any() else None
            for r in state.reach
        ]
        packed = {
            i: (tuple(low.tolist()), tuple((low + size).tolist()))
            for i, (low, size) in enumerate(zip(state.corner, state.level.size, strict=True))
            if low[0] >= 0
        }
        assert all(inside(box, self.whole) for box in packed.values())
        assert all(apart(a, b) for a, b in itertools.combinations(packed.values(), 2))
        return spaces == self.spaces and packed == self.boxes and not state.lost


def maximal_spaces(container, boxes):
    """All empty boxes that cannot grow, of all boxes between the coordinates at which something begins or ends."""
    marks = [sorted({0, container[c]} | {b[k][c] for b in boxes for k in (0, 1)}) for c in range(3)]
    full = np.zeros([len(m) - 1 for m in marks], int)
    for low, high in boxes:
        full[
            tuple(slice(m.index(a), m.index(b)) for m, a, b in zip(marks, low, high, strict=True))
        ] = 1
    volume = np.pad(np.pad(full, 1, constant_values=1), ((1, 0),) * 3).cumsum(0).cumsum(1).cumsum(2)

    def empty(low, high):  # [..., 3] each, in cells; one cell beyond the container is full
        total = 0
        for corner in itertools.product((0, 1), repeat=3):
            at = [np.where(k, high[:, c], low[:, c]) + 1 for c, k in enumerate(corner)]
            total = total + (-1) ** (3 - sum(corner)) * volume[tuple(at)]
        return total == 0

    pairs = [list(itertools.combinations(range(len(m)), 2)) for m in marks]
    every = np.array(list(itertools.product(*pairs)))
    low, high = every[..., 0], every[..., 1]
    most = empty(low, high)
    for c in range(3):
        step = np.eye(3, dtype=int)[c]
        most &= ~empty(low - step, high) & ~empty(low, high + step)
    low, high = (
        [[marks[c][x[c]] for c in range(3)] for x in corner[most]] for corner in (low, high)
    )
    return {(tuple(a), tuple(b)) for a, b in zip(low, high, strict=True)}


def check_spaces(state):
    """A state's spaces are all maximal ones that are not too small; returns its mask by them."""
    container, sizes = tuple(state.level.container.tolist()), state.level.size.tolist()
    packed = state.corner[:, 0] >= 0
    boxes = [
        (tuple(c.tolist()), tuple((c + s).tolist()))
        for c, s in zip(state.corner, state.level.size, strict=True)
    ]
    boxes = [box for box, there in zip(boxes, packed, strict=True) if there]
    left = [size for size, there in zip(sizes, packed, strict=True) if not there]
    least = [min(size[c] for size in left) for c in range(3)] if left else [1 << 30] * 3
    spaces = {
        s
        for s in maximal_spaces(container, boxes)
        if all(s[1][c] - s[0][c] >= least[c] for c in range(3))
    }
    rows = [
        (tuple((-r[:3]).tolist()), tuple(r[3:].tolist())) if r.any() else None for r in state.reach
    ]
    assert (
        {row for row in rows if row} == spaces
        and len(spaces) == sum(map(bool, rows))
        and not state.lost
    )
    fits = lambda s, size: all(s[1][c] - s[0][c] >= size[c] for c in range(3))  # noqa: E731
    return [
        bool(row and not there and fits(row, s))
        for row in rows
        for s, there in zip(sizes, packed, strict=True)
    ]


def random_states(env, many):
    """States after as many random legal actions as chance says, with their masks."""

    def one(key):
        params = env.default_params
        level_key, number_key, key = jax.random.split(key, 3)
        number = jax.random.randint(number_key, (), 0, env.num_items + 1)

        def act(state, at):
            mask = env.action_mask(state, params)
            action = jax.random.categorical(
                jax.random.fold_in(key, at), jnp.where(mask, 0.0, -jnp.inf)
            )
            moved = env.transition(key, state, action, params)
            return jax.tree.map(
                lambda new, old: jnp.where(mask.any() & (at < number), new, old), moved, state
            ), None

        state, _ = jax.lax.scan(act, env.init(level_key, params), np.arange(env.num_items))
        return state, env.action_mask(state, params)

    states, masks = jax.tree.map(
        np.asarray, jit(jax.vmap(one))(jax.random.split(jax.random.key(0), many))
    )
    return [jax.tree.map(lambda leaf, i=i: leaf[i], (states, masks)) for i in range(many)]


SMALL = BinPack(Split(7, (9, 7, 6)), num_spaces=16)


def test_equals_loops_step_by_step_without_overlap():
    outcomes = follow(SMALL, Twin, num_steps=30, num_envs=12)
    assert len(outcomes) > 30
    assert max(total for total, *_ in outcomes) <= 1.00001
    assert len({len(twin.boxes) for *_, twin in outcomes}) > 3


def masks_hold(many, least):
    counts = []
    for state, mask in random_states(SMALL, many):
        assert mask.tolist() == check_spaces(state)
        counts.append(int(state.reach.any(axis=1).sum()))
    assert max(counts) >= least and min(counts) == 0


def test_spaces_are_all_that_cannot_grow_and_masks_follow():
    masks_hold(300, 7)


@pytest.mark.slow  # a minute
def test_masks_of_ten_thousand_states():
    masks_hold(10_000, 8)


def fill_order(corner, size):
    """An order in which whatever lies below an item on any axis, seen along it, comes before it."""
    boxes = [(tuple(c), tuple(c + s)) for c, s in zip(corner, size, strict=True)]

    def below(a, b):
        over = [a[0][c] < b[1][c] and b[0][c] < a[1][c] for c in range(3)]
        return any(a[1][c] <= b[0][c] and over[c - 1] and over[c - 2] for c in range(3))

    left, order = set(range(len(boxes))), []
    while left:
        order.append(min(i for i in left if not any(below(boxes[j], boxes[i]) for j in left)))
        left.remove(order[-1])
    return order


def test_the_split_replayed_fills_the_container():
    env = BinPack(Split(12, (30, 20, 25)), num_spaces=60)
    params, transition, packing = (
        env.default_params,
        jit(env.transition),
        jit(env.generator.packing),
    )
    for seed in range(8):
        level, corner = jax.tree.map(np.asarray, packing(jax.random.key(seed)))
        assert np.prod(level.size, axis=1).sum() == 15_000 and (level.size > 0).all()
        state = env.init_level(jax.random.key(0), level, params)
        for item in fill_order(corner, level.size):
            low = -np.asarray(state.reach[:, :3])
            there = (low == corner[item]).all(axis=1) & np.asarray(env.fits(state))[:, item]
            assert there.any(), (seed, item)
            state = transition(
                jax.random.key(0), state, np.int32(there.argmax() * 12 + item), params
            )
            np.testing.assert_array_equal(state.corner[item], corner[item])
        assert not state.lost and float(env.outcome(state, params)) == 1
        assert bool(env.terminal(state, params)) and not bool(state.illegal)
        np.testing.assert_array_equal(
            env.sample_level(jax.random.key(seed), params).size, level.size
        )


PROBLEMS = (
    (
        (3, 3, 2),
        ((2, 1, 2), (1, 2, 2), (2, 1, 2), (1, 2, 2), (1, 1, 2)),
    ),  # a pinwheel, which no cuts make
    ((3, 3, 2), ((2, 2, 2), (2, 2, 1), (3, 2, 1), (1, 3, 2), (2, 1, 1))),
    ((6, 3, 1), ((4, 2, 1), (2, 2, 1), (3, 1, 1), (3, 2, 1), (2, 1, 1))),
    ((2, 3, 3), ((2, 3, 2), (2, 2, 3), (1, 3, 3), (1, 1, 1), (2, 2, 2))),
)


def fullest(container, items):
    """The greatest volume of items at any whole places that do not overlap."""
    cells = {cell: 1 << i for i, cell in enumerate(np.ndindex(container))}

    def boxes(size):
        for low in np.ndindex(*(container[c] - size[c] + 1 for c in range(3))):
            yield sum(cells[tuple(low[c] + d[c] for c in range(3))] for d in np.ndindex(size))

    @functools.cache
    def most(item, used):
        if item == len(items):
            return used.bit_count()
        return max(
            [
                most(item + 1, used),
                *(most(item + 1, used | b) for b in places[item] if not b & used),
            ]
        )

    places = [list(boxes(size)) for size in items]
    return most(0, 0)


def best_by_moves(env, level):
    """The greatest volume that sequences of the twin's legal moves reach, and one of them."""
    found = {}

    def search(twin):
        known = frozenset(twin.boxes.items())
        if known not in found:
            found[known] = sum(int(np.prod(twin.sizes[i])) for i in twin.boxes), ()
            for action in np.flatnonzero(twin.legal()):
                after = copy.deepcopy(twin)
                after.step(int(action))
                volume, moves = search(after)
                found[known] = max(found[known], (volume, (int(action), *moves)))
        return found[known]

    return search(Twin(env.init_level(jax.random.key(0), level, env.default_params)))


def test_the_fullest_container_is_never_exceeded_and_replays():
    env = BinPack(given(*PROBLEMS), num_spaces=12)
    best = {}
    for (container, items), level in zip(PROBLEMS, env.generator.levels(), strict=True):
        volume, actions = best_by_moves(env, level)
        assert volume == fullest(container, items)
        total, state = replay(env, actions, level)
        np.testing.assert_allclose(total, volume / 18, rtol=1e-6)
        assert int(env.filled(state)) == volume
        first = env.init_level(jax.random.key(0), level, env.default_params)
        assert volume / 18 - 1e-6 <= float(env.upper_bound(first, env.default_params)) <= 1
        best[items] = volume / 18
    assert best[PROBLEMS[0][1]] == 1 and min(best.values()) < 1
    outcomes = follow(env, Twin, 40, 12)
    totals = [(total, best[tuple(map(tuple, twin.sizes))]) for total, _, twin in outcomes]
    assert all(total <= most + 1e-5 for total, most in totals) and len(outcomes) > 60


def test_spaces_beyond_the_slots_are_left_out_and_told():
    few, params = BinPack(SMALL.generator, num_spaces=2), SMALL.default_params
    key, told = jax.random.key(3), []
    state, whole = few.init(key, params), SMALL.init(key, params)
    move, move_whole = (
        jit(lambda *pair, env=env: env.transition(key, *pair, params)) for env in (few, SMALL)
    )
    for _ in range(3):
        action = int(np.flatnonzero(few.action_mask(state, params))[0])
        space = (
            (np.asarray(whole.reach) == np.asarray(state.reach[action // 7])).all(axis=1).argmax()
        )
        state = move(state, jnp.int32(action))
        whole = move_whole(whole, jnp.int32(space * 7 + action % 7))
        rows, every = ({tuple(r) for r in np.asarray(s.reach).tolist()} for s in (state, whole))
        assert rows <= every and not whole.lost
        told.append((bool(state.lost), rows | {(0,) * 6} == every))
    assert any(lost for lost, _ in told) and all(lost or same for lost, same in told)


def test_observation_shows_spaces_and_items():
    env = BinPack(given(((4, 2, 2), ((2, 1, 2), (1, 1, 1)))), num_spaces=3)
    params, key = env.default_params, jax.random.key(0)
    state = env.transition(key, env.init(key, params), jnp.int32(0), params)
    seen = np.asarray(env.observe(key, state, None, params))
    assert seen.dtype == np.float32 and env.observation_space(params).shape == seen.shape
    assert seen[:2].tolist() == [[1, 1, 0.5, 1, 1, 0.5, 0, 0], [1, 1, 1, 0.5, 1, 0, 0.5, 0]]
    assert seen[2:].tolist() == [
        [1, *[0] * 7],
        [0, 0, 0.5, 0.5, 1, 0, 0, 0],
        [0, 1, 0.25, 0.5, 0.5, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split(0), "num_items=0 must be"),
        (lambda: Split(9, (2, 2, 2)), "holds 8, which must be from 9"),
        (lambda: Split(9, (2, 2)), "three sides, whole numbers over 0, not \\(2, 2\\)"),
        (lambda: Split(9, (2**11, 2**11, 2**11)), "to 2\\^30"),
        (
            lambda: given(((4, 4, 4), ((1, 1, 5),))),
            "from 1 to the container's \\(4, 4, 4\\), not \\(1, 1, 5\\)",
        ),
        (lambda: given(((4, 4, 4), ((1, 0, 1),))), "not \\(1, 0, 1\\)"),
        (lambda: given(((4, 4, 4), ())), "at least one item"),
        (lambda: given(PROBLEMS[0], ((4, 4, 4), ((1, 1, 1),))), "all must be as in the first"),
        (lambda: BinPack(len), "takes a generator"),
        (lambda: BinPack(num_spaces=0), "num_spaces=0 must be"),
        (lambda: envs.make("BinPack", rewards="late"), "rewards='late' is unknown"),
    ],
)
def test_bad_input_ends_in_a_sentence(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def colors_of(image):
    colors, counts = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
    return [tuple(color) for color in colors.tolist()], counts.tolist()


def test_the_picture_shows_what_is_packed():
    env = BinPack(given(((2, 2, 2), ((2, 2, 1), (1, 1, 1)))), num_spaces=4)
    params, key = env.default_params, jax.random.key(0)
    draw, move = (
        jit(lambda state: env.render(state, params)),
        jit(lambda *pair: env.transition(key, *pair, params)),
    )
    state = env.init(key, params)
    pictures = [np.asarray(draw(state)).astype(int)]
    for action in (0, 1):
        state = move(state, jnp.int32(action))
        pictures.append(np.asarray(draw(state)).astype(int))
    empty, floor, corner = pictures
    assert empty.shape == (192, 192, 3)
    assert (empty == empty[..., :1]).all() and len(np.unique(empty)) == 4  # white and three walls
    assert ((floor != empty).any(-1) <= (empty[..., 0] < 255)).all(), (
        "an item is drawn inside the container"
    )
    faces = np.unique(floor[(floor != floor[..., :1]).any(-1)], axis=0, return_counts=True)[1]
    assert (
        len(faces) == 3 and abs(max(faces) / min(faces) - 2) < 0.1
    )  # the floor, and two sides half as high
    colors = {
        name: dict(zip(*colors_of(image), strict=True))
        for name, image in (("floor", floor), ("corner", corner))
    }
    new = [many for color, many in colors["corner"].items() if color not in colors["floor"]]
    assert len(new) == 3 and max(new) / min(new) < 1.1, "three faces of a cube"
    top = max(colors["floor"], key=lambda color: (len(set(color)) > 1, sum(color)))
    hidden = 1 - colors["corner"][top] / colors["floor"][top]
    assert abs(hidden - 1 / 4) < 0.03, "the cube hides a quarter of what it stands on"
