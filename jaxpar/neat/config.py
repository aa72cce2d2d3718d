"""Configuration of an evolution: sizes and kinds, which compile, and rates, which can be swept."""

import dataclasses
import math
import numbers

import flax.struct

from jaxpar.fields import AtLeast, Between, Each, OneOf, Positive, check_fields, field
from jaxpar.neat.functions import (
    ACTIVATIONS,
    AGGREGATIONS,
    Activation,
    check_distinct,
    check_names,
    check_own,
)
from jaxpar.neat.modes import MODES, ModeRules
from jaxpar.types import Scalar, UsageError

__all__ = ["CANONICAL", "FAST", "NeatConfig", "Rates"]

KINDS = ("feedforward", "recurrent", "ctrnn")
ATTRIBUTES = ("bias", "response", "time_constant")


@flax.struct.dataclass
class Rates:
    """Every number that a generation reads: floats here, float32 scalars in a state, so a sweep is a `vmap`.

    Chances are of a child unless said otherwise. The defaults are those of the mode "fast".

    Attributes:
        weights: chance that the weights mutate at all.
        weight_perturb: then, chance of a gene that its weight takes a step.
        weight_replace: then, chance of a gene that its weight is replaced by a random one.
        weight_power: size of a step: standard deviation ("fast") or half-width ("canonical").
        weight_init: size of a new weight, likewise.
        weight_limit: weights, biases and responses stay within plus and minus this.
        node_perturb: chance of a node that an evolved attribute takes a step.
        node_replace: chance of a node that an evolved attribute is replaced by a random one.
        node_power: size of a step of an attribute.
        bias_init: size of a new bias, where biases evolve.
        redraw: chance of a node that its activation, and that its aggregation, is replaced by a random one.
        add_node: chance to split a connection.
        add_conn: chance to add a connection, if no node was added.
        del_node: chance to delete a hidden node, if nothing was added.
        del_conn: chance to delete a connection, if none of the above.
        toggle: chance to flip one connection's `enabled`.
        reenable: chance to enable the first disabled connection.
        excess: coefficient c1 of the distance.
        disjoint: coefficient c2.
        difference: coefficient c3, of the mean difference of matching weights.
        small: distances of genomes with fewer connections than this are not divided by their size.
        threshold: genomes nearer than this are of one species.
        survival: share of a species that may be parents.
        mutate_only: chance of a single parent.
        mate_only: chance that a child of two parents is not mutated.
        interspecies: chance that the second parent is another species' champion.
        disable: chance that a gene disabled in either of two parents is disabled; it is enabled otherwise.
        average: chance that a child takes the mean of both weights of each matching gene.
        champion: species larger than this keep their champions unchanged.
        stagnation: generations without progress after which a species is stale.
        stale: share of its fitness that counts for a stale species' offspring; of 0 it has none.
        stall: generations without progress of all after which only the two best species have offspring.
        target: fitness that ends the search; out of reach by default.
    """

    weights: Scalar = field(1.0, Between(0, 1))
    weight_perturb: Scalar = field(0.8, Between(0, 1))
    weight_replace: Scalar = field(0.1, Between(0, 1))
    weight_power: Scalar = field(0.5, AtLeast(0))
    weight_init: Scalar = field(1.0, AtLeast(0))
    weight_limit: Scalar = field(30.0, AtLeast(0))
    node_perturb: Scalar = field(0.7, Between(0, 1))
    node_replace: Scalar = field(0.1, Between(0, 1))
    node_power: Scalar = field(0.5, AtLeast(0))
    bias_init: Scalar = field(1.0, AtLeast(0))
    redraw: Scalar = field(0.05, Between(0, 1))
    add_node: Scalar = field(0.1, Between(0, 1))
    add_conn: Scalar = field(0.2, Between(0, 1))
    del_node: Scalar = field(0.05, Between(0, 1))
    del_conn: Scalar = field(0.1, Between(0, 1))
    toggle: Scalar = field(0.01, Between(0, 1))
    reenable: Scalar = field(0.01, Between(0, 1))
    excess: Scalar = field(1.0, AtLeast(0))
    disjoint: Scalar = field(1.0, AtLeast(0))
    difference: Scalar = field(0.5, AtLeast(0))
    small: Scalar = field(0.0, AtLeast(0))
    threshold: Scalar = field(2.0, AtLeast(0))
    survival: Scalar = field(0.2, Between(0, 1))
    mutate_only: Scalar = field(0.25, Between(0, 1))
    mate_only: Scalar = field(0.0, Between(0, 1))
    interspecies: Scalar = field(0.001, Between(0, 1))
    disable: Scalar = field(0.75, Between(0, 1))
    average: Scalar = field(0.0, Between(0, 1))
    champion: Scalar = field(2.0, AtLeast(0))
    stagnation: Scalar = field(15.0, AtLeast(0))
    stale: Scalar = field(0.0, Between(0, 1))
    stall: Scalar = field(1e9, AtLeast(0))
    target: Scalar = field(3e38, Between(-math.inf, math.inf))


FAST = Rates()
"""What the mode "fast" starts from."""

CANONICAL = Rates(
    weights=0.8, weight_perturb=0.9, weight_replace=0.1, weight_power=2.5, weight_init=2.5, weight_limit=1e9,
    add_node=0.03, add_conn=0.05, del_node=0.0, del_conn=0.0, toggle=0.0, reenable=0.0, node_perturb=0.0,
    node_replace=0.0, bias_init=0.0, redraw=0.0, difference=0.4, small=1e9, threshold=3.0, survival=0.2,
    mutate_only=0.25, mate_only=0.2, champion=5.0, stagnation=15.0, stale=0.01,
)  # fmt: skip
"""Stanley and Miikkulainen 2002, section 4.1, for a population of 150.

Where the text is silent, the rates are their program's.
"""

RATES = {"fast": FAST, "canonical": CANONICAL}
"""First rates by the names of the modes."""


@dataclasses.dataclass(frozen=True)
class NeatConfig:
    """Sizes and kinds of an evolution; hashable.

    Attributes:
        num_inputs: I. Inputs are the first node slots.
        num_outputs: O. Outputs follow.
        population: G.
        max_nodes: N, capacity of a genome, inputs and outputs included.
        max_conns: C, capacity of a genome.
        max_species: S; genomes that fit nowhere when all are taken join the nearest.
        mode: "fast", or "canonical": the paper of 2002. It chooses `rules` and what is None below.
        kind: "feedforward", "recurrent" (a step of the network a call, values persist) or "ctrnn".
        activations: functions in use; new nodes start with the first, outputs with `output_activation`.
        output_activation: one of them, of outputs; None means the first. It may still be redrawn.
        aggregations: functions in use; new nodes start with the first.
        evolved: attributes of nodes that mutate, of "bias", "response", "time_constant"; None means
            the bias in the mode "fast" and none in the mode "canonical", where networks get a
            constant input.
        initial: "full" connects every input with every output, "none" nothing.
        time_step: seconds of one step of a "ctrnn".
        sub_steps: steps of a "recurrent" or "ctrnn" network in one call; more reach deeper nodes. A
            "feedforward" network is computed to its end in one.
        rates: first values of the state's rates; None means the mode's.
        widths: node slots of the compiled forms of a network, ascending; the last must be N. () chooses them.
        own_activations: pairs (name, function) that `activations` may name beside those of `jaxpar.neat.functions`. A
            function takes an array and gives a number from each number; it is known by its identity, so another one,
            even of the same name, is compiled again. Files have its name.
    """

    num_inputs: int = field(legal=AtLeast(1))
    num_outputs: int = field(legal=AtLeast(1))
    population: int = field(150, AtLeast(1))
    max_nodes: int = field(50, AtLeast(1))
    max_conns: int = field(100, AtLeast(1))
    max_species: int = field(20, AtLeast(1))
    mode: str = field("fast", OneOf(tuple(MODES)))
    kind: str = field("feedforward", OneOf(KINDS))
    activations: tuple[str, ...] | None = None
    output_activation: str | None = None
    aggregations: tuple[str, ...] = ("sum",)
    evolved: tuple[str, ...] | None = None
    initial: str = field("full", OneOf(("full", "none")))
    time_step: float = field(0.1, Positive())
    sub_steps: int = field(1, AtLeast(1))
    rates: Rates | None = None
    widths: tuple[int, ...] = field((), Each(AtLeast(1)))
    own_activations: tuple[tuple[str, Activation], ...] = ()

    def __post_init__(self):
        """Fills the fields that depend on the mode, and rejects values that are not legal."""
        for name in ("activations", "aggregations", "evolved", "widths", "own_activations"):
            # Lists have no hash.
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))

        check_fields(self)

        self._fill("rates", RATES[self.mode])
        self._fill("activations", self.rules.activations)
        self._fill("evolved", self.rules.evolved)

        self._check_functions()
        self._check_evolved()
        self._check_sizes()
        self._check_steps()
        self._check_rates()

    def _fill(self, name: str, value: object) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_functions(self) -> None:
        check_own(self.own_activations)
        assert self.activations is not None
        known = (*ACTIVATIONS, *dict(self.own_activations))
        check_names(self.activations, known, "activation")
        check_names(self.aggregations, AGGREGATIONS, "aggregation")

        self._fill("output_activation", self.activations[0])
        if self.output_activation not in self.activations:
            raise UsageError(
                f"output_activation={self.output_activation!r} is not among {self.activations}."
            )

    def _check_evolved(self) -> None:
        check_distinct("evolved", self.evolved or ())
        for name in self.evolved or ():
            if name not in ATTRIBUTES:
                raise UsageError(
                    f"evolved: {name!r} is no attribute; legal are {', '.join(ATTRIBUTES)}."
                )

    def _check_steps(self) -> None:
        if self.kind == "feedforward" and self.sub_steps > 1:
            raise UsageError(
                f"sub_steps={self.sub_steps}: a feedforward network is computed to its end in one "
                "step; expected 1, or kind='recurrent' or 'ctrnn'."
            )

    def _check_rates(self) -> None:
        for name, value in vars(self.rates).items():
            if not isinstance(value, numbers.Real):
                raise UsageError(
                    f"rates.{name}={value!r} is no number; arrays of rates go into a state, by "
                    "state.rates.replace."
                )
        check_fields(self.rates, "rates.")

    def _check_sizes(self) -> None:
        if self.max_nodes < self.num_io:
            raise UsageError(
                f"max_nodes={self.max_nodes} is too small for {self.num_inputs} inputs and {self.num_outputs} outputs; "
                f"give at least {self.num_io}."
            )
        needed = self.num_inputs * self.num_outputs
        if self.initial == "full" and self.max_conns < needed:
            raise UsageError(
                f"max_conns={self.max_conns} is too small for the {needed} connections of initial='full'; give at "
                f"least {needed}, or initial='none'."
            )
        if self.widths and (self.widths[-1] != self.max_nodes or sorted(set(self.widths)) != list(self.widths)
                            or self.widths[0] < self.num_io):  # fmt: skip
            raise UsageError(
                f"widths={self.widths} must ascend from at least {self.num_io} to {self.max_nodes}."
            )

    @property
    def rules(self) -> ModeRules:
        """Rules of the mode."""
        return MODES[self.mode]

    @property
    def num_io(self) -> int:
        """I + O."""
        return self.num_inputs + self.num_outputs

    @property
    def activation_functions(self) -> tuple[Activation, ...]:
        """Functions that `activations` name, in their order."""
        assert self.activations is not None
        known = ACTIVATIONS | dict(self.own_activations)
        return tuple(known[name] for name in self.activations)

    @property
    def node_widths(self) -> tuple[int, ...]:
        """`widths`; if there are none, 16, 64, 256, ... between I + O and 2 N / 3, then N."""
        if self.widths:
            return self.widths

        most = self.max_nodes
        widths = [w for w in (16, 64, 256, 1024) if self.num_io <= w and 3 * w <= 2 * most]
        return (*widths, most)
