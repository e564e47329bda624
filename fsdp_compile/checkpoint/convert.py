"""From any format to any other, one tensor in memory at a time."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from fsdp_compile.checkpoint.disk import sync_folder
from fsdp_compile.checkpoint.sources import Source
from fsdp_compile.checkpoint.targets import DcpTarget, SafetensorsTarget, Target, TorchTarget

TARGETS: dict[str, type[Target]] = {"dcp": DcpTarget, "safetensors": SafetensorsTarget, "torch": TorchTarget}
Progress = Callable[[int], None]


def chosen(source: Source, part: str | None) -> dict[str, tuple[str | int, ...]]:
    """The names under the first key `part`, each with its other keys; without `part`, all.

    ValueError if there is no such key.
    """
    if part is None:
        return source.keys
    found = {name: keys[1:] for name, keys in source.keys.items() if keys[0] == part and len(keys) > 1}
    if not found:
        parts = ", ".join(dict.fromkeys(str(keys[0]) for keys in source.keys.values() if len(keys) > 1)) or "none"
        raise ValueError(f"part {part!r}: expected one of {parts}")
    return found


def convert(
    source: Source, path: Path, to: str, files: int = 1, part: str | None = None, progress: Progress = lambda _: None
) -> None:
    """Write what `source` has as a checkpoint at `path`, which is seen when it is complete.

    Args:
        source: what to read.
        path: a folder, or for "torch" a file, that does not exist yet.
        to: "dcp", "safetensors", which leaves out what is no tensor, or "torch".
        files: over how many files to spread the tensors; "torch" writes one.
        part: write only what lies under this first key, without the key.
        progress: called with the bytes of each tensor that was written.

    Raises:
        ValueError: there is no such part.
        FileExistsError: `path` exists.
        CheckpointError: a file is damaged.
    """
    if path.exists():
        raise FileExistsError(f"{path}: expected a path that does not exist yet; remove it or choose another")
    keys = chosen(source, part)
    names = {name: ".".join(map(str, rest)) for name, rest in keys.items()}  # there -> here
    tensors = {name: source.tensors[name] for name in names if name in source.tensors}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with TARGETS[to](
            aside / path.name,
            [spec._replace(name=names[name]) for name, spec in tensors.items()],
            {names[name]: rest for name, rest in keys.items()},
            source.step,
            files,
        ) as target:
            target.begin({names[name]: source.value(name) for name in source.values if name in names})
            for name, spec in tensors.items():
                target.write(names[name], source.read(name))
                progress(spec.nbytes)
            target.end()
        os.rename(aside / path.name, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # what failed before is the error to be seen
