"""Pictures, films, and reasoning."""

import base64

import pytest
from PIL import Image

from shoal.lang.media import image_part, video_part
from shoal.lang.reasoning import marks_of, split_reasoning
from worker.formats.families import THINKING, THINKING_ALIASES


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


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("deepseek-v4", "<think>Hm.</think>Yes."),
        ("kimi_k2", "Hm.</think>\n\nYes."),
        ("glm47", "Hm.</think>Yes."),
        ("minimax-append-think", "<think>Hm.\n</think>\nYes."),
        ("nemotron_3", "Hm.</think>Yes."),
        ("step3", "Hm.</think>Yes."),
        ("Qwen3-Thinking", "Hm.</think>Yes."),
        ("mistral", "[THINK]Hm.[/THINK]Yes."),
        ("kimi", "◁think▷Hm.◁/think▷Yes."),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes."),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ),
        ("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>"),
        ("cohere_command4", "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>"),
    ],
)
def test_the_names_of_other_servers(model_type: str, text: str) -> None:
    assert split_reasoning(text, model_type) == ("Hm.", "Yes.")


def test_every_reasoning_parser_of_the_server_has_a_name_here() -> None:
    for name in (*THINKING, *THINKING_ALIASES):
        server = THINKING.get(THINKING_ALIASES.get(name, name))
        if server is not None:
            assert marks_of(name)[:2] == (server.begin + server.label, server.end)
