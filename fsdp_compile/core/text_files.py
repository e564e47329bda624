"""Reading files of text that may come from anybody, within limits; nothing here imports torch."""

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 28  # of a file of text


def read_text(path: Path) -> str:
    """The text of a file. ValueError if it is no regular file, too large, or not UTF-8."""
    if not path.is_file():
        raise ValueError(f"no regular file {path.name}")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes, and {MOST_BYTES} are the most that is read")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a file of JSON says. ValueError if it cannot be read as above, is no JSON, or is nested too deeply."""
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
