"""Pictures and films as parts of a message, in OpenAI's form."""

import base64
import io
import mimetypes
from pathlib import Path
from typing import Any


def image_part(source: Any) -> dict[str, Any]:
    """A picture from a path, URL, bytes, or PIL image. Raises OSError if a file cannot be read."""
    return {"type": "image_url", "image_url": {"url": _url(source, "image/jpeg")}}


def video_part(source: Any, num_frames: int) -> dict[str, Any]:
    """A film from a path, URL or bytes. `num_frames` tells the endpoint how many pictures to take of it (a field of
    Shoal's and vLLM's kind of endpoint, below `video_url`)."""
    return {"type": "video_url", "video_url": {"url": _url(source, "video/mp4"), "num_frames": num_frames}}


def _url(source: Any, default_type: str) -> str:
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return source
    media_type = default_type
    if isinstance(source, bytes):
        data = source
        media_type = _sniffed(data) or default_type
    elif isinstance(source, str | Path):
        data = Path(source).read_bytes()
        media_type = _sniffed(data) or mimetypes.guess_type(str(source))[0] or default_type
    elif hasattr(source, "save"):  # a PIL image
        file = io.BytesIO()
        source.save(file, format="PNG")
        data, media_type = file.getvalue(), "image/png"
    else:
        raise TypeError(f"a picture or film is a path, a URL, bytes or a PIL image, not {type(source).__name__}")
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _sniffed(data: bytes) -> str | None:
    """The media type by the first bytes of a file."""
    for start, media_type in ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif")):
        if data.startswith(start):
            return media_type
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return "video/mp4" if data[4:8] == b"ftyp" else None
