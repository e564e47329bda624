"""Values of tensors as bytes, and bytes that have reached the disk."""

import ctypes
import os
from pathlib import Path
from typing import IO

from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read and write, without numpy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 0)).cast("B")


def in_order(tensor: Tensor) -> Tensor:
    """The tensor such that its memory is its values in order: no transposed, conjugate or negative view."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def write_fully(file: int, content: memoryview, at: int) -> None:
    """Write all of `content` at byte `at` of an open file."""
    while content:
        written = os.pwrite(file, content, at)
        content, at = content[written:], at + written


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
