"""Pictures, films, and reasoning."""

import base64

import pytest
from PIL import Image

from shoal.lang.media import image_part, video_part
from shoal.lang.reasoning import split_reasoning


def test_pictures(tmp_path):
    picture = Image.new("RGB", (2, 2))
    path = tmp_path / "a.jpg"
    picture.save(path, format="PNG")  # the bytes say what it is, not the name
    url = image_part(str(path))["image_url"]["url"]
    assert url.startswith("data:image/png;base64,") and base64.b64decode(url.partition(",")[2]) == path.read_bytes()
    assert image_part(path)["image_url"]["url"] == url == image_part(path.read_bytes())["image_url"]["url"]
    assert image_part(picture)["image_url"]["url"].startswith("data:image/png;base64,")
    assert image_part("https://x/y.jpg")["image_url"]["url"] == "https://x/y.jpg"
    with pytest.raises(TypeError, match="not int"):
        image_part(5)
    with pytest.raises(OSError, match=r"nothing\.png"):
        image_part(tmp_path / "nothing.png")


def test_films():
    part = video_part(b"\0\0\0\x18ftypmp42", 4)
    assert part["type"] == "video_url" and part["video_url"]["num_frames"] == 4
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        ("a</think>b", ("a", "b")),  # the template wrote the opening mark
        ("<think>never ends", ("never ends", "")),
        ("no reasoning", ("", "no reasoning")),
    ],
)
def test_reasoning(text, expected):
    assert split_reasoning(text, "qwen3") == expected
    with pytest.raises(ValueError, match="there are no marks"):
        split_reasoning(text, "other")
