"""`save` and `load`: a dict of models, optimizers and other states to and from a folder of checkpoints.

Models and optimizers, sharded or not, go through `torch.distributed.checkpoint.state_dict`: files have original names
and shapes, and loading reads into the memory of the shards.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta

from fsdp_compile.checkpoint.by_rank import VALUES, Checksums, PerRank, checksums, own_name, values_apart
from fsdp_compile.checkpoint.directory import DirectoryReader, DirectoryWriter, committed, open_checkpoint, step_of
from fsdp_compile.checkpoint.entries import Entry, entries_of, listed
from fsdp_compile.checkpoint.structure import (
    NOTES,
    Notes,
    Stored,
    merge_notes,
    pack,
    stored_values,
    tree,
)
from fsdp_compile.checkpoint.untrusted import METADATA, CheckpointError, read
from fsdp_compile.comm.collectives import gather_objects, on_first_rank
from fsdp_compile.state_dict._torch import flatten_state_dict
from fsdp_compile.tensors.nested import ABSENT, leaves, map_leaves

T = TypeVar("T")


def save(
    state: dict[str, Any],
    root: str | os.PathLike[str],
    step: int,
    *,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save `state` as the checkpoint of `step` in the folder `root`; all ranks must call it.

    The checkpoint becomes visible when all ranks have written all of it, or never. A second save of a step replaces
    the first. Do not call `save` again before it has returned.

    Args:
        state: models and their optimizers, sharded or not: each rank writes what it stores, under original names and
            shapes; an optimizer is not stepped. Objects with `state_dict()`. Tensors and values that can be pickled,
            also in nested dicts and lists. Of those that are equal on all ranks, and of buffers of models, one rank
            writes its own; of others each rank writes its own, see `PerRank`.
        root: a folder that all ranks share; made if it does not exist.
        step: names the checkpoint; 0 or more.
        keep: how many checkpoints stay, this one included; None: all.
        process_group: the ranks that call it; default: all.

    Raises:
        CheckpointError: on all ranks, if one of them could not give its state or write its part.
        RuntimeError: a rank died or exceeded the group's timeout. Earlier checkpoints stay.
        ValueError: `step` is below 0 or `keep` below 1; a key is one that checkpoints use themselves; the parameters of
            an optimizer are in no model of `state`; or an object with a `state_dict()` is nested within a dict, list or
            tuple.
    """
    if reserved := {NOTES, VALUES} & state.keys():
        raise ValueError(
            f"state: expected keys of your own, found {sorted(reserved)}, which checkpoints use themselves"
        )
    entries, doing = entries_of(state), f"saving step {step} in {root}"
    writer = DirectoryWriter(root, step, keep)
    try:
        with errors_of_ranks(doing):
            found, paths = _to_save(entries, doing, process_group)
            dcp.save({"": found}, storage_writer=writer, planner=_SavePlanner(paths), process_group=process_group)
    finally:
        writer.discard()


def load(
    state: dict[str, Any],
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    trust: bool = False,
    partial: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Load a checkpoint of the folder `root` into `state`, in place, by name; all ranks must call it.

    Tensors are filled in place, models, optimizers and other objects load by `load_state_dict`, dicts and lists are
    changed in place, other values are replaced. What was saved decides: names and values that `state` does not have are
    loaded too, a sharded tensor then in full. State of an optimizer that the checkpoint does not have starts anew, with
    a warning. Keys of `state` may be fewer than those of the checkpoint. Any number of ranks may have saved it.

    Args:
        state: nested as the one that was saved.
        root: the folder that was given to `save`; or one checkpoint, such as `fsdp-compile checkpoint convert` writes.
        step: which checkpoint; None: the newest whose files are all there.
        trust: load values of any type, which can run code that their author chose. Otherwise only tensors, plain types
            and those of `torch.serialization.safe_globals` are loaded.
        partial: leave out the names of the checkpoint that a model, optimizer, object or dict of `state` does not have.
            Otherwise those of a model or optimizer that no rank has are an error.
        process_group: the ranks that call it; default: all.

    Returns:
        The step of the checkpoint; 0 if it was converted from something that has none.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: on all ranks, if on one of them a file is missing, truncated or altered (the message names the
            file and the tensor), names or shapes do not fit, another number of ranks has saved values of which each
            had its own, a value needs `trust`, or a `load_state_dict` raised. What was read before stays.
        RuntimeError: a rank died or exceeded the group's timeout.
    """

    def find() -> Any:
        checkpoint = open_checkpoint(root, step)
        if checkpoint is None:
            steps = ", ".join(str(step_of(path)) for path in committed(root)) or "none"
            if (Path(root) / METADATA).is_file():
                raise FileNotFoundError(
                    f"{root}: expected what checkpoint.save has written, found a folder of "
                    f"torch.distributed.checkpoint; load it with torch.distributed.checkpoint.load, or convert it: "
                    f"fsdp-compile checkpoint convert {root} NEW --format dcp"
                )
            what = "a complete checkpoint" if step is None else f"a checkpoint of step {step}"
            raise FileNotFoundError(f"{root}: expected {what}, found steps: {steps}; pass one of them")
        return *checkpoint, _state_of_folder(checkpoint[0])

    entries = entries_of(state)
    while True:
        with errors_of_ranks(f"looking for a checkpoint in {root}"):
            path, manifest, found = on_first_rank(find, process_group)  # so that all ranks load the same
        doing = f"loading {path}"
        try:
            with errors_of_ranks(doing):
                state.update(
                    load_entries(entries, DirectoryReader(path, manifest), doing, partial, trust, process_group)
                )
            return manifest.step or 0
        except CheckpointError:  # on all ranks
            if found is not None and on_first_rank(functools.partial(_state_of_folder, path), process_group) == found:
                raise  # otherwise another job has removed the checkpoint to make room: load the next one


def _state_of_folder(path: Path) -> tuple[int, int] | None:
    """What changes if another folder takes its name; None if it was removed."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


# --- what is written --------------------------------------------------------------------------------------------------


def _to_save(
    entries: dict[str, Entry], doing: str, group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """What this rank gives to DCP of all entries, by name, and the path of each name."""
    state: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    compared: dict[str, Any] = {}
    notes: Notes = {}
    first_ranks: list[str] = []

    def collect() -> Checksums:
        for key, entry in entries.items():
            found, of_entry = flatten_state_dict({key: pack(entry.collect(), (key,), notes)})
            if twice := found.keys() & paths.keys():
                raise ValueError(f"state: expected one value of each name, found two of {', '.join(sorted(twice))}")
            paths.update(of_entry)
            first_ranks.extend(name for name, value in found.items() if entry.is_first_ranks(paths[name], value))
            compared.update((name, value) for name, value in found.items() if entry.is_compared(paths[name], value))
            for name, value in found.items():
                if not any(each is ABSENT for _, each in leaves(value)):  # else another rank has it
                    state[name] = value
        return checksums(compared)

    sums = all_succeed(collect, doing, group)
    of_ranks = gather_objects((sums, {name: paths[name] for name in compared}, notes, first_ranks), group)
    all_paths = {name: path for _, theirs, _, _ in of_ranks for name, path in theirs.items()}
    apart = values_apart(compared, [theirs for theirs, _, _, _ in of_ranks], all_paths, group)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    for name in {name for _, _, _, theirs in of_ranks[:rank] for name in theirs} & set(first_ranks):
        del state[name]
    for each in apart:
        if each.is_own and rank in each.having:
            value = state[each.name]
            if isinstance(value, PerRank) or rank != each.having[0]:
                del state[each.name]
            value = value.value if isinstance(value, PerRank) else value
            name = own_name(each.name, rank)  # in a tuple DCP writes it as one value; a view with all of its storage
            state[name] = (value.clone() if isinstance(value, Tensor) else value,)
            paths[name] = (*name.split(".", 2)[:2], each.name)
    merged = merge_notes([theirs for _, _, theirs, _ in of_ranks])
    if merged or apart:
        state[NOTES], paths[NOTES] = [list(merged.items()), [tuple(each) for each in apart]], (NOTES,)
    return state, paths


class _SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner, of values by name under one key, so that DCP calls no `state_dict()` of theirs."""

    def __init__(self, paths: dict[str, tuple[Any, ...]]) -> None:
        super().__init__()
        self.paths = paths

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """As DCP's, with the path of each name."""
        super().set_up_planner(state_dict[""], storage_meta, is_coordinator)
        self.mappings = {name: self.paths[name] for name in self.mappings}


# --- what is read -----------------------------------------------------------------------------------------------------


def load_entries(
    entries: dict[str, Entry],
    reader: dcp.StorageReader,
    doing: str,
    partial: bool,
    trust: bool,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Load all entries; what `state` has afterwards. Each of these steps succeeds on all ranks, or raises on all."""

    def choose() -> tuple[dict[str, Any], dict[str, list[str]]]:
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        metadata = reader.read_metadata()
        has_notes = NOTES in metadata.state_dict_metadata
        notes, apart = read(reader, {NOTES: None}, trust)[NOTES] if has_notes else ([], [])
        saved = tree(stored_values(metadata, apart, rank, size), dict(map(tuple, notes)))
        if lost := [key for key in entries if key not in saved]:
            raise CheckpointError(f"state has {lost[0]!r}, and the checkpoint has not: it has {', '.join(saved)}")
        filled = {key: entry.fill(saved[key], partial) for key, entry in entries.items()}
        return {key: chosen for key, (chosen, _) in filled.items()}, {key: left for key, (_, left) in filled.items()}

    chosen, unread = all_succeed(choose, doing, group)
    all_unread = gather_objects(unread, group)  # ranks may have different parts of a model, as stages of a pipeline
    for key in dict.fromkeys(key for theirs in all_unread for key in theirs) if not partial else ():
        first, *others = [theirs[key] for theirs in all_unread if key in theirs]
        if names := [name for name in first if all(name in theirs for theirs in others)]:
            raise CheckpointError(f"{doing}: the checkpoint has names that state[{key!r}] does not have: "
                                  f"{listed(names)}; pass partial=True to leave them out")  # fmt: skip
    wanted = [stored.to_read() for _, stored in leaves(chosen) if isinstance(stored, Stored)]
    targets = {name: target for each in wanted for name, target in each.items()}
    values = all_succeed(lambda: read(reader, targets, trust), doing, group)
    found = map_leaves(lambda _, each: each.loaded(values) if isinstance(each, Stored) else each, chosen)
    return all_succeed(lambda: {key: entry.put(found[key]) for key, entry in entries.items()}, doing, group)


# --- errors of all ranks ----------------------------------------------------------------------------------------------


@contextmanager
def errors_of_ranks(doing: str) -> Iterator[None]:
    """Turn DCP's error, a BaseException on all ranks, into a short one; tell errors of communication what was done."""
    try:
        yield
    except dcp.CheckpointException as error:
        said = {rank: str(failure) or repr(failure) for rank, (failure, _) in error.failures.items()}
        raise _failure_of_ranks(doing, said) from error
    except RuntimeError as error:
        if not isinstance(error, CheckpointError):
            error.add_note(f"This was {doing}.")
        raise


def all_succeed(work: Callable[[], T], doing: str, group: dist.ProcessGroup | None) -> T:
    """What `work` returns, when it has on every rank of `group`; CheckpointError on all if it raised on any."""
    said, cause, result = None, None, None
    try:
        result = work()
    except Exception as error:
        said, cause = str(error) or repr(error), error  # some errors, such as MemoryError, have no text
    of_ranks = gather_objects(said, group)
    if failed := {rank: each for rank, each in enumerate(of_ranks) if each is not None}:
        raise _failure_of_ranks(doing, failed) from cause
    return result  # type: ignore[return-value]  # None if that is what it returns


def _failure_of_ranks(doing: str, said: dict[int, str]) -> CheckpointError:
    return CheckpointError(f"{doing}: " + "; ".join(f"rank {rank}: {what}" for rank, what in said.items()))
