"""A device that executes nothing and writes down everything: what an accelerator would be told, in which order.

with recorded(model) as log:
    model(x).sum().backward()

log.lines == ["unshard waits for compute", "gather blocks.0 in unshard", ..., "compute blocks.0", ...]
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from models import Residual, Stack
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.eager.streams import Device, Streams, UnshardedBuffer


class Log:
    """Lines that were written, and what they are about."""

    def __init__(self, model: nn.Module) -> None:
        self.lines: list[str] = []
        self.stream = "compute"
        scopes = [(name or "root", module) for name, module in model.named_modules() if "_fsdp" in vars(module)]
        flats = [(name, flat) for name, m in scopes for u in m._fsdp.units for flat in u.flats]
        self.units = {flat.layout.numel: name for name, flat in flats}
        self.shards = {flat.layout.shard_numel: name for name, flat in flats}
        different = {(name, flat.layout.numel) for name, flat in flats}
        assert len(self.units) == len(different), "expected units whose flat parameters have different sizes"

    def add(self, line: str) -> None:
        self.lines.append(line)

    def about(self, *words: str) -> list[str]:
        """The lines that begin with one of `words`."""
        return [line for line in self.lines if line.startswith(words)]

    def place(self, line: str, start: int = 0) -> int:
        """Where `line` is first; a readable error if it is nowhere."""
        assert line in self.lines[start:], f"expected {line!r} after line {start} of:\n" + "\n".join(self.lines)
        return self.lines.index(line, start)


class NamedStreams(Device):
    """Streams by name; `of.stream` is the current one."""

    has_streams = True

    def __init__(self, of: Any) -> None:
        self.of, self.names = of, iter(["unshard", "post-backward"])

    def new_stream(self) -> str:
        return next(self.names)

    def current_stream(self) -> str:
        return self.of.stream

    @contextmanager
    def run_in(self, stream: str) -> Iterator[None]:
        before, self.of.stream = self.of.stream, stream
        try:
            yield
        finally:
            self.of.stream = before


class RecordingDevice(NamedStreams):
    """Events by name."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.log, self.events = log, 0

    def order(self, first: str, then: str) -> None:
        self.log.add(f"{then} waits for {first}")

    def keep(self, tensor: Tensor, stream: str) -> None:
        self.log.add(f"keep {self.log.units.get(tensor.numel(), 'a shard')} for {stream}")

    def record(self, stream: str) -> str:
        self.events += 1
        self.log.add(f"event {self.events} in {stream}")
        return f"event {self.events}"

    def block(self, event: str) -> None:
        self.log.add(f"host waits for {event}")


@contextmanager
def recorded(model: Any, limit_gathers: bool = True) -> Iterator[Log]:
    """What happens inside, on a device of the root `model` that has streams."""
    log = Log(model)
    device = units_gathered_below(model)[0].device
    root = model._fsdp_runtime
    with ExitStack() as stack:
        streams = {device: Streams(RecordingDevice(log), limit_gathers)}
        stack.enter_context(mock.patch.object(root, "_streams", streams))
        for patch in _patches(log):
            stack.enter_context(patch)
        for hook in _compute_hooks(model, log):
            stack.callback(hook.remove)
        yield log


def _patches(log: Log) -> Iterator[Any]:
    def note(owner: Any, name: str, line: Callable[..., str]) -> Any:
        original = getattr(owner, name)

        def noting(*args: Any) -> Any:
            log.add(line(*args))
            return original(*args)

        return mock.patch.object(owner, name, noting)

    start_reduce_scatter = collectives.start_reduce_scatter

    def reduce(full: Tensor, *args: Any) -> tuple[Tensor, Callable[[], None]]:
        name = log.units[full.numel()]
        log.add(f"reduce {name} in {log.stream}")
        reduced, finish = start_reduce_scatter(full, *args)

        def finishing() -> None:
            log.add(f"wait for reduced {name} in {log.stream}")
            finish()

        return reduced, finishing

    yield note(collectives, "start_all_gather", lambda full, *_: f"gather {log.units[full.numel()]} in {log.stream}")
    yield note(
        collectives, "start_all_reduce", lambda part, *_: f"all-reduce {log.shards.get(part.numel())} in {log.stream}"
    )
    yield note(
        UnshardedBuffer, "finish", lambda buffer: f"wait for {log.units[buffer.flat.layout.numel]} in {log.stream}"
    )
    yield note(UnshardedBuffer, "free", lambda buffer: f"free {log.units[buffer.flat.layout.numel]}")
    yield mock.patch.object(collectives, "start_reduce_scatter", reduce)


def _compute_hooks(model: nn.Module, log: Log) -> Iterator[Any]:
    for name, module in model.named_modules():
        if isinstance(module, Residual):

            def forward(_module: nn.Module, _args: Any, name: str = name) -> None:
                log.add(f"compute {name}")

            def output(_module: nn.Module, _args: Any, out: Tensor, name: str = name) -> None:
                if out.requires_grad:
                    out.register_hook(lambda grad: log.add(f"backward {name}"))

            yield module.up.register_forward_pre_hook(forward)
            yield module.down.register_forward_hook(output)


def unlike_blocks(count: int = 3, width: int = 11) -> Stack:
    """A stack whose units all have different sizes."""
    return Stack([Residual(width, 23 + 32 * index) for index in range(count)], width=width)
