"""Root of the checkout on the path: `tests.verify.planted` is one module, by whatever command."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)
