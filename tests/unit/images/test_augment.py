"""Random crops and colours, against TensorFlow's definitions written out in float64, pixel by pixel."""

import colorsys

import numpy as np
import pytest
import torch

from vlarl.config.finetune import AugmentConfig
from vlarl.data.augmentation import AugmentedBatches, sample_uniforms
from vlarl.images.augment import NUM_UNIFORMS, Strength, adjust_contrast, adjust_hue, adjust_saturation, augment, crop
from vlarl.training.sft import DemoBatch

EXACT = 1e-12  # of float64 values up to 1, after some hundred roundings
ROUNDED = 64 * float(np.finfo(np.float32).eps)  # of float32 values up to 1, after some ten roundings


def cropped(image: np.ndarray, top: float, left: float, area: float) -> np.ndarray:
    """crop_and_resize of one image and one box, as its kernel says: aligned corners, bilinear."""
    height, width, _ = image.shape
    side = np.sqrt(area)
    box = top * (1 - side), left * (1 - side)
    out = np.zeros_like(image)
    for y in range(height):
        in_y = box[0] * (height - 1) + y * side * (height - 1) / (height - 1)
        for x in range(width):
            in_x = box[1] * (width - 1) + x * side * (width - 1) / (width - 1)
            corners = [
                (int(f_y(in_y)), int(f_x(in_x)), (1 - abs(in_y - f_y(in_y))) * (1 - abs(in_x - f_x(in_x))))
                for f_y in {np.floor, np.ceil}
                for f_x in {np.floor, np.ceil}
            ]
            total = sum(weight for _, _, weight in corners)  # above 1 where a coordinate is a whole number
            out[y, x] = sum(image[row, col] * weight for row, col, weight in corners) / total
    return out


def in_hsv(image: np.ndarray, change) -> np.ndarray:
    return np.array([[colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in row] for row in image])


def changed(image: np.ndarray, u: np.ndarray) -> np.ndarray:
    """OpenVLA's augmentation of a uint8 image with its ranges, in float64 and before it is made uint8 again."""
    x = image.astype(np.float64) / 255
    x = np.clip(cropped(x, u[0], u[1], 0.9), 0, 1)
    x = np.clip(x + (-0.2 + 0.4 * u[2]), 0, 1)
    mean = x.mean(axis=(0, 1))
    x = np.clip((x - mean) * (0.8 + 0.4 * u[3]) + mean, 0, 1)
    x = np.clip(in_hsv(x, lambda h, s, v: (h, min(s * (0.8 + 0.4 * u[4]), 1.0), v)), 0, 1)
    return np.clip(in_hsv(x, lambda h, s, v: ((h - 0.05 + 0.1 * u[5]) % 1.0, s, v)), 0, 1)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """[4, H, W, 3]: noise, its grey version, a smooth one, and black and white."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (9, 11, 3)).astype(np.uint8)
    grey = np.repeat(noise[..., :1], 3, axis=-1)
    smooth = np.stack(np.meshgrid(np.arange(11) * 23, np.arange(9) * 28), -1).astype(np.uint8)
    smooth = np.concatenate([smooth, np.full((9, 11, 1), 200, np.uint8)], axis=-1)
    return np.stack([noise, grey, smooth, np.where(noise > 128, 255, 0).astype(np.uint8)])


def as_double(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images.astype(np.float64) / 255)


def test_the_crop_is_that_of_crop_and_resize(images):
    offsets = np.array([[0.0, 0.0], [0.3, 0.7], [0.999, 0.5], [0.5, 0.999]])
    top, left = torch.from_numpy(offsets).unbind(dim=1)
    found = crop(as_double(images), top, left, 0.9).numpy()
    for image, (up, aside), result in zip(images, offsets, found, strict=True):
        np.testing.assert_allclose(result, cropped(image / 255.0, up, aside, 0.9), atol=EXACT)
    np.testing.assert_allclose(crop(as_double(images), top, left, 1.0).numpy(), images / 255.0, atol=EXACT)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.17])
def test_contrast_and_saturation_are_tensorflows(images, factor):
    factors = torch.full((len(images),), factor, dtype=torch.float64)
    contrast, saturation = (f(as_double(images), factors).numpy() for f in (adjust_contrast, adjust_saturation))
    for image, contrasted, saturated in zip(images / 255.0, contrast, saturation, strict=True):
        mean = image.mean(axis=(0, 1))
        np.testing.assert_allclose(contrasted, mean + factor * (image - mean), atol=EXACT)
        expected = in_hsv(image, lambda h, s, v: (h, min(s * factor, 1.0), v))
        np.testing.assert_allclose(saturated, expected, atol=EXACT)


@pytest.mark.parametrize("turn", [-0.5, -0.05, 0.0, 0.031, 0.4])
def test_the_hue_is_turned_as_tensorflow_turns_it(images, turn):
    found = adjust_hue(as_double(images), torch.full((len(images),), turn, dtype=torch.float64)).numpy()
    for image, result in zip(images / 255.0, found, strict=True):
        np.testing.assert_allclose(result, in_hsv(image, lambda h, s, v: ((h + turn) % 1.0, s, v)), atol=EXACT)


def test_the_whole_is_openvlas_in_its_order_with_its_ranges(images):
    uniforms = np.random.default_rng(1).random((len(images), NUM_UNIFORMS), dtype=np.float32)
    uniforms[2], uniforms[3] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    found = augment(torch.from_numpy(images), torch.from_numpy(uniforms), Strength()).numpy()
    assert found.dtype == np.uint8
    for image, own, result in zip(images, uniforms.astype(np.float64), found, strict=True):
        exact = 255.5 * changed(image, own)  # convert_image_dtype truncates this
        low, high = (np.minimum(np.floor(exact + sign * 255.5 * ROUNDED), 255) for sign in (-1, 1))
        assert ((low <= result) & (result <= high)).all()
        assert (low == high).mean() > 0.9 or image.min() == image.max(), "the bounds say something"
        assert np.abs(result.astype(int) - image).max() > 8, "it is changed"


def test_without_strength_nothing_changes(images):
    uniforms = torch.rand(len(images), NUM_UNIFORMS)
    still = augment(torch.from_numpy(images), uniforms, Strength(1.0, 0.0, 0.0, 0.0, 0.0))
    assert np.array_equal(still.numpy(), images)


def test_what_is_random_follows_from_the_sample_alone():
    whole = sample_uniforms(3, 0, 2100, 2)
    assert whole.shape == (2100, 2, NUM_UNIFORMS) and whole.dtype == np.float32
    for first, size in ((0, 5), (1020, 10), (1024, 1), (1000, 1100)):
        np.testing.assert_array_equal(sample_uniforms(3, first, size, 2), whole[first : first + size])
    assert not np.array_equal(sample_uniforms(4, 0, 5, 2), whole[:5])
    assert not np.array_equal(whole[:, 0], whole[:, 1]), "each view has its own"
    assert np.abs(whole.mean(axis=(0, 1)) - 0.5).max() < 6 / np.sqrt(12 * 4200)  # six standard errors


class Frames:
    """Batches of frames [B, 2, 6, 5, 3], which follow from the samples' indices."""

    def batch(self, first: int, size: int) -> DemoBatch:
        samples = [np.random.default_rng(index).integers(0, 256, (2, 6, 5, 3)) for index in range(first, first + size)]
        return DemoBatch(None, torch.from_numpy(np.stack(samples).astype(np.uint8)))


def test_a_sample_is_changed_alike_in_every_batch():
    batches = AugmentedBatches(Frames(), AugmentConfig(enabled=True), seed=5)
    whole = batches.batch(0, 8).frames
    assert whole.shape == (8, 2, 6, 5, 3) and whole.dtype == torch.uint8
    assert torch.equal(batches.batch(5, 3).frames, whole[5:])
    plain = Frames().batch(0, 8).frames
    assert not any(torch.equal(a, b) for a, b in zip(whole.flatten(0, 1), plain.flatten(0, 1), strict=True))
    no_crop = AugmentedBatches(Frames(), AugmentConfig(enabled=True, crop_area=1.0), seed=5).batch(0, 8).frames
    assert not torch.equal(no_crop, whole)
