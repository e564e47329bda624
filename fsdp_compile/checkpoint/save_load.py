"""`save` and `load`: a dict of models, optimizers and other states to and from a folder of checkpoints.

Models and optimizers, sharded or not, go through `torch.distributed.checkpoint.state_dict`: files have original names
and shapes, and loading reads into the memory of the shards.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from fsdp_compile.checkpoint.directory import DirectoryReader, DirectoryWriter, committed, open_checkpoint, step_of
from fsdp_compile.checkpoint.untrusted import CheckpointError, ValuePlanner
from fsdp_compile.comm.collectives import gather_objects, on_first_rank
from fsdp_compile.core.sharding import WRAPPED, clean_name


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
            shapes. Objects with `state_dict()`. Tensors and values that can be pickled, also in nested dicts and
            lists; of those that all ranks have under one name, one rank writes its own.
        root: a folder that all ranks share; made if it does not exist.
        step: names the checkpoint; 0 or more.
        keep: how many checkpoints stay, this one included; None: all.
        process_group: the ranks that call it; default: all.

    Raises:
        CheckpointError: on all ranks, if one of them could not give its state or write its part.
        RuntimeError: a rank died or exceeded the group's timeout. Earlier checkpoints stay.
        ValueError: `step` is below 0 or `keep` below 1; or the parameters of an optimizer are in no model of `state`;
            or an object with a `state_dict()` is nested within a dict, list or tuple.
    """
    stateful, doing = _as_stateful(state), f"saving step {step} in {root}"
    writer = DirectoryWriter(root, step, keep)
    try:
        with errors_of_ranks(doing):
            dcp.save(_collect(stateful, doing, process_group), storage_writer=writer, process_group=process_group)
    finally:
        writer.discard()


def load(
    state: dict[str, Any],
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    trust: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Load a checkpoint of the folder `root` into `state`, in place, by name; all ranks must call it.

    Tensors are filled in place, models, optimizers and other objects load by `load_state_dict`, other values are
    replaced. Entries of the checkpoint that `state` does not have are not read. Any number of ranks may have saved it.

    Args:
        state: nested as the one that was saved.
        root: the folder that was given to `save`; or one checkpoint, such as `fsdp-compile checkpoint convert` writes.
        step: which checkpoint; None: the newest whose files are all there.
        trust: load values of any type, which can run code that their author chose. Otherwise only tensors, plain types
            and those of `torch.serialization.safe_globals` are loaded.
        process_group: the ranks that call it; default: all.

    Returns:
        The step of the checkpoint; 0 if it was converted from something that has none.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: on all ranks, if on one of them a file is missing, truncated or altered (the message names the
            file and the tensor), `state` has a name that the checkpoint does not have, a value needs `trust`, or a
            `load_state_dict` raised. What was read before stays.
        RuntimeError: a rank died or exceeded the group's timeout.
    """

    def find() -> Any:
        checkpoint = open_checkpoint(root, step)
        if checkpoint is None:
            steps = ", ".join(str(step_of(path)) for path in committed(root)) or "none"
            what = "a complete checkpoint" if step is None else f"a checkpoint of step {step}"
            raise FileNotFoundError(f"{root}: expected {what}, found steps: {steps}; pass one of them")
        return *checkpoint, _state_of_folder(checkpoint[0])

    def put() -> None:
        for key, value in stateful.items():
            if isinstance(value, Stateful):
                value.load_state_dict(loaded[key])
            else:
                state[key] = loaded[key]

    stateful = _as_stateful(state)
    while True:
        with errors_of_ranks(f"looking for a checkpoint in {root}"):
            path, manifest, found = on_first_rank(find, process_group)  # so that all ranks load the same
        doing = f"loading {path}"
        try:
            with errors_of_ranks(doing):
                loaded = _collect(stateful, doing, process_group)
                reader, planner = DirectoryReader(path, manifest), ValuePlanner(trust)
                dcp.load(loaded, storage_reader=reader, planner=planner, process_group=process_group)
                all_succeed(put, doing, process_group)
            return manifest.step or 0
        except CheckpointError:  # on all ranks
            if found is not None and on_first_rank(partial(_state_of_folder, path), process_group) == found:
                raise  # otherwise another job has removed the checkpoint to make room: load the next one


def _state_of_folder(path: Path) -> tuple[int, int] | None:
    """What changes if another folder takes its name; None if it was removed."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _collect(stateful: dict[str, Any], doing: str, group: dist.ProcessGroup | None) -> dict[str, Any]:
    state = dict(stateful)

    def collect() -> None:
        state.update((key, value.state_dict()) for key, value in state.items() if isinstance(value, Stateful))

    all_succeed(collect, doing, group)
    return state


# --- models and optimizers --------------------------------------------------------------------------------------------


class _InModel:
    """A model, or an optimizer over its parameters: original names, sharded values."""

    def __init__(self, get: Callable[..., dict[str, Any]], put: Callable[..., Any], *objects: Any) -> None:
        self.state_dict, self.load_state_dict = partial(get, *objects), partial(put, *objects)


def optimizer_in(models: Sequence[nn.Module], optimizer: Optimizer, what: str) -> Any:
    """The state of an optimizer under the names of that model which has its parameters; ValueError if there is none."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    owner = next((model for model in models if params <= set(model.parameters())), None)
    if owner is None:
        raise ValueError(f"{what}: no model in state has all of the optimizer's parameters; save and load the two "
                         f"together")  # fmt: skip
    return _InModel(
        dcp_state.get_optimizer_state_dict, dcp_state.set_optimizer_state_dict, _unwrapped(owner), optimizer
    )


def trained_in(model: nn.Module) -> Any:
    """The state of a model without its frozen parameters, which stay what they are when it is loaded."""

    def get(model: nn.Module) -> dict[str, Any]:  # torch's own `ignore_frozen_params` keeps further names of tied ones
        named = model.named_parameters(remove_duplicate=False)
        frozen = {clean_name(name) for name, param in named if not param.requires_grad}
        state: dict[str, Any] = dcp_state.get_model_state_dict(model)
        return {name: value for name, value in state.items() if name not in frozen}

    put = partial(dcp_state.set_model_state_dict, options=dcp_state.StateDictOptions(strict=False))
    return _InModel(get, put, _unwrapped(model))


def _as_stateful(state: dict[str, Any]) -> dict[str, Any]:
    """Replace models and optimizers by objects that DCP takes; ValueError for an optimizer without its model."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    stateful = dict(state)
    for key, value in state.items():
        if isinstance(value, nn.Module):
            stateful[key] = _InModel(dcp_state.get_model_state_dict, dcp_state.set_model_state_dict, _unwrapped(value))
        elif isinstance(value, Optimizer):
            stateful[key] = optimizer_in(models, value, f"state[{key!r}]")
        elif not isinstance(value, Stateful):
            _refuse_stateful(value, f"state[{key!r}]")
    return stateful


def _refuse_stateful(value: Any, where: str) -> None:
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_stateful(inner, f"{where}[{key!r}]")
    elif isinstance(value, Stateful):  # as models and optimizers are; DCP would pickle it, and loading would replace it
        raise ValueError(f"{where}: expected a tensor or a plain value, found a {type(value).__name__}; put what has a "
                         f"state_dict() into the outermost dict")  # fmt: skip


def _unwrapped(model: nn.Module) -> nn.Module:
    """Take off our wrapper and the compiler's, so that optimizer state gets the same names as parameters."""
    model = getattr(model, "_orig_mod", model)
    return model._modules.get(WRAPPED) or model


# --- errors of all ranks ----------------------------------------------------------------------------------------------


@contextmanager
def errors_of_ranks(doing: str) -> Iterator[None]:
    """Turn DCP's error, a BaseException on all ranks, into a short one; tell errors of communication what was done."""
    try:
        yield
    except dcp.CheckpointException as error:
        said = {rank: str(failure) or repr(failure) for rank, (failure, _) in error.failures.items()}
        raise _failed(doing, said) from error
    except RuntimeError as error:
        if not isinstance(error, CheckpointError):
            error.add_note(f"This was {doing}.")
        raise


def all_succeed(work: Callable[[], None], doing: str, group: dist.ProcessGroup | None) -> None:
    """Call `work` on every rank of `group`; when all have returned, CheckpointError on all if it raised on any."""
    said, cause = None, None
    try:
        work()
    except Exception as error:
        said, cause = str(error) or repr(error), error  # some errors, such as MemoryError, have no text
    of_ranks = gather_objects(said, group)
    if failed := {rank: each for rank, each in enumerate(of_ranks) if each is not None}:
        raise _failed(doing, failed) from cause


def _failed(doing: str, said: dict[int, str]) -> CheckpointError:
    return CheckpointError(f"{doing}: " + "; ".join(f"rank {rank}: {what}" for rank, what in said.items()))
