"""Operators that copy between a device and pinned memory of the host, on a stream of their own: `fsdp_flat::to_host`.

    to_host(tensor)             a copy on the host; begins behind what has been computed so far
    from_host(host, after)      a copy on the device of `after`; begins behind what has been computed so far
    wait_copy(copy, source)     `copy`, which is complete for what computes from here on; `source` is alive until then

Computing does not wait for a copy until `wait_copy`. `after` is any tensor on the device: backward has it when it may
begin to copy, and not before. Where there is no device, on the CPU, copies are made at once.

Note [What keeps a copied tensor alive]
The caching allocator gives memory to the next tensor of the computing stream as soon as the last reference is gone,
though another stream may still read it. `wait_copy` has the source among its arguments and makes the computing stream
wait for the copy's event, so that memory that is freed behind it is no longer read. Pinned memory needs no such care:
its allocator notes the events of copies itself. A result is allocated on the computing stream, and the copying stream
waits for that before it writes.
"""

import torch
from torch import Tensor

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)  # events of a replay would be those of the capture

torch.library.define("fsdp_flat::to_host", "(Tensor tensor) -> Tensor", tags=_TAGS)
torch.library.define("fsdp_flat::from_host", "(Tensor host, Tensor after) -> Tensor", tags=_TAGS)
torch.library.define("fsdp_flat::wait_copy", "(Tensor(a) copy, Tensor source) -> Tensor(a)", tags=_TAGS)
torch.library.define("fsdp_flat::end_copy", "(Tensor copy) -> Tensor", tags=_TAGS)  # what generated code calls

TO_HOST = torch.ops.fsdp_flat.to_host.default
FROM_HOST = torch.ops.fsdp_flat.from_host.default
WAIT_COPY = torch.ops.fsdp_flat.wait_copy.default
END_COPY = torch.ops.fsdp_flat.end_copy.default


class _Copies:
    """The copying stream of each device, and the events of copies that have not been waited for, by address."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.events: dict[int, tuple[torch.cuda.Event, torch.device]] = {}

    def start(self, copy: Tensor, source: Tensor, device: torch.device) -> Tensor:
        """Begin to fill `copy`, behind what the device's current stream has been given."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy.copy_(source, non_blocking=True)
            self.events[copy.data_ptr()] = stream.record_event(), device
        return copy

    def end(self, copy: Tensor) -> Tensor:
        """Have the current stream wait for `copy`."""
        if copy.data_ptr() in self.events:
            event, device = self.events.pop(copy.data_ptr())
            torch.cuda.current_stream(device).wait_event(event)
        return copy


_copies = _Copies()


@torch.library.impl("fsdp_flat::to_host", "default")
def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return _copies.start(host, tensor, tensor.device)


@torch.library.impl("fsdp_flat::from_host", "default")
def _from_host(host: Tensor, after: Tensor) -> Tensor:
    if after.device.type == "cpu":
        return host.clone()
    return _copies.start(torch.empty(host.shape, dtype=host.dtype, device=after.device), host, after.device)


@torch.library.impl("fsdp_flat::wait_copy", "default")
def _wait_copy(copy: Tensor, source: Tensor) -> Tensor:
    return _copies.end(copy)


@torch.library.impl("fsdp_flat::end_copy", "default")
def _end_copy(copy: Tensor) -> Tensor:
    return _copies.end(copy)


@torch.library.register_fake("fsdp_flat::to_host")
def _fake_to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@torch.library.register_fake("fsdp_flat::from_host")
def _fake_from_host(host: Tensor, after: Tensor) -> Tensor:
    return torch.empty(host.shape, dtype=host.dtype, device=after.device)


@torch.library.register_fake("fsdp_flat::wait_copy")
def _fake_wait_copy(copy: Tensor, source: Tensor) -> Tensor:
    return copy


@torch.library.register_fake("fsdp_flat::end_copy")
def _fake_end_copy(copy: Tensor) -> Tensor:
    return copy
