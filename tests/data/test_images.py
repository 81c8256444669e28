"""Pictures: every common mode and format, damaged files, folders as users have them."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from service.config.schema import DataSection, ModelSection
from service.data import Source, hashing, open_data
from service.data.images import BadFiles, ImageSource, list_pictures, split_by_name
from service.data.transforms import Normalise, centre_view, random_view, render, shrink_on_decode, upright
from service.errors import EXIT_CONFIG, EXIT_UNRECOVERABLE, TrainingError, UserError

MODEL = ModelSection(input_size=(32, 32))
NORMALISE = Normalise(3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), full_scale=255.0)


def gradient(width: int = 80, height: int = 60) -> Image.Image:
    """Red grows to the right, green downwards; smooth, so that resizing changes little."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 128)], axis=-1).astype(np.uint8))


def fill(folder: Path, count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        gradient().save(folder / f"{i:03}.png")
    return folder


def open_folder(folder: Path, **fields: object) -> tuple[Source, Source | None]:
    data = DataSection.model_validate({"path": folder, "val_fraction": 0.2, **fields})
    return open_data(data, MODEL, seed=0)


def test_samples_are_normalised_float32_channels_first(tmp_path: Path) -> None:
    train, val = open_folder(fill(tmp_path))
    x = val.read(0, 0)
    assert x.dtype == np.float32
    assert x.shape == (3, 32, 32)
    assert x.flags.c_contiguous
    # Blue is 128 everywhere.
    assert np.allclose(x[2], (128 / 255 - 0.406) / 0.225, atol=1e-5)
    # The centre crop takes columns 10 to 70 of 80: red from 255 * 10 / 79 to 255 * 69 / 79.
    red = x[0] * 0.229 + 0.485
    assert red[:, 0].mean() == pytest.approx(10.5 / 79, abs=0.02)
    assert red[:, -1].mean() == pytest.approx(68.5 / 79, abs=0.02)
    assert (np.diff(x[0].mean(0)) > 0).all()
    assert (np.diff(x[1].mean(1)) > 0).all()
    assert len(train) + len(val) == 6


def test_augmentation_depends_on_the_key_alone(tmp_path: Path) -> None:
    train, val = open_folder(fill(tmp_path))
    assert np.array_equal(train.read(1, 5), train.read(1, 5))
    assert not np.array_equal(train.read(1, 5), train.read(1, 6))
    assert np.array_equal(val.read(0, 5), val.read(0, 6))


def test_flips_happen_for_half_of_the_keys_and_can_be_switched_off(tmp_path: Path) -> None:
    def flipped(source: Source) -> int:
        return sum(
            float(source.read(0, hashing.derive(k))[0, :, -1].mean())
            < source.read(0, hashing.derive(k))[0, :, 0].mean()
            for k in range(60)
        )

    fill(tmp_path)
    assert 15 < flipped(open_folder(tmp_path)[0]) < 45
    assert flipped(open_folder(tmp_path, flip=False)[0]) == 0


def test_random_views_cover_the_scale_and_stay_inside() -> None:
    areas, ratios = [], []
    for key in range(500):
        left, upper, right, lower = random_view(
            300, 200, (32, 32), hashing.derive(key), scale=(0.2, 0.6), flip=True
        ).box
        assert 0 <= left < right <= 300
        assert 0 <= upper < lower <= 200
        areas.append((right - left) * (lower - upper) / 60_000)
        ratios.append((right - left) / (lower - upper))
    assert 0.19 < min(areas) < 0.22
    assert 0.55 < max(areas) < 0.61
    assert 0.74 < min(ratios) < 0.78
    assert 1.28 < max(ratios) < 1.35


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1)])
def test_extreme_pictures_give_a_view(size: tuple[int, int]) -> None:
    view = random_view(*size, (32, 32), 1, scale=(0.2, 1.0), flip=False)
    assert render(Image.new("RGB", size), view, (32, 32)).shape == (32, 32, 3)
    assert render(Image.new("RGB", size), centre_view(*size, (32, 48)), (32, 48)).shape == (32, 48, 3)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16", "I", "F", "YCbCr"])
def test_modes_become_rgb_of_the_same_look(mode: str, tmp_path: Path) -> None:
    picture = gradient(64, 64)
    grey = picture.convert("L")
    if mode == "I;16":
        stored = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    elif mode == "I":
        stored = Image.fromarray(np.asarray(grey).astype(np.int32) * 257)
    elif mode == "F":
        stored = Image.fromarray(np.asarray(grey).astype(np.float32) / 255)
    else:
        stored = picture.convert(mode)
    path = tmp_path / "x.tif"
    stored.save(path)
    with Image.open(path) as opened:
        result = np.asarray(upright(opened, 3)).astype(int)
    colour = mode in ("RGBA", "P", "CMYK", "YCbCr")
    expected = np.asarray(picture if colour else grey.convert("RGB")).astype(int)
    # A bilevel picture is dithered and a palette has 256 colours: compare what the eye sees.
    tolerance = {"1": 40, "P": 25}.get(mode, 4)
    assert result.shape == expected.shape
    if mode == "1":
        result, expected = (a.reshape(8, 8, 8, 8, 3).mean((1, 3)) for a in (result, expected))
    assert np.abs(result - expected).mean() <= tolerance
    assert np.asarray(upright(stored, 1)).shape == (64, 64)


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "a.png")
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0] * 256)
    palette.save(tmp_path / "b.png", transparency=b"\x00")
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as picture:
            assert np.asarray(upright(picture, 3)).min() == 255


def test_the_camera_orientation_is_applied(tmp_path: Path) -> None:
    """For each of the eight orientations, Pillow's own exif_transpose is the reference."""
    folder = tmp_path / "upright"
    folder.mkdir()
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        gradient(80, 40).save(tmp_path / f"{orientation}.jpg", exif=exif, quality=95)
        with Image.open(tmp_path / f"{orientation}.jpg") as picture:
            ImageOps.exif_transpose(picture).save(folder / f"{orientation}.png")
    train, _ = open_folder(tmp_path, val_path=folder)
    # Files in the top folder come before those in "upright".
    for index in range(8):
        for key in (3, 4):
            expected = ImageSource(
                folder, sorted(p.name for p in folder.iterdir()), (32, 32), NORMALISE, BadFiles(0),
                in_chans=3, train=True, scale=(0.2, 1.0), flip=True,
            ).read(index, key)  # fmt: skip
            assert np.abs(train.read(index, key) - expected).max() < 0.1


def test_a_samples_name_is_the_file_that_is_read(tmp_path: Path) -> None:
    for grey in range(6):
        Image.new("L", (40, 40), 40 * grey).save(tmp_path / f"{grey}.png")
    (tmp_path / "2.png").write_bytes(b"broken")
    train, _ = open_folder(tmp_path, val_path=tmp_path, mean=None, std=None)
    for index in range(6):
        grey = round(float(train.read(index, 0).mean() * 255 / 40))
        assert train.name(index) == str(tmp_path / f"{grey}.png")
    assert train.bad_files == 1


def test_garbled_exif_does_not_cost_a_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    gradient().save(tmp_path / "a.jpg", exif=exif.tobytes()[:-10], quality=95)
    gradient().save(tmp_path / "b.jpg", exif=b"Exif\x00\x00MM\x00*rubbish", quality=95)
    train, _ = open_folder(tmp_path, val_path=tmp_path)
    for index in range(2):
        train.read(index, 0)
    assert train.bad_files == 0


def test_a_large_jpeg_is_decoded_at_reduced_size_with_the_same_result(tmp_path: Path) -> None:
    gradient(1000, 800).save(tmp_path / "a.jpg", quality=95)
    view = random_view(1000, 800, (32, 32), 3, scale=(0.5, 1.0), flip=False)
    with Image.open(tmp_path / "a.jpg") as picture:
        shrink_on_decode(picture, view, (32, 32))
        assert picture.size == (125, 100)
    gradient(1000, 800).save(tmp_path / "b.png")
    train, _ = open_folder(tmp_path, val_path=tmp_path)
    assert np.abs(train.read(0, 3) - train.read(1, 3)).max() < 0.1


def test_listing_is_deep_sorted_and_safe(tmp_path: Path) -> None:
    fill(tmp_path / "b" / "deep" / "er", 2)
    fill(tmp_path / "a", 1)
    fill(tmp_path / ".hidden", 1)
    (tmp_path / "notes.txt").write_text("x")
    gradient().save(tmp_path / "UPPER.JPG")
    gradient().save(tmp_path / "._apple.jpg")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "b" / "again").symlink_to(tmp_path / "a")
    outside = fill(tmp_path.parent / (tmp_path.name + "-outside"), 1)
    (tmp_path / "c").symlink_to(outside)
    assert list_pictures(tmp_path) == [
        "UPPER.JPG",
        "a/000.png",
        "b/deep/er/000.png",
        "b/deep/er/001.png",
        "c/000.png",
    ]


def test_the_split_is_by_name_and_stable() -> None:
    names = [f"{i}.png" for i in range(1000)]
    train, val = split_by_name(names, 0.1, Path())
    assert not set(train) & set(val)
    assert len(train) + len(val) == 1000
    assert 60 < len(val) < 140
    more_train, more_val = split_by_name([*names, *(f"new{i}.png" for i in range(1000))], 0.1, Path())
    assert set(train) <= set(more_train)
    assert set(val) <= set(more_val)
    assert [len(part) for part in split_by_name(names[:2], 0.0001, Path())] == [1, 1]
    assert [len(part) for part in split_by_name(names[:2], 0.9999, Path())] == [1, 1]


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def test_a_bad_file_is_replaced_counted_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, 20)
    shutil.rmtree(tmp_path / "val", ignore_errors=True)
    val = fill(tmp_path.parent / (tmp_path.name + "-val"), 1)
    truncate(tmp_path / "004.png")
    (tmp_path / "005.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        train, _ = open_folder(tmp_path, val_path=val)
        first = train.read(4, 9)
        assert np.array_equal(first, train.read(4, 9))
        again, _ = open_folder(tmp_path, val_path=val)
        assert np.array_equal(first, again.read(4, 9))
        caplog.clear()
        for index in range(20):
            for _ in range(2):
                assert np.isfinite(train.read(index, 1)).all()
    assert train.bad_files == 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "005.png" in messages[0]
    assert "\n" not in messages[0]


def test_too_many_bad_files_stop_training(tmp_path: Path) -> None:
    fill(tmp_path, 8)
    for i in range(4):
        truncate(tmp_path / f"{i:03}.png")
    train, _ = open_folder(tmp_path, val_path=tmp_path, max_bad_files=2)
    with pytest.raises(TrainingError, match=r"more than 2 pictures .* \(data.max_bad_files\)") as caught:
        [train.read(index, 0) for index in range(8)]
    assert caught.value.exit_code == EXIT_UNRECOVERABLE
    assert len(str(caught.value).splitlines()) <= 2


def test_all_bad_is_an_error_even_below_the_limit(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    for path in tmp_path.iterdir():
        path.write_text("not a picture")
    train, _ = open_folder(tmp_path, val_path=tmp_path)
    with pytest.raises(TrainingError, match=r"none of the 3 pictures in .* can be read"):
        train.read(0, 0)


def test_damaged_in_every_way_is_never_a_crash(tmp_path: Path) -> None:
    """Each format cut at several places: either it decodes or it counts as bad."""
    fill(tmp_path, 1)
    for suffix in ("jpg", "png", "webp", "gif", "tif", "bmp", "ppm"):
        whole = tmp_path / f"whole.{suffix}"
        gradient().save(whole)
        data = whole.read_bytes()
        for i, cut in enumerate((1, 12, 40, len(data) // 2, len(data) - 3)):
            (tmp_path / f"cut{i}.{suffix}").write_bytes(data[:cut])
        flipped = bytearray(data)
        for position in range(20, len(flipped), 7):
            flipped[position] ^= 0x5A
        (tmp_path / f"noise.{suffix}").write_bytes(flipped)
    train, _ = open_folder(tmp_path, val_path=tmp_path)
    for index in range(len(train)):
        assert train.read(index, 0).shape == (3, 32, 32)
    assert train.bad_files > 10


def test_a_named_pipe_is_a_bad_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(fill(tmp_path, 3) / "pipe.png")
    train, _ = open_folder(tmp_path, val_path=tmp_path)
    for index in range(len(train)):
        train.read(index, 0)
    assert train.bad_files == 1


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: None, "data.path: .* does not exist"),
        (lambda p: p.mkdir(), "data.path: .* is empty"),
        (lambda p: (p.mkdir(), (p / "a.txt").touch()), "data.path: no pictures in"),
        (lambda p: p.write_text("x"), "is a file; data.kind images needs a folder"),
        (lambda p: fill(p, 1), "only one picture"),
    ],
)
def test_wrong_folders(prepare: object, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    prepare(folder)  # type: ignore[operator]
    with pytest.raises(UserError, match=message) as caught:
        open_folder(folder)
    assert caught.value.exit_code == EXIT_CONFIG
    assert len(str(caught.value).splitlines()) <= 2


def test_an_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = fill(tmp_path / "locked", 2)
    locked.chmod(0)
    real = os.scandir
    try:
        if os.geteuid() == 0:
            # Root reads everything: raise what another user would get.
            def scandir(path: str) -> object:
                if str(path).endswith("locked"):
                    raise PermissionError(13, "Permission denied", str(path))
                return real(path)

            monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(UserError, match=r"data.path: cannot list .*locked: Permission denied"):
            open_folder(tmp_path)
    finally:
        locked.chmod(0o700)


def test_no_validation_and_validation_elsewhere(tmp_path: Path) -> None:
    train, val = open_folder(fill(tmp_path), val_fraction=0)
    assert val is None
    assert len(train) == 6
    train, val = open_folder(tmp_path, val_path=fill(tmp_path / "val", 2))
    assert val is not None
    assert (len(train), len(val)) == (8, 2)


def test_wrong_fields(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(UserError, match=r"data.path: null, but data.kind images needs"):
        open_data(DataSection(), MODEL, seed=0)
    with pytest.raises(UserError, match=r"images are 2-D, model.input_size \[16, 32, 32\] is 3-D"):
        open_data(DataSection(path=tmp_path), ModelSection(input_size=(16, 32, 32)), seed=0)
    with pytest.raises(UserError, match=r"model.in_chans: 4, but pictures give 1"):
        open_data(DataSection(path=tmp_path), ModelSection(in_chans=4), seed=0)
    with pytest.raises(UserError, match=r"data.val_path: .* does not exist"):
        open_folder(tmp_path, val_path=tmp_path / "none")


def test_grey_models_and_other_sizes(tmp_path: Path) -> None:
    data = DataSection(path=fill(tmp_path), mean=None, std=None)
    train, _ = open_data(data, ModelSection(in_chans=1, input_size=(32, 64)), seed=0)
    x = train.read(0, 0)
    assert x.shape == (1, 32, 64)
    assert x.min() >= 0
    assert x.max() <= 1


def test_bad_files_of_two_sources_are_counted_together() -> None:
    bad = BadFiles(5)
    bad.add("a", Path("a"), OSError("x"))
    bad.add("a", Path("a"), OSError("x"))
    bad.add("b", Path("b"), OSError("x"))
    assert len(bad) == 2


def test_normalise_refuses_what_does_not_fit() -> None:
    with pytest.raises(UserError, match=r"data.mean has 3 values but model.in_chans is 1"):
        Normalise(1, (0.1, 0.2, 0.3), None)
    with pytest.raises(UserError, match=r"data.std: every value must be greater than 0"):
        Normalise(3, None, (0.2, 0.0, 0.2))


def test_normalise_is_per_channel() -> None:
    x = np.arange(8, dtype=np.int16).reshape(2, 2, 2)
    expected = (x - np.array([1.0, 2.0])[:, None, None]) / np.array([2.0, 4.0])[:, None, None]
    assert np.allclose(Normalise(2, (1, 2), (2, 4))(x), expected)
    assert np.allclose(Normalise(2, (1,), None)(x), x - 1.0)
