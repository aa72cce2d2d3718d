"""Layouts as the user types them, and whether a job fits the ambient mesh, told by those flags."""

import dataclasses
import math
import re

import jax

from jaxpar.mesh import LAYOUTS, RULES, MeshSpec, mesh_axes
from jaxpar.pipeline import PIPELINES
from jaxpar.types import PyTree, UsageError
from jaxpar.verify import Layout

LM_AXES = ("batch", "seq", "seq_layer")
"""Logical axes of what a language model computes; those of what it holds are its parameters'."""


def parse_layout(text: str) -> Layout:
    """Reads data2.fsdp4, fsdp4.tensor2/zero2+sequence, or with stages and their schedule stage2.data4/zero2+zb_v."""
    mesh, _, name = text.partition("/")
    spec = _parse_mesh(mesh, text)
    parts = name.split("+") if name else []
    schedules = [part for part in parts if part in PIPELINES]
    if any(part not in (*LAYOUTS, *PIPELINES) for part in parts) or len(schedules) > 1:
        legal = f"{', '.join(LAYOUTS)}; with stages one of {', '.join(PIPELINES)}"
        raise UsageError(f"layout {text!r} has after the slash what is none of {legal}.")
    if schedules and spec.stage == 1:
        raise UsageError(
            f"layout {text!r} has no stages for {schedules[0]}; legal are such as stage2.data4/zb_v."
        )
    changes = [part for part in parts if part not in PIPELINES]
    schedule = schedules[0] if schedules else ""
    return Layout(mesh=spec, name="+".join(changes) or "zero3", schedule=schedule)


def _parse_mesh(mesh: str, text: str) -> MeshSpec:
    """Reads the sizes of a mesh; `text` is the whole layout, for the sentence."""
    sizes = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in mesh.split(".")]
    fields = {field.name for field in dataclasses.fields(MeshSpec)}
    names = [size[1] for size in sizes if size]
    if len(names) < len(sizes) or not fields.issuperset(names) or len(set(names)) < len(names):
        raise UsageError(
            f"layout {text!r} is unknown; legal are sizes such as data2.fsdp4, each once, "
            f"of {', '.join(sorted(fields))}."
        )
    return MeshSpec(**{size[1]: int(size[2]) for size in sizes if size})


def staged(layout: Layout) -> Layout:
    """Returns a layout with stages as a pipeline runs it: each stage holds its own layers; by 1f1b unless it says."""
    if layout.mesh.stage == 1:
        return layout
    name = layout.name
    if "stages" not in name.split("+"):
        name = f"{name}+stages"
    return Layout(mesh=layout.mesh, name=name, schedule=layout.schedule or "1f1b")


def refuse_idle(job: str, axes: PyTree) -> None:
    """Refuses a mesh with an axis over 1 along which nothing of a job is split.

    All devices along such an axis would do the same work.

    Args:
      job: What runs, for the sentence, such as "a language model".
      axes: Pytree of logical axes, of all that the job splits.
    """
    names = {name for name in jax.tree.leaves(axes) if name is not None}
    names |= {f"{name}_{role}" for name in names for role in ("weight", "grad")} & RULES.keys()
    # Where there are no experts, nothing but rows would lie along their axis: `data` is there for that.
    idle = (
        set() if "experts" in names else set(mesh_axes("batch")) - set(mesh_axes("batch-experts"))
    )
    used = {
        axis for name in names for axis in mesh_axes(name) if name != "batch" or axis not in idle
    }
    for axis, size in jax.sharding.get_abstract_mesh().shape.items():
        if size > 1 and axis not in used:
            users = [
                name
                for name in RULES
                if axis in mesh_axes(name) and (name != "batch" or axis not in idle)
            ]
            what = f"which splits {', '.join(users)} alone" if users else "which no rule names"
            free = sorted(
                {other for name in names for other in RULES[name]} - {"inner", "expert", axis}
            )
            legal = (
                f", with its devices on {' or '.join(free)}" if free else ": it runs on one device"
            )
            raise UsageError(
                f"mesh.{axis}={size} leaves {size} devices with the same work: {job} has nothing along {axis}, {what}; "
                f"legal is mesh.{axis}=1{legal}."
            )


def shares(name: str) -> int:
    """Returns over how many devices the ambient mesh splits a logical axis."""
    mesh = jax.sharding.get_abstract_mesh().shape
    return math.prod(mesh[axis] for axis in mesh_axes(name))


def check_split(flag: str, size: int, name: str, part_flag: str = "", parts: int = 1) -> None:
    """Refuses a size that does not divide over the mesh axes that split it.

    Args:
      flag: That gave the size, such as "data.batch_size".
      size: Its value.
      name: The logical axis, such as "batch".
      part_flag: The flag that cuts it into parts first.
      parts: Its value.
    """
    mesh, over, share = jax.sharding.get_abstract_mesh().shape, mesh_axes(name), shares(name)
    if size % (share * parts):
        sizes = {axis: mesh[axis] for axis in over}
        if "inner" in sizes:  # a part of the flag mesh.fsdp
            sizes["fsdp"] = sizes.get("fsdp", 1) * sizes.pop("inner")
        below = size // (share * parts) * share * parts
        cut = f" in {part_flag}={parts} parts" if parts > 1 else ""
        flags = " x ".join(f"mesh.{axis}={n}" for axis, n in sizes.items())
        total = f" = {share}" if len(sizes) > 1 else ""
        choices = f"are {below} or {below + share * parts}" if below else f"is {share * parts}"
        raise UsageError(
            f"{flag}={size}{cut} does not divide over {flags}{total}; the nearest legal {choices}."
        )
