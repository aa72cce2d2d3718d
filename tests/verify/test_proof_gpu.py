"""The proof on cards: every layout of two, and of all that are here, in full precision."""

import subprocess
import sys

import jax
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("cards", [2, 4])
def test_every_layout_holds_on_cards(cards, tmp_path):
    if len(jax.devices()) < cards:
        pytest.skip(f"needs {cards} cards")
    visible = ",".join(map(str, range(cards)))
    command = [sys.executable, "-m", "experiments.verify", "layouts=[all]", "topology=none"]
    done = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}"],
        env=_environment(visible),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "rows hold" in done.stdout


def _environment(visible):
    import os

    options = {"CUDA_VISIBLE_DEVICES": visible, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {**os.environ, **options, "JAX_PLATFORMS": "cuda,cpu"}
