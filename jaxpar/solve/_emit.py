"""From a cell's jaxpr to Triton statements: any function that treats its lanes alike runs inside a kernel.

A lane is one element of the carry's shape. Arrays of that shape, of a suffix of it (parameters [n]
under a carry [B, n]) and scalars are tiles that broadcast; what would move values between lanes has
no place here and is refused.
"""

import math

import jax.numpy as jnp
from jax.core import Tracer

from jaxpar.lower.jaxprs import CALLS, interpret

BINARY = {"add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/"} | {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
UNARY = {
    **{
        name: f"tl.{name}({{0}})"
        for name in ("exp", "exp2", "log", "sqrt", "rsqrt", "sin", "cos", "abs", "erf")
    },
    **{name: f"libdevice.{name}({{0}})" for name in ("log1p", "expm1")},
    **{name: f"{name}({{0}})" for name in ("logistic", "tanh")},
    **dict.fromkeys(
        ("copy", "stop_gradient", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"), "{0}"
    ),
    "neg": "-({0})",
    "not": "~({0})",
    "square": "({0} * {0})",
    "one_minus_square": "(1.0 - {0} * {0})",
    "is_finite": "(tl.abs({0}) < float('inf'))",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",  # of zero and of NaN itself, as in JAX
}
# Triton's own maximum drops a NaN, and JAX's keeps it.
LARGER, SMALLER = (
    f"tl.{name}({{}}, {{}}, propagate_nan=tl.PropagateNan.ALL)" for name in ("maximum", "minimum")
)
SEVERAL = {
    "max": LARGER.format("{0}", "{1}"),
    "min": SMALLER.format("{0}", "{1}"),
    "clamp": SMALLER.format(LARGER.format("{1}", "{0}"), "{2}"),
    "pow": "libdevice.pow({0}, {1})",
    "select_n": "tl.where({0}, {2}, {1})",
}

FUNCTIONS = """from triton.language.extra.cuda import libdevice


@triton.jit
def logistic(x):
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    far = 1.0 - libdevice.fast_dividef(2.0, 1.0 + tl.exp(2.0 * tl.abs(x)))
    s = x * x
    near = -0.006276379805058241 * s + 0.021116208285093307
    near = (near * s - 0.053875137120485306) * s + 0.13332924246788025
    near = x + x * s * (near * s - 0.3333333134651184)
    return tl.where(tl.abs(x) < 0.6, near, tl.where(x < 0, -far, far))
"""
"""What a step waits for longest, without branches: relative errors under 3e-7.

The polynomial is a Chebyshev fit of (tanh(x) / x - 1) / x^2 over x^2 in [0, 0.36].
"""


class NotElementwise(Exception):
    """The function moves values between lanes, or uses what a kernel does not have."""


def statements(
    closed, inputs: list[str], prefix: str, lanes: tuple[int, ...]
) -> tuple[list[str], list[str]]:
    """Writes the equations of a closed jaxpr as statements.

    Args:
      closed: The `ClosedJaxpr`, without array constants.
      inputs: A variable or expression for each of its arguments.
      prefix: Of the variables that are made.
      lanes: The shape that stands for one element a lane.

    Returns:
      The statements and an expression for each result.

    Raises:
      NotElementwise: With the reason.
    """
    lines: list[str] = []

    def rule(equation, values):
        name = equation.primitive.name
        for var in equation.outvars:
            # Also of calls, which are opened below: what goes into one and out of it are tiles, too.
            _check_shape(name, var.aval.shape, lanes)
            _check_dtype(name, var.aval.dtype)
        if name in CALLS:
            return None
        result = f"{prefix}{len(lines)}"
        lines.append(f"{result} = {_expression(name, values, equation)}")
        return [result]

    return lines, interpret(
        closed.jaxpr, closed.consts, inputs, rule, lambda value, _: _number(value)
    )


def _expression(name: str, values: list[str], equation) -> str:
    into = equation.outvars[0].aval
    if name in ("broadcast_in_dim", "reshape"):
        _check_move(name, equation.invars[0].aval.shape, into.shape, equation.params)
    if name == "convert_element_type":
        was_bool, is_bool = (aval.dtype == jnp.bool_ for aval in (equation.invars[0].aval, into))
        if was_bool == is_bool:  # among floats nothing is rounded: tiles are float32
            return values[0]
        return f"({values[0]} != 0)" if is_bool else f"({values[0]}).to(tl.float32)"
    if name == "select_n" and len(values) != 3:
        raise NotElementwise("it selects among more than two values")
    if name == "integer_pow":  # a product, as XLA makes it, and no call of pow
        power = equation.params["y"]
        product = " * ".join([values[0]] * abs(power)) or "1.0"
        return f"({product})" if power >= 0 else f"(1.0 / ({product}))"
    if name in BINARY:
        return f"({values[0]} {BINARY[name]} {values[1]})"
    if name in UNARY or name in SEVERAL:
        return (UNARY | SEVERAL)[name].format(*values)
    raise NotElementwise(f"it uses {name}")


def _check_move(name: str, before: tuple[int, ...], after: tuple[int, ...], params: dict):
    """Refuses what does not leave every value in its lane."""
    if name == "reshape":
        moves = trimmed(before) != trimmed(after)  # leading ones may come and go
    else:
        # An axis may be added in front or stretched from 1; one that lands elsewhere would give a lane another's value.
        skipped, places = len(after) - len(before), params["broadcast_dimensions"]
        moves = any(
            size != 1 and place != i + skipped
            for i, (size, place) in enumerate(zip(before, places, strict=True))
        )
    if moves:
        raise NotElementwise(
            f"{name} makes {after} of {before}, which is neither like the carry nor like its last axes"
        )


def _check_shape(name: str, shape: tuple[int, ...], lanes: tuple[int, ...]):
    tail = trimmed(shape)
    if tail != lanes[len(lanes) - len(tail) :]:
        raise NotElementwise(
            f"{name} makes shape {shape}, which is neither that of the carry {lanes} nor of its last axes"
        )


def _check_dtype(name: str, dtype):
    """Refuses integers, whose division and width differ, and what is wider than a tile."""
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.bool_):
        raise NotElementwise(f"{name} makes {dtype}, and kernels compute with float32")


def trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its leading ones."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _number(value) -> str:
    if isinstance(value, Tracer) or jnp.ndim(value):
        raise NotElementwise("it holds an array constant")
    if jnp.issubdtype(jnp.result_type(value), jnp.floating):
        number = float(value)
        # Triton's text has no literal for what is not finite.
        return repr(number) if math.isfinite(number) else f"float('{number}')"
    return repr(int(value))
