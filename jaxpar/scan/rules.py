"""Which implementation `impl="auto"` takes."""

__all__ = ["choose"]


def choose(platform: str, num_steps: int, num_lanes: int, k: int) -> str:
    """Placeholder."""
    return "sequential" if platform == "cpu" else "chunked"
