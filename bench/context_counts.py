"""What does attention over a split sequence send and multiply, by move? Counted in compiled programs; nothing runs.

    python bench/context_counts.py                            # eight simulated CPU devices
    python bench/context_counts.py --topology v5e:2x4         # eight TPU chips that are not here, by libtpu's compiler
    python bench/context_counts.py --tiny                     # small shapes: checks that the script runs

Forward and backward of one layer's causal attention, zigzag order promised. "said" are the bytes that a device sends
by `move_for(...).bytes`, in both passes over the links up and down and by collectives of all; "compiled" those of the
program's collectives. On CPUs numbers are float32, as which they would send bfloat16, too. Products are those of a
device, of which T^2 H K operations make 1: what is seen is (2 + 5)/N. Those of a kernel are its own estimate.
"""

import argparse
import functools
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from context_rows import sent  # noqa: E402

FULL = dict(length=65536, heads=32, width=128, dtype="float32")
TINY = dict(length=256, heads=16, width=8, dtype="float32")


def said(move: str, shape: dict, groups: int, shares: int) -> dict[str, float]:
    """Returns the bytes of both passes by a move's table; a table of pairs sends no places, 8 bytes a token."""
    from jaxpar.nn.attention.context import Sizes, move_for

    within = math.gcd(groups, shares) if move == "swap_ring" else 1
    table, size = move_for(move, shares, within), {"bfloat16": 2, "float32": 4}[shape["dtype"]]
    sizes = Sizes(1, shape["length"] // shares, shape["heads"], groups, shape["width"], size)
    none = sizes._replace(heads=0, groups=0)  # places alone
    passes = [(table.bytes(sizes, back), table.bytes(none, back)) for back in (False, True)]
    return {
        link: sum(whole[link] - places[link] for whole, places in passes) for link in passes[0][0]
    }


def counted(move: str, shape: dict, groups: int, devices: list) -> dict:
    """Returns what the compiled program sends, its products, kernels and temporary memory."""
    import jax

    from jaxpar.aot import count_flops
    from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
    from jaxpar.nn.attention.context import context_attention

    sizes = shape["heads"], groups, groups, shape["heads"]
    arrays = [
        jax.ShapeDtypeStruct((1, shape["length"], n, shape["width"]), shape["dtype"]) for n in sizes
    ]
    arrays.append(jax.ShapeDtypeStruct((1, shape["length"]), "int32"))
    axes = [("batch", "seq_layer", None, None)] * 4 + [("batch", "seq_layer")]

    def both(q, k, v, g, positions):
        attend = functools.partial(context_attention, move=move, order="zigzag")
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, positions), q, k, v)
        return out, *pull(g)

    mesh = make_mesh(MeshSpec(context=len(devices)), devices)
    with use_mesh(mesh):
        args = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            for x, where in zip(arrays, named_shardings(arrays, axes), strict=True)
        ]
        flops = count_flops(both, *args).total
        program = jax.jit(both).lower(*args).compile()
    text = program.as_text()
    unit = shape["length"] ** 2 * shape["heads"] * shape["width"]
    return {
        "compiled": sent(text, mesh, math.gcd(groups, len(devices)) if move == "swap_ring" else 0),
        "products": flops / unit / len(devices),
        "kernel": "splash" if "splash_mha" in text else "dense",
        "temporary": program.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    """Parses flags, counts and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--topology", help="chips that are not here, as v5e:2x4; by default eight CPU devices"
    )
    parser.add_argument(
        "--groups", default="32,8", help="numbers of key heads, of 32 heads (of --tiny 16)"
    )
    parser.add_argument("--moves", help="by default all")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    from jaxpar.mesh import simulate_devices

    simulate_devices(8)
    import jax

    from jaxpar.aot import devices, parse_topology
    from jaxpar.nn.attention.context import MOVES

    chips = devices(parse_topology(args.topology)) if args.topology else jax.devices("cpu")
    shape = (TINY if args.tiny else FULL) | ({"dtype": "bfloat16"} if args.topology else {})
    print(f"{len(chips)} x {chips[0].device_kind}, jax {jax.__version__}, {shape}; MiB a device\n")
    names = (
        "move",
        "key heads",
        "up",
        "down",
        "all",
        "said",
        "compiled",
        "products",
        "kernel",
        "temporary GiB",
    )
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|", flush=True)
    for groups in map(int, args.groups.split(",")):
        for move in args.moves.split(",") if args.moves else MOVES:
            links, found = (
                said(move, shape, groups, len(chips)),
                counted(move, shape, groups, chips),
            )
            sizes = [
                f"{size / 2**20:,.2f}"
                for size in (*links.values(), sum(links.values()), found["compiled"])
            ]
            rest = f"{found['products']:.3f}", found["kernel"], f"{found['temporary'] / 2**30:.3f}"
            print(f"| {' | '.join((move, str(groups), *sizes, *rest))} |", flush=True)


if __name__ == "__main__":
    main()
