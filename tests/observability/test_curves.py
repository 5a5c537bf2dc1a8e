import pathlib

from ray_fed.observability.curves import draw_curves


def test_picture_has_a_panel_for_each_curve(tmp_path: pathlib.Path) -> None:
    one, two = tmp_path / "one.png", tmp_path / "two.png"

    draw_curves(one, {"loss": [1.0, 0.5]})
    draw_curves(two, {"loss": [1.0, 0.5], "accuracy": [0.1, 0.9]})

    widths = [int.from_bytes(path.read_bytes()[16:20]) for path in (one, two)]
    assert one.read_bytes().startswith(b"\x89PNG")
    assert widths[1] == 2 * widths[0]
