"""What TPU programs of attention over a split sequence send is what its table says; kernels take pairs of parts."""

import json
import math
import sys

import jax
import pytest
from compiled import needs_libtpu, on_a_tpu
from context_arrays import B, H
from context_programs import bytes_said, bytes_sent, compiled

from jaxpar.aot import hlo
from jaxpar.nn.attention.context import Sizes, move_for

BY_PLACES = {
    "gather": ["all-gather", "reduce-scatter"],
    "ring": ["collective-permute"],
    "two_way": ["collective-permute"],
    "token_ring": ["collective-permute"],
    "swap": ["all-gather", "all-to-all"],
    "swap_ring": ["all-gather", "all-to-all", "collective-permute"],
}
BY_TABLE = {  # which needs no places, and takes kernels
    "gather": ["all-gather", "reduce-scatter", "splash"],
    "ring": ["collective-permute", "splash"],
    "two_way": ["collective-permute", "splash"],
    "token_ring": ["collective-permute", "splash"],
    "swap": ["all-to-all", "splash"],
    "swap_ring": ["all-to-all", "collective-permute", "splash"],
}


def for_a_tpu(by_places, by_table):
    from jaxpar.aot import devices, parse_topology

    slice_of_eight, found = devices(parse_topology("v5e:2x4")), ({}, {})
    for move, is_table in [(move, False) for move in by_places.split()] + [
        (move, True) for move in by_table.split()
    ]:
        sizes = {"groups": 4, "context": 4} if move == "swap" else {}
        length = (
            (4096 if move == "two_way" else 2048) if is_table else 512
        )  # parts of the kernel's 128 tokens
        options = {
            "width": 128,
            "devices": slice_of_eight,
            "jit": jax.jit,
            "order": "zigzag" if is_table else None,
        }
        program, mesh = compiled(move, True, length, **options, **sizes)
        text = program.as_text()
        every = hlo.collectives(text, mesh)
        kernels = (
            {"splash"} if "splash_mha_fwd_residuals" in text and "splash_mha_dkv" in text else set()
        )
        # Dense products take bfloat16, which is then what is gathered for them: numbers are compared.
        shares, groups = (4, 4) if move == "swap" else (8, 2)
        table = move_for(move, shares, groups if move == "swap_ring" else 1)
        share = Sizes(B * shares // 8, length // shares, H, groups, 128, 4)
        said = sum(
            bytes_said(table, share, backward, options["order"]) for backward in (False, True)
        )
        found[is_table][move] = (
            sorted({each.kind for each in every} | kernels),
            bytes_sent(every, table),
            said,
        )
    return found


@needs_libtpu
@pytest.mark.parametrize(
    ("by_places", "by_table"),
    [
        ("gather two_way token_ring swap swap_ring", "ring"),
        # In two, since all at once were over five minutes beside ten other processes.
        pytest.param("ring", "gather two_way", marks=pytest.mark.slow),
        pytest.param("", "token_ring swap swap_ring", marks=pytest.mark.slow),
    ],
)
def test_a_tpu_sends_what_the_table_says_and_takes_splash(by_places, by_table):
    found = on_a_tpu(__file__, by_places, by_table)
    for moves, each, kinds in zip((by_places, by_table), found, (BY_PLACES, BY_TABLE), strict=True):
        assert {move: made[0] for move, made in each.items()} == {
            move: kinds[move] for move in moves.split()
        }
        for move, (_, sent, said) in each.items():
            assert math.isclose(sent, said), (move, sent, said)


if __name__ == "__main__":
    print(json.dumps(for_a_tpu(*sys.argv[1:])))
