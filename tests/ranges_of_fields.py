"""Ranges of numbers of configurations: what is illegal just outside of one, and what is legal at its ends."""

import math

NAN, INF = math.nan, math.inf
COUNT = (0, -1), (1,)
PAIR = (1, 0), (2,)
LEAST_0 = (-1,), (0,)
LEAST_MINUS_1 = (-2,), (-1, 0)
FRACTION_FROM_0 = (-1e-9,), (0.0,)
POSITIVE = (0.0, -1.0), (1e-30,)
FACTOR = (0.0, 0.5), (1.0,)
SHARE = (-0.1, 1.1), (0.0, 1.0)
UNDER_1 = (-0.1, 1.0), (0.0,)
OVER_0 = (0.0, 1.1), (1.0,)
OPEN = (0.0, 1.0), (0.5,)
AXIS = (0, -2), (-1, 1)
SEED = (-1, 2**32), (0, 2**32 - 1)
VIEW = (1, 2, 33), (0, 3, 31)
SIGNED = (), (-5, 0)
UNBOUNDED = (), (INF, -INF, 0.0)
