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
# Generated code gives no source: it keeps that alive in a way of its own.
torch.library.define("fsdp_flat::wait_copy", "(Tensor(a) copy, Tensor? source=None) -> Tensor(a)", tags=_TAGS)

TO_HOST = torch.ops.fsdp_flat.to_host.default
FROM_HOST = torch.ops.fsdp_flat.from_host.default
WAIT_COPY = torch.ops.fsdp_flat.wait_copy.default

_streams: dict[torch.device, torch.cuda.Stream] = {}  # the copying stream of each device
_events: dict[int, tuple[torch.cuda.Event, torch.device]] = {}  # of copies that are not waited for yet, by address


def _start(copy: Tensor, source: Tensor, device: torch.device) -> Tensor:
    """Begin to fill `copy`, behind what the device's current stream has been given."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
        _events[copy.data_ptr()] = stream.record_event(), device
    return copy


@torch.library.impl("fsdp_flat::to_host", "default")
def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    return _start(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), tensor, tensor.device)


@torch.library.impl("fsdp_flat::from_host", "default")
def _from_host(host: Tensor, after: Tensor) -> Tensor:
    if after.device.type == "cpu":
        return host.clone()
    return _start(torch.empty(host.shape, dtype=host.dtype, device=after.device), host, after.device)


@torch.library.impl("fsdp_flat::wait_copy", "default")
def _wait_copy(copy: Tensor, source: Tensor | None = None) -> Tensor:
    if copy.data_ptr() in _events:
        event, device = _events.pop(copy.data_ptr())
        torch.cuda.current_stream(device).wait_event(event)
    return copy


torch.library.register_fake(
    "fsdp_flat::to_host", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
)
torch.library.register_fake(
    "fsdp_flat::from_host", lambda host, after: torch.empty(host.shape, dtype=host.dtype, device=after.device)
)
torch.library.register_fake("fsdp_flat::wait_copy", lambda copy, source=None: copy)
