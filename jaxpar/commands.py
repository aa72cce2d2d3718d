"""`jaxpar.commands`: in a checkout the folder `experiments/`, which wheels have in the place of this file."""

from jaxpar._checkout import alias

alias(__name__, "experiments")
