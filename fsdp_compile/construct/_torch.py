"""Names that torch's sharding has in some versions only. Checked on torch 2.11 and 2.13.

`DataParallelMeshDims` is public from torch 2.13 on. Torch 2.11 has no argument that takes it; `dp_mesh_dims` of this
package does there too. When the package needs torch 2.13, drop this file.
"""

from dataclasses import dataclass

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:

    @dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]  # in torch 2.11 it is the only one
        """Which dimensions of a mesh, by name, to shard and to replicate over; several for one role are one dimension.

        Raises:
            ValueError: there is neither.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "DataParallelMeshDims: expected names of dimensions, found neither shard nor replicate; "
                    "set at least one of them"
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            """The dimensions to shard over."""
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """The dimensions to replicate over."""
            return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


__all__ = ["DataParallelMeshDims"]
