"""Parts of a step that its derivative does not see: rounding, signs, casts, and selects that jump.

An iteration that follows derivatives cannot tell how an error moves through such a part. So the
leaves that one reaches are *blind*: a small residual there says nothing, and only the loop's own
numbers will do.

A `select` that chooses by the state is blind if its branches differ where the choice changes. In a
relu, a clip or a leaky unit they do not. This is decided by numbers: the arithmetic around the
select is evaluated on both sides of points at which the choice changes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var
from scipy import special

from jaxpar.lower.jaxprs import CALLS, array_of, called, evaluate_equation, interpret, opened
from jaxpar.solve._dependence import ELEMENTWISE, Relation, relations

JUMPS = frozenset(
    "and argmax argmin bitcast_convert_type ceil eq floor ge gt is_finite le lt ne "
    "nextafter not or rem round sign stop_gradient xor".split()
)
"""Primitives with a derivative of zero, or with jumps that their derivative does not show."""

SEEN = ELEMENTWISE | frozenset(
    "add_any broadcast_in_dim concatenate conv_general_dilated cummax cummin cumlogsumexp cumprod "
    "cumsum dot_general dynamic_slice dynamic_update_slice expand_dims gather iota pad psum "
    "ppermute all_gather reduce_max reduce_min reduce_prod reduce_sum reshape rev scatter "
    "scatter-add slice split squeeze transpose".split()
)
"""Primitives with a derivative that sees all that a float operand does."""

DRAWS = 256
"""Lines on which a change of a select's choice is looked for."""


class Cause(NamedTuple):
    """A part of a step that its derivative does not see.

    Attributes:
      text: Name of the part, for messages.
      leaves: Numbers of the leaves of the state that enter it.
      choice: Condition of a select, since an outer select on the same condition may repair it.
    """

    text: str
    leaves: frozenset[int]
    choice: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A value of the program: what enters it, and how one of its entries is computed.

    Attributes:
      dtype: Its dtype.
      leaves: Numbers of the leaves of the state that it depends on.
      causes: Blind parts on the way to it.
      number: Its value if it is a known scalar.
      evaluate: NumPy function of the operands' entries; None if it mixes entries.
      operands: Its operands.
      name: Primitive that makes it.
    """

    dtype: Any
    leaves: frozenset[int] = frozenset()
    causes: frozenset[Cause] = frozenset()
    number: Any = None
    evaluate: Callable | None = None
    operands: tuple["Entry", ...] = ()
    name: str = ""


def blind_leaves(jaxpr: Jaxpr, num_carry: int) -> list[frozenset[Cause]]:
    """Returns the blind parts that reach each leaf of the new state.

    Args:
      jaxpr: Program of a step: its first `num_carry` inputs and outputs are the state's leaves.
      num_carry: Number of leaves.
    """
    found = _Reader().leaves(jaxpr, num_carry)
    for number in range(num_carry):
        others: dict[Var, int] = {
            var: other
            for other, var in enumerate(jaxpr.outvars[:num_carry])
            if found[other] and isinstance(var, Var) and var is not jaxpr.outvars[number]
        }
        if found[number] and others:
            # A leaf that is made of another one's new state is not blind for that: the other is
            # found to the bit, or is blind itself and so are both.
            found[number] = _Reader(others).leaves(jaxpr, num_carry)[number]
    return found


class _Reader:
    """Reads one program; equal computations become one value.

    Attributes:
      cut: Variables that are new states of other leaves, and the numbers of those leaves.
      known: Values by what makes them.
    """

    def __init__(self, cut: dict[Var, int] | None = None):
        self.cut = cut or {}
        self.known: dict[Any, Entry] = {}

    def leaves(self, jaxpr: Jaxpr, num_carry: int) -> list[frozenset[Cause]]:
        inputs = []
        for number, var in enumerate(jaxpr.invars):
            leaves = frozenset({number}) if number < num_carry else frozenset()
            inputs.append(Entry(dtype=array_of(var).dtype, leaves=leaves))
        consts = [None] * len(jaxpr.constvars)
        out = self.read(jaxpr, consts, inputs)
        return [value.causes for value in out[:num_carry]]

    def read(self, jaxpr: Jaxpr, consts: Sequence, inputs: Sequence[Entry]) -> list[Entry]:
        return interpret(jaxpr, consts, inputs, self.rule, _constant)

    def rule(self, equation: JaxprEqn, operands: list[Entry]) -> list[Entry] | None:
        """Returns the values of one equation's results; None to open a call."""
        if not self.cut.keys() & set(equation.outvars):
            return self.opened(equation, operands)
        results = self.opened(equation, operands)
        if results is None:
            results = self.read(*called(equation), operands)
        out = []
        for var, value in zip(equation.outvars, results, strict=True):
            if var in self.cut:
                leaves = value.leaves | {self.cut[var]}
                value = Entry(dtype=value.dtype, leaves=leaves)
            out.append(value)
        return out

    def opened(self, equation: JaxprEqn, operands: list[Entry]) -> list[Entry] | None:
        """Returns the values of one equation's results, whatever leaves they are; None to open a call."""
        name = equation.primitive.name
        if name == "custom_jvp_call":
            # Its derivative is its own: what the program stops inside of it does not matter.
            results = [_not_stopped(value) for value in self.read(*called(equation), operands)]
            return self.with_unseen(equation, operands, results)
        if name == "custom_linear_solve":
            # It has the derivative of the system: factors are stopped, and need not be seen.
            operands = [_not_stopped(value) for value in operands]
            return [self.plain(equation, index, operands) for index in range(len(equation.outvars))]
        if name in CALLS:
            return None
        if name in _LOOPS:
            return _LOOPS[name](self, equation, operands)
        if name == "select_n":
            return [self.select(equation, operands)]
        results = [self.plain(equation, index, operands) for index in range(len(equation.outvars))]
        if name in SEEN or name in JUMPS:
            return results
        return self.with_unseen(equation, operands, results)

    def plain(self, equation: JaxprEqn, index: int, operands: list[Entry]) -> Entry:
        """Returns a result that depends on all operands."""
        name = equation.primitive.name
        key = (name, index, *map(_identity, operands), _text(equation.params))
        if key in self.known:
            return self.known[key]
        aval = array_of(equation.outvars[index])
        leaves = frozenset().union(*(value.leaves for value in operands))
        causes = frozenset().union(*(value.causes for value in operands))
        is_harmless = name == "stop_gradient" and _is_normaliser(operands[0])
        if leaves and _is_jump(equation, aval) and not is_harmless:
            causes |= {Cause(text=_jump_text(name, aval), leaves=leaves)}
        value = Entry(
            dtype=aval.dtype,
            leaves=leaves,
            causes=causes,
            evaluate=_evaluator(equation),
            operands=tuple(operands),
            name=name,
        )
        self.known[key] = value
        return value

    def select(self, equation: JaxprEqn, operands: list[Entry]) -> Entry:
        """Returns the result of a select, blind if its branches differ where its choice changes."""
        choice, branches = operands[0], operands[1:]
        value = self.plain(equation, 0, operands)
        causes = frozenset().union(*(branch.causes for branch in branches))
        if choice.leaves:
            if _is_continuous(choice, value):
                causes = frozenset(cause for cause in causes if cause.choice is not choice)
            else:
                text = "a select with branches that differ where its choice changes"
                causes |= {Cause(text=text, leaves=choice.leaves, choice=choice)}
        # The choice itself hands on nothing else: a comparison is blind, a relu made of one is not.
        value = dataclasses.replace(value, causes=causes)
        key = ("select_n", 0, *map(_identity, operands), _text(equation.params))
        self.known[key] = value
        return value

    def with_unseen(
        self, equation: JaxprEqn, operands: list[Entry], results: list[Entry]
    ) -> list[Entry]:
        """Returns results that are blind where the derivative of an equation ignores an operand."""
        moved = [
            position
            for position, value in enumerate(operands)
            if value.leaves and jnp.issubdtype(value.dtype, jnp.inexact)
        ]
        if not moved:
            return results
        entering = _primal_relations(equation, moved)
        seen = _derivative_relations(equation, moved)
        out = []
        for value, enters, sees in zip(results, entering, seen, strict=True):
            missing = [operands[position] for position in enters if position not in sees]
            leaves = frozenset().union(*(operand.leaves for operand in missing))
            causes = value.causes
            if leaves:
                text = f"the derivative of {_called_name(equation)}, which is zero"
                causes |= {Cause(text=text, leaves=leaves)}
            out.append(dataclasses.replace(value, causes=causes))
        return out

    def scan(self, equation: JaxprEqn, operands: list[Entry]) -> list[Entry]:
        """Returns the results of a loop: what reaches its carry in any number of rounds."""
        body = opened(equation.params["jaxpr"])
        pairs = zip(equation.outvars, body.outvars, strict=True)
        num_carry = sum(array_of(a).ndim == array_of(b).ndim for a, b in pairs)
        pairs = zip(equation.invars, body.invars, strict=True)
        num_xs = sum(array_of(a).ndim > array_of(b).ndim for a, b in pairs)
        first = len(operands) - num_carry - num_xs
        carry = operands[first : first + num_carry]
        around = operands[:first], operands[first + num_carry :]
        while True:
            inputs = [_opaque(value) for value in (*around[0], *carry, *around[1])]
            results = self.read(body, [None] * len(body.constvars), inputs)
            after = [_joined([a, b]) for a, b in zip(carry, results[:num_carry], strict=True)]
            if _same(after, carry):
                return [_opaque(value) for value in results]
            carry = after

    def loop(self, equation: JaxprEqn, operands: list[Entry]) -> list[Entry]:
        """Returns the results of a while loop: its number of rounds is blind."""
        params = equation.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        test, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        carry = operands[last:]
        while True:
            inputs = [_opaque(value) for value in (*operands[first:last], *carry)]
            results = self.read(body, [None] * len(body.constvars), inputs)
            after = [_joined([a, b]) for a, b in zip(carry, results, strict=True)]
            if _same(after, carry):
                break
            carry = after
        inputs = [_opaque(value) for value in (*operands[:first], *carry)]
        [goes_on] = self.read(test, [None] * len(test.constvars), inputs)
        return [
            _chosen_by(goes_on, value, "the number of rounds of a while loop") for value in carry
        ]

    def branch(self, equation: JaxprEqn, operands: list[Entry]) -> list[Entry]:
        """Returns the results of a conditional: the choice of its branch is blind."""
        choice = operands[0]
        found = []
        for closed in equation.params["branches"]:
            body = opened(closed)
            inputs = [_opaque(value) for value in operands[1:]]
            found.append(self.read(body, [None] * len(body.constvars), inputs))
        joined = [_joined(list(parts)) for parts in zip(*found, strict=True)]
        return [_chosen_by(choice, value, "the choice of a branch") for value in joined]


_LOOPS = {"scan": _Reader.scan, "while": _Reader.loop, "cond": _Reader.branch}


def _constant(number: object, aval: ShapedArray) -> Entry:
    """Returns the value of a constant: its number if it is a scalar that is known here."""
    is_known = isinstance(number, bool | int | float | np.ndarray | np.generic)
    if is_known and np.ndim(number) == 0:
        return Entry(dtype=aval.dtype, number=np.asarray(number)[()])
    return Entry(dtype=aval.dtype)


def _opaque(value: Entry) -> Entry:
    """Returns a value without its arithmetic, which inside a loop is another one's."""
    if value.number is not None and not value.leaves:
        return value
    return Entry(dtype=value.dtype, leaves=value.leaves, causes=value.causes)


def _joined(values: list[Entry]) -> Entry:
    leaves = frozenset().union(*(value.leaves for value in values))
    causes = frozenset().union(*(value.causes for value in values))
    return Entry(dtype=values[0].dtype, leaves=leaves, causes=causes)


def _same(after: list[Entry], before: list[Entry]) -> bool:
    """True if nothing new reaches a loop's carry; causes compare by text, since choices are new."""
    pairs = zip(after, before, strict=True)
    return all(a.leaves == b.leaves and _plain(a) == _plain(b) for a, b in pairs)


def _plain(value: Entry) -> set:
    return {(cause.text, cause.leaves) for cause in value.causes}


def _not_stopped(value: Entry) -> Entry:
    causes = frozenset(cause for cause in value.causes if cause.text != "stop_gradient")
    return dataclasses.replace(value, causes=causes)


def _is_normaliser(value: Entry) -> bool:
    """True for a largest entry, which a log-sum-exp stops: its sums do not depend on it."""
    names = {part.name for part in _within(value)}
    return bool(names & {"reduce_max", "cummax", "pmax"})


def _chosen_by(choice: Entry, value: Entry, text: str) -> Entry:
    causes = value.causes
    if choice.leaves:
        causes |= {Cause(text=text, leaves=choice.leaves)}
    leaves = value.leaves | choice.leaves
    return Entry(dtype=value.dtype, leaves=leaves, causes=causes)


def _identity(value: Entry) -> tuple:
    if value.number is not None:
        return (str(value.dtype), value.number.item())
    return id(value), value  # the value stays alive, so that its id stays its own


def _text(params: dict) -> str:
    return str(sorted((name, str(item)) for name, item in params.items()))


def _is_jump(equation: JaxprEqn, aval: ShapedArray) -> bool:
    name = equation.primitive.name
    if name == "sort":
        return len(equation.invars) > 1  # what is sorted along jumps; the sorted values do not
    if name in JUMPS:
        return True
    is_float = jnp.issubdtype(aval.dtype, jnp.inexact)
    return name == "convert_element_type" and not is_float


def _jump_text(name: str, aval: ShapedArray) -> str:
    if name == "convert_element_type":
        return f"a cast to {aval.dtype}"
    return name


def _called_name(equation: JaxprEqn) -> str:
    inner = called(equation)[0] if equation.primitive.name in CALLS else None
    info = getattr(inner, "debug_info", None)
    return getattr(info, "func_name", equation.primitive.name) or equation.primitive.name


def _primal_relations(equation: JaxprEqn, moved: list[int]) -> list[Relation]:
    """Returns which of the `moved` operands each result depends on."""
    seeds: list[Relation] = [{} for _ in equation.invars]
    for position in moved:
        seeds[position] = {position: tuple(range(array_of(equation.invars[position]).ndim))}
    if equation.primitive.name in CALLS:
        return relations(called(equation)[0], seeds)
    every = {position: () for position in moved}
    return [dict(every) for _ in equation.outvars]


def _derivative_relations(equation: JaxprEqn, moved: list[int]) -> list[Relation]:
    """Returns which of the `moved` operands the derivative of each result depends on."""
    arguments = [array_of(atom) for atom in equation.invars]
    is_float = [jnp.issubdtype(array_of(var).dtype, jnp.inexact) for var in equation.outvars]

    def derivative(seeds, arguments):
        def at(*floats):
            filled = list(arguments)
            for position, leaf in zip(moved, floats, strict=True):
                filled[position] = leaf
            out = evaluate_equation(equation, filled)
            return [leaf for leaf, keep in zip(out, is_float, strict=True) if keep]

        return jax.jvp(at, tuple(arguments[position] for position in moved), tuple(seeds))[1]

    seeds = [arguments[position] for position in moved]
    closed = jax.make_jaxpr(derivative)(seeds, arguments)
    entering: list[Relation] = [{} for _ in closed.jaxpr.invars]
    for number, position in enumerate(moved):
        entering[number] = {position: tuple(range(seeds[number].ndim))}
    found = iter(relations(closed.jaxpr, entering))
    # A result that is no float has no derivative; casts say so where it becomes a float again.
    every: Relation = {position: () for position in moved}
    return [next(found) if keep else every for keep in is_float]


# --- Whether a select is continuous -----------------------------------------------------------------


def _power(equation: JaxprEqn) -> Callable:
    return lambda x: np.power(x, equation.params["y"])


def _rounded(equation: JaxprEqn) -> Callable:
    if int(equation.params["rounding_method"]) == 1:
        return np.round
    return lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5)


def _cast(equation: JaxprEqn) -> Callable:
    dtype = equation.params["new_dtype"]
    if dtype == jnp.bool_:
        return lambda x: np.asarray(x) != 0
    if jnp.issubdtype(dtype, jnp.integer):
        return np.trunc
    return lambda x: np.asarray(x, np.float64)


def _choose(which: np.ndarray, *branches: np.ndarray) -> np.ndarray:
    number = np.asarray(which, np.int64)
    rows = np.broadcast_arrays(number, *branches)
    return np.choose(rows[0], rows[1:])


_SAME = frozenset(
    "broadcast_in_dim copy copy_p expand_dims reshape squeeze transpose pcast pvary".split()
)

_NUMPY: dict[str, Callable] = {
    "abs": np.abs, "acos": np.arccos, "acosh": np.arccosh, "add": np.add, "add_any": np.add,
    "and": np.logical_and, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atan2": np.arctan2, "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil,
    "clamp": lambda low, x, high: np.clip(x, low, high), "cos": np.cos, "cosh": np.cosh,
    "div": np.divide, "eq": np.equal, "erf": special.erf, "erf_inv": special.erfinv,
    "erfc": special.erfc, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor,
    "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal,
    "lgamma": special.gammaln, "digamma": special.digamma, "log": np.log, "log1p": np.log1p,
    "logistic": special.expit, "lt": np.less, "max": np.maximum, "min": np.minimum,
    "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "not": np.logical_not,
    "or": np.logical_or, "pow": np.power, "rem": np.fmod, "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": _choose, "sign": np.sign, "sin": np.sin, "sinh": np.sinh, "sqrt": np.sqrt,
    "square": np.square, "stop_gradient": lambda x: x, "sub": np.subtract, "tan": np.tan,
    "tanh": np.tanh, "xor": np.logical_xor,
}  # fmt: skip

_WITH_PARAMS = {"integer_pow": _power, "round": _rounded, "convert_element_type": _cast}


def _evaluator(equation: JaxprEqn) -> Callable | None:
    """Returns the NumPy function of one entry; None for what mixes entries or is not known."""
    name = equation.primitive.name
    if name in _SAME:
        return lambda x, *_: x
    if name in _WITH_PARAMS:
        return _WITH_PARAMS[name](equation)
    is_boolean = all(array_of(atom).dtype == jnp.bool_ for atom in equation.invars)
    if name in ("and", "or", "not", "xor") and not is_boolean:
        return None
    return _NUMPY.get(name)


def _within(*targets: Entry) -> Iterator[Entry]:
    """Yields every value that the targets are computed from, entry by entry."""
    seen: set[int] = set()
    stack = list(targets)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if value.evaluate is not None:
            stack.extend(value.operands)


class _Lines:
    """Lines through the space of all numbers that a select is computed from."""

    def __init__(self, targets: tuple[Entry, ...]):
        draw = np.random.default_rng(0)
        region = list(_within(*targets))
        sizes = [abs(float(v.number)) for v in region if _is_number(v)]
        self.sizes = np.array([size for size in sizes if np.isfinite(size) and size] or [1.0])
        self.start: dict[int, np.ndarray] = {}
        self.stop: dict[int, np.ndarray] = {}
        for value in region:
            if value.evaluate is None and value.number is None:
                first = self._draw(draw, value)
                second = first
                if value.leaves and jnp.issubdtype(value.dtype, jnp.inexact):
                    second = self._draw(draw, value)
                self.start[id(value)] = first
                self.stop[id(value)] = second

    def _draw(self, draw: np.random.Generator, value: Entry) -> np.ndarray:
        """Returns numbers of many sizes, half of them near the constants of the program."""
        if value.dtype == jnp.bool_:
            return draw.integers(0, 2, DRAWS).astype(bool)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return draw.integers(-2, 6, DRAWS)
        plain = draw.standard_normal(DRAWS) * 10.0 ** draw.uniform(-2, 2, DRAWS)
        near = draw.choice(self.sizes, DRAWS) * (1 + draw.standard_normal(DRAWS))
        return np.where(draw.random(DRAWS) < 0.5, plain, near)

    def at(self, where: np.ndarray) -> dict[int, np.ndarray]:
        """Returns the numbers at a fraction of the way along each line."""
        out = {}
        for key, first in self.start.items():
            last = self.stop[key]
            if first.dtype.kind == "f":
                out[key] = first + (last - first) * where
            else:
                out[key] = first
        return out

    def value(self, target: Entry, where: np.ndarray, forced: dict | None = None) -> np.ndarray:
        """Returns a value on every line."""
        memo = self.at(where) | (forced or {})
        with np.errstate(all="ignore"):
            return np.broadcast_to(_number(target, memo), (DRAWS,))

    def switches(self, test: Callable[[np.ndarray], np.ndarray], rounds: int):
        """Returns the points just before and after the test's value changes, and where it does."""
        low = np.zeros(DRAWS)
        high = np.ones(DRAWS)
        before = test(low)
        is_found = before != test(high)
        for _ in range(rounds):
            middle = (low + high) / 2
            is_same = test(middle) == before
            low = np.where(is_same, middle, low)
            high = np.where(is_same, high, middle)
        return low, high, is_found


def _is_number(value: Entry) -> bool:
    return value.number is not None and np.issubdtype(type(value.number), np.number)


def _number(value: Entry, memo: dict[int, np.ndarray]) -> np.ndarray:
    if id(value) not in memo:
        if value.number is not None:
            memo[id(value)] = np.asarray(value.number, np.float64 if _is_number(value) else bool)
        else:
            assert value.evaluate is not None  # all others are drawn
            operands = [_number(operand, memo) for operand in value.operands]
            memo[id(value)] = value.evaluate(*operands)
    return memo[id(value)]


def _is_continuous(choice: Entry, result: Entry) -> bool:
    """True if a select's result does not jump where its choice changes; False where that is unclear."""
    lines = _Lines((choice, result))
    points = [value for value in _within(choice) if value.name in ("eq", "ne")]
    points = [value for value in points if value.operands[0] is not value.operands[1]]
    points = [value for value in points if value.leaves]
    points = [value for value in points if not any(map(_is_infinite, value.operands))]

    def has_jump(test: Callable[[np.ndarray], np.ndarray]) -> bool | None:
        """Returns whether the result jumps where a test changes; None where it never does."""
        low, high, is_found = lines.switches(test, 52)
        # Outside of a branch's domain there is nothing to compare.
        is_found = is_found & np.isfinite(_gap(lines, result, low, high))
        if not is_found.any():
            return None
        wide = lines.switches(test, 36)
        gap = _gap(lines, result, low, high)
        earlier = _gap(lines, result, wide[0], wide[1])
        with np.errstate(all="ignore"):
            scale = np.abs(lines.value(result, np.zeros(DRAWS)))
            scale = np.fmax(scale, np.abs(lines.value(result, np.ones(DRAWS))))
            is_small = (gap <= 1e-12 * scale) | (gap <= 0.5 * earlier) | (gap == 0)
        return bool((is_found & ~is_small).any())

    jump = has_jump(lambda where: lines.value(choice, where))
    if jump:
        return False
    if not points:
        # Without a change on any line, only tests for NaN and infinity may be left.
        return jump is False or _is_guard(choice)
    return all(_meets(lines, result, point) for point in points)


def _gap(lines: _Lines, result: Entry, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    a = np.asarray(lines.value(result, low), np.float64)
    b = np.asarray(lines.value(result, high), np.float64)
    with np.errstate(all="ignore"):
        return np.abs(a - b)


def _is_guard(choice: Entry) -> bool:
    """True if a choice hangs on nothing but tests for NaN and infinity."""
    tests = [
        value for value in _within(choice) if value.name in ("eq", "ne", "ge", "gt", "le", "lt")
    ]
    same = [value for value in tests if value.operands[0] is value.operands[1]]
    others = [value for value in tests if value.operands[0] is not value.operands[1]]
    infinite = [
        value for value in others if any(_is_infinite(operand) for operand in value.operands)
    ]
    kinds = {value.name for value in _within(choice)}
    return len(same) + len(infinite) == len(tests) and (bool(tests) or "is_finite" in kinds)


def _is_infinite(value: Entry) -> bool:
    return _is_number(value) and np.isinf(value.number)


def _meets(lines: _Lines, result: Entry, point: Entry) -> bool:
    """True if the result at a point of equality is its limit from both sides."""
    left, right = point.operands

    def test(where):
        difference = lines.value(left, where) - lines.value(right, where)
        return difference > 0

    forced = {id(point): np.full(DRAWS, point.name == "eq")}
    low, high, is_found = lines.switches(test, 52)
    is_compared = np.zeros(DRAWS, bool)
    is_apart = np.zeros(DRAWS, bool)
    with np.errstate(all="ignore"):
        scale = np.abs(lines.value(result, np.zeros(DRAWS)))
        scale = np.fmax(scale, np.abs(lines.value(result, np.ones(DRAWS))))
        for side in (low, high):
            gap = np.abs(lines.value(result, side) - lines.value(result, side, forced))
            is_known = is_found & np.isfinite(gap)
            is_compared |= is_known
            is_apart |= is_known & (gap > 1e-6 * scale)
    return bool(is_compared.any() and not is_apart.any())
