"""`save` and `load`: a dict of states, one folder of checkpoints."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_compile.checkpoint.agree import failed_on, first_decides, in_words
from fsdp_compile.checkpoint.directory import at_step, newest, published, step_of
from fsdp_compile.checkpoint.manifest import Manifest
from fsdp_compile.checkpoint.states import as_states
from fsdp_compile.checkpoint.storage import DirectoryReader, DirectoryWriter


def save(
    state: dict[str, Any],
    root: str | os.PathLike[str],
    step: int,
    *,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save `state` as the checkpoint of `step` in the folder `root`; all ranks call it.

    The checkpoint is seen when all ranks have written all of it, or not at all. A second save of a step replaces the
    first. In between nothing that was there is touched. Call it again only after it has returned.

    Args:
        state: models and their optimizers, sharded or not: each rank writes what it stores, under original names and
            shapes. Objects with `state_dict()`. Tensors and whatever can be pickled, these also nested in dicts and
            lists: one rank writes what all have under one name.
        root: a folder that all ranks share; made if it does not exist.
        step: names the checkpoint; 0 or more.
        keep: how many checkpoints stay, this one included; None: all.
        process_group: the ranks that call it; default all.

    Raises:
        CheckpointError: on all ranks, if one of them could not write its part.
        ValueError: `step` is below 0 or `keep` below 1; or the parameters of an optimizer are in no model of `state`;
            or something with a `state_dict()` lies deeper than in `state` itself.
    """
    writer = DirectoryWriter(root, step, keep)
    try:
        with _errors_of_ranks(f"saving step {step} in {root}"):
            dcp.save(as_states(state), storage_writer=writer, process_group=process_group)
    finally:
        writer.abandon()  # after success there is nothing to remove


def load(
    state: dict[str, Any],
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Load into `state`, in place, what a checkpoint in the folder `root` has under the same names; all ranks call it.

    Tensors are filled where they are, models, optimizers and objects with `load_state_dict` get theirs, other values
    are replaced. What the checkpoint has beside these is not read. How many ranks saved it does not matter.

    Args:
        state: nested like the one that was saved.
        root: the folder that was given to `save`; or one checkpoint, such as `fsdp-compile checkpoint convert` writes.
        step: which checkpoint; None: the newest whose files are all there.
        process_group: the ranks that call it; default all.

    Returns:
        The step of the checkpoint; 0 if it was converted from something that has none.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: on all ranks, if a file is missing or was truncated or altered; the message names the file and
            the tensor. Or if `state` asks for what the checkpoint does not have. What was read before it stays.
    """
    path, manifest = first_decides(lambda: _find(root, step), process_group)  # all ranks load the same
    shown = as_states(state)
    with _errors_of_ranks(f"loading {path}"):
        dcp.load(shown, storage_reader=DirectoryReader(path, manifest), process_group=process_group)
    state.update((key, value) for key, value in shown.items() if not isinstance(value, Stateful))
    return manifest.step or 0


def _find(root: str | os.PathLike[str], step: int | None) -> tuple[Path, Manifest]:
    found = newest(root) if step is None else at_step(root, step)
    if found is None:
        steps = ", ".join(str(step_of(path)) for path in published(root)) or "none"
        what = "a whole checkpoint" if step is None else f"a checkpoint of step {step}"
        raise FileNotFoundError(f"{root}: expected {what}, found steps: {steps}")
    return found


@contextmanager
def _errors_of_ranks(doing: str) -> Iterator[None]:
    """Turn what DCP raises on all ranks, no `Exception`, into a short error that says which rank found what."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise failed_on(doing, {rank: in_words(found) for rank, (found, _) in error.failures.items()}) from error
