"""Maps for `tours.py`: uniform, in clusters, with demands, or read from a text in the format of TSPLIB."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, Positive, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Generator, Given, check_generator

__all__ = ["Cities", "Clustered", "Customers", "Demands", "Uniform", "tsplib"]


@flax.struct.dataclass
class Cities:
    """`place` float32 `[N, 2]`; a tour starts at the first."""

    place: Array


@flax.struct.dataclass
class Customers(Cities):
    """Cities with `demand` int32 `[N]`, 0 at the depot, which is the first, and `capacity` int32 `[]` of a vehicle."""

    demand: Array
    capacity: Array


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Places uniform in the unit square."""

    num_places: int = field(20, AtLeast(2))
    __post_init__ = check_fields

    def __call__(self, key: PRNGKey) -> Cities:
        """Draws; consumes `key`."""
        return Cities(jax.random.uniform(key, (self.num_places, 2)))


@dataclasses.dataclass(frozen=True)
class Clustered:
    """Places around centres that are uniform in the unit square, normal with `spread`, held within the square."""

    num_places: int = field(20, AtLeast(2))
    num_clusters: int = field(4, AtLeast(1))
    spread: float = field(0.07, Positive())
    __post_init__ = check_fields

    def __call__(self, key: PRNGKey) -> Cities:
        """Draws; consumes `key`."""
        center_key, which_key, noise_key = jax.random.split(key, 3)
        centers = jax.random.uniform(center_key, (self.num_clusters, 2))
        which = jax.random.randint(which_key, (self.num_places,), 0, self.num_clusters)
        noise = self.spread * jax.random.normal(noise_key, (self.num_places, 2))
        return Cities(jnp.clip(centers[which] + noise, 0, 1))


@dataclasses.dataclass(frozen=True)
class Demands:
    """Makes customers of the places of another generator: demands uniform from 1 to `most`, the first is the depot."""

    places: Generator = Uniform(21)
    capacity: int = field(30, AtLeast(1))
    most: int = field(9, AtLeast(1))

    def __post_init__(self) -> None:
        """Refuses vehicles that cannot carry what one customer asks for."""
        check_fields(self)
        check_generator("Demands", self.places, Cities, "Uniform, Clustered")
        if self.capacity < self.most:
            raise UsageError(
                f"a vehicle of capacity={self.capacity} cannot carry a demand of most={self.most}"
            )

    def __call__(self, key: PRNGKey) -> Customers:
        """Draws; consumes `key`."""
        place_key, demand_key = jax.random.split(key)
        place = self.places(place_key).place
        demand = jax.random.randint(demand_key, place.shape[:1], 1, self.most + 1)
        return Customers(place, demand.at[0].set(0), jnp.int32(self.capacity))


def tsplib(*texts: str) -> Given:
    """A generator of the instances in texts in the format of TSPLIB and CVRPLIB (Reinelt, 1991), all of one size.

    Reads EUC_2D coordinates, and of CVRP demands, the capacity and the depot, which becomes place 0; take
    `Tours(tsplib(text), rounded=True)` for its lengths.

    Raises:
        UsageError: a text is of another kind, or incomplete, or one demand exceeds the capacity.
    """
    return Given.of(*map(_read, texts))


def _read(text: str) -> Cities:
    said: dict[str, str] = {}
    tables: dict[str, list[list[float]]] = {}
    rows: list[list[float]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == "EOF":
            break
        if line.rstrip(" :").endswith("_SECTION"):
            rows = tables.setdefault(line.rstrip(" :"), [])
        elif ":" in line:
            name, value = line.split(":", 1)
            said[name.strip()] = value.strip()
        else:
            try:
                rows.append([float(word) for word in line.split()])
            except ValueError:
                raise UsageError(f"TSPLIB's sections hold numbers, not {line!r}") from None
    if said.get("EDGE_WEIGHT_TYPE") != "EUC_2D":
        raise UsageError(
            f"only EDGE_WEIGHT_TYPE EUC_2D is read, not {said.get('EDGE_WEIGHT_TYPE')}"
        )
    places = tables.get("NODE_COORD_SECTION", [])
    count = said.get("DIMENSION", "none")
    if str(len(places)) != count or any(len(row) != 3 for row in places):
        raise UsageError(
            f"NODE_COORD_SECTION must have DIMENSION = {count} rows of a number, x and y; it has {len(places)}"
        )
    numbers = [row[0] for row in places]
    place = np.array([row[1:] for row in places], np.float32)
    if said.get("TYPE", "TSP").split()[0] == "TSP":
        return Cities(place)
    demands = {row[0]: row[1] for row in tables.get("DEMAND_SECTION", []) if len(row) == 2}
    depots = [row[0] for row in tables.get("DEPOT_SECTION", []) if row and row[0] != -1]
    if (
        set(demands) != set(numbers)
        or len(depots) != 1
        or depots[0] not in demands
        or "CAPACITY" not in said
    ):
        raise UsageError("a CVRP has a CAPACITY, a demand for every node, and one depot among them")
    capacity, first = int(said["CAPACITY"]), numbers.index(depots[0])
    order = [first, *(i for i in range(len(numbers)) if i != first)]
    demand = np.array([demands[numbers[i]] for i in order], np.int32)
    if demand[0] != 0 or demand.min() < 0 or demand.max() > capacity:
        raise UsageError(
            f"demands must be from 0 to the capacity, {capacity}, and 0 at the depot, not {demand.tolist()}"
        )
    return Customers(place[order], demand, np.int32(capacity))
