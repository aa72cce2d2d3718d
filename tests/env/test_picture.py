import builtins
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxpar.env import picture
from jaxpar.types import UsageError

SIZE = (24, 32)


def area(image):
    """Painted pixels of black on white, soft edges counted in part."""
    return float(jnp.sum(255 - image[..., 0]) / 255)


def test_areas_are_those_of_geometry():
    empty = picture.canvas(*SIZE)
    assert area(empty) == 0
    assert area(picture.disc(empty, (16, 12), 8, picture.BLACK)) == pytest.approx(
        np.pi * 64, rel=0.01
    )
    assert area(picture.rectangle(empty, (3, 4), (13, 10), picture.BLACK)) == pytest.approx(
        60, rel=1e-5
    )
    bar = np.pi * 4 + 4 * 5  # length 5, width 4, two half discs of radius 2
    assert area(picture.line(empty, (10, 10), (13, 14), 4, picture.BLACK)) == pytest.approx(
        bar, rel=0.02
    )
    arrow = [
        (4.0, 4.0),
        (20.0, 4.0),
        (10.0, 8.0),
        (4.0, 20.0),
    ]  # not convex: 16 x 16 / 2 less its dent
    shoelace = 0.5 * abs(
        sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(arrow, arrow[1:] + arrow[:1], strict=True))
    )
    assert area(picture.polygon(empty, arrow, picture.BLACK)) == pytest.approx(shoelace, rel=0.02)


def test_x_is_the_column_and_world_y_points_up():
    image = picture.disc(
        picture.canvas(*SIZE), picture.to_pixels((1.0, 3.0), (0, 0), (4, 4), *SIZE), 2, picture.RED
    )
    rows, columns = np.nonzero(np.asarray(image[..., 1]) < 128)
    assert (rows.mean() + 0.5, columns.mean() + 0.5) == (pytest.approx(6), pytest.approx(8))
    corners = picture.to_pixels([[0.0, 0.0], [4.0, 4.0]], (0, 0), (4, 4), *SIZE)
    np.testing.assert_allclose(corners, [[0, 24], [32, 0]])


def test_shapes_are_painted_in_turn_and_may_be_invisible():
    image = picture.rectangle(picture.canvas(*SIZE), (0, 0), (32, 24), picture.RED)
    image = picture.to_uint8(picture.disc(image, (16, 12), 4, picture.BLUE))
    assert image.dtype == jnp.uint8
    assert (
        tuple(image[0, 0].tolist()) == picture.RED and tuple(image[12, 16].tolist()) == picture.BLUE
    )
    hidden = jax.jit(
        lambda visible: picture.disc(
            picture.canvas(*SIZE), (9, 9), 4, picture.BLUE, visible=visible
        )
    )
    assert area(hidden(False)) == 0 and area(hidden(True)) > 0


def test_a_thousand_environments_are_one_vmap():
    def draw(x):
        return picture.to_uint8(
            picture.line(picture.canvas(*SIZE), (x, 0.0), (x, 24.0), 2.0, picture.BLACK)
        )

    places = jnp.linspace(2, 30, 5)
    many = jax.jit(jax.vmap(draw))(places)
    np.testing.assert_array_equal(many, np.stack([draw(x) for x in places]))


def test_tiles_against_a_loop():
    rng = np.random.default_rng(0)
    sprites = rng.integers(0, 256, (5, 3, 2, 3), np.uint8)
    indices = rng.integers(0, 5, (4, 6))
    loop = np.concatenate(
        [np.concatenate([sprites[i] for i in row], axis=1) for row in indices], axis=0
    )
    np.testing.assert_array_equal(picture.tiles(jnp.asarray(indices), sprites), loop)


def test_environments_side_by_side():
    frames = np.arange(5, dtype=np.uint8)[None, :, None, None, None] * np.ones(
        (2, 5, 3, 4, 3), np.uint8
    )
    page = picture.grid_of(frames, columns=3, gap=1)
    assert page.shape == (2, 3 * 2 + 1, 4 * 3 + 2, 3)
    assert (
        (page[:, 4:, 5:9] == 4).all()
        and (page[:, :3, 10:] == 2).all()
        and (page[:, 3] == 255).all()
    )
    assert picture.grid_of(frames).shape == page.shape[:1] + (3 * 2 + 2, 4 * 3 + 4, 3)


def test_captions_stand_below_within_the_width():
    frames = np.full((3, 10, 150, 3), 77, np.uint8)
    shown = picture.captioned(frames, ["step 1", "step 2\nleft", "W" * 14])
    assert shown.dtype == np.uint8 and shown.shape[:1] + shown.shape[2:] == (3, 150, 3)
    np.testing.assert_array_equal(shown[:, :10], frames)
    ink = (shown[:, 10:] < 128).any(-1)
    assert ink.any((1, 2)).all() and not ink[:, :, -2:].any() and (shown[:, -1] == 255).all()
    lines = [np.flatnonzero(rows.any(1)) for rows in ink]
    assert lines[1][-1] > lines[0][-1] + 4  # the second line
    with pytest.raises(UsageError, match="3 pictures take as many texts, not 1"):
        picture.captioned(frames, ["one"])


def test_a_gif_holds_its_frames(tmp_path):
    frames = np.zeros((4, *SIZE, 3), np.uint8)
    for time in range(4):
        frames[time, :, time * 8 : time * 8 + 8] = picture.RED
    picture.gif(frames, tmp_path / "a.gif", fps=20)
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 4 and image.info["duration"] == 50 and image.info["loop"] == 0
        image.seek(3)
        np.testing.assert_allclose(
            np.asarray(image.convert("RGB"), int), frames[3].astype(int), atol=8
        )
    assert "data:image/gif;base64,R0lGOD" in picture.Animation(frames)._repr_html_()


@pytest.mark.parametrize(
    "frames", [np.zeros((4, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), "u1")]
)
def test_wrong_frames_are_named(frames):
    with pytest.raises(UsageError, match=r"uint8 frames \[T, H, W, 3\]"):
        picture.gif(frames, io.BytesIO())


def test_without_pillow(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match="Pillow"):
        picture.gif(np.zeros((1, 8, 8, 3), np.uint8), io.BytesIO())
