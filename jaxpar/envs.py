"""`jaxpar.envs`: in a checkout the folder `envs/`, which wheels have in the place of this file."""

from typing import TYPE_CHECKING

from jaxpar._checkout import alias

if TYPE_CHECKING:
    from envs import make as make, names as names  # noqa: I001

alias(__name__, "envs")
