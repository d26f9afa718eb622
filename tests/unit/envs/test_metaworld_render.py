"""Offscreen images of a small model with a known result."""

import os

import numpy as np
import pytest

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
os.environ.setdefault("LP_NUM_THREADS", "1")

import mujoco

from vlarl.envs.metaworld.render import Canvas, ModelRenderer
from vlarl.envs.metaworld.views import FixedView, OrbitView

HEAD = '<mujoco><visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual><worldbody>'
# Both cameras look along y, with z up; the second one hangs from the ceiling.
CAMERAS = """
<camera name="upright" pos="0 -1 0" xyaxes="1 0 0 0 0 1" fovy="90"/>
<camera name="hanging" pos="0 -1 0" xyaxes="-1 0 0 0 0 -1" fovy="90"/>
"""
AHEAD = OrbitView(lookat=(0, 0, 0), distance=1, azimuth=90, elevation=0, fovy=90)


def render_views(body: str, views, size: int = 64, **canvas):
    model = mujoco.MjModel.from_xml_string(f"{HEAD}{CAMERAS}{body}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    where = Canvas(size, **({"exact": False} | canvas))
    renderer = ModelRenderer(where, model)
    images = [renderer.render(data, view, size) for view in views]
    renderer.close()
    where.close()
    return images


def test_up_is_up_and_right_is_right_for_every_kind_of_camera():
    red = '<geom type="sphere" size="0.1" pos="0.5 0 0.5" rgba="1 0 0 1"/>'
    for image in render_views(red, [AHEAD, FixedView("upright"), FixedView("hanging", upside_down=True)]):
        rows, columns = np.nonzero(image[..., 0] > 128)
        # half of 45 degrees at a metre's distance: three quarters of the way right, one quarter down
        assert (rows.mean() + 0.5, columns.mean() + 0.5) == pytest.approx((16, 48), abs=0.7)


@pytest.mark.parametrize("view", [AHEAD, FixedView("upright")])
def test_what_is_left_out_was_out_of_view(monkeypatch, view):
    places = np.random.default_rng(0).uniform([-0.3, -1.1, -0.3], [0.3, -0.7, 0.3], (400, 3))
    spheres = "".join(f'<geom type="sphere" size="0.01" pos="{x} {y} {z}" rgba="1 0 0 1"/>' for x, y, z in places)
    body = spheres + '<geom type="plane" size="0 0 1" pos="0 0 -2"/>'
    left_out = []
    decide = ModelRenderer._out_of_view

    def watched(renderer, data):
        left_out.append(decide(renderer, data))
        return left_out[-1]

    monkeypatch.setattr(ModelRenderer, "_out_of_view", watched)
    quick = render_views(body, [view])[0]
    monkeypatch.setattr(ModelRenderer, "_out_of_view", lambda renderer, data: np.zeros(401, bool))
    np.testing.assert_array_equal(quick, render_views(body, [view])[0])
    in_view = (np.abs(places[:, [0, 2]]).max(axis=1) < places[:, 1] + 1).sum()
    assert 400 - left_out[0].sum() == pytest.approx(in_view, abs=30)  # no more than those at the border are kept
    assert not left_out[0][400]  # the plane


def test_images_smaller_than_the_canvas_show_the_same():
    red = '<geom type="sphere" size="0.3" pos="0 0 0" rgba="1 0 0 1"/>'
    large = render_views(red, [AHEAD], size=64)[0]
    small = render_views(red, [AHEAD], size=32)[0]
    np.testing.assert_allclose((large[..., 0] > 128).mean(), (small[..., 0] > 128).mean(), atol=0.02)


def test_exact_pixels_are_smoothed_at_edges():
    red = '<geom type="sphere" size="0.3" pos="0 0 0" rgba="1 0 0 1"/>'
    plain = render_views(red, [AHEAD])[0]
    smooth = render_views(red, [AHEAD], exact=True)[0]
    assert len(np.unique(plain.reshape(-1, 3), axis=0)) < len(np.unique(smooth.reshape(-1, 3), axis=0))
