"""What users may choose about compilation."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class CompileConfig:
    """Choices for the graph passes; every field decides generated code and is part of the compile caches' key.

    `torch.compile(model, backend="fsdp_compile", options={...})` takes the fields as options; plain
    `torch.compile(model)` takes them from the environment (`FSDP_COMPILE_DISABLE=pin,reorder`).

    Attributes:
        disable: names of passes to leave out (`fsdp_compile.passes.PASSES` lists them).
        reduces_in_flight: how many reduce-scatters may run before the oldest is waited for. Each keeps its unit's full
            gradients alive until its wait. None: wait for all at the end of backward.
        agreement_timeout: seconds that a rank waits, before it runs a compiled graph for the first time, for the others
            to come to the same point; compilation may take longer on some of them. In the environment
            `FSDP_COMPILE_AGREEMENT_TIMEOUT`.
    """

    disable: tuple[str, ...] = ()
    reduces_in_flight: int | None = 2
    agreement_timeout: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "disable", tuple(self.disable))
        if self.reduces_in_flight is not None and self.reduces_in_flight < 1:
            raise ValueError(
                f"reduces_in_flight: expected at least 1, or None for no limit, found {self.reduces_in_flight}"
            )
        if not self.agreement_timeout > 0:
            raise ValueError(f"agreement_timeout: expected seconds above 0, found {self.agreement_timeout}")

    @classmethod
    def from_environment(cls) -> "CompileConfig":
        """The configuration of plain `torch.compile`.

        From `FSDP_COMPILE_DISABLE` (names separated by commas) and `FSDP_COMPILE_AGREEMENT_TIMEOUT` (seconds).
        """
        names = os.environ.get("FSDP_COMPILE_DISABLE", "")
        timeout = os.environ.get("FSDP_COMPILE_AGREEMENT_TIMEOUT", cls.agreement_timeout)
        return cls(
            disable=tuple(name.strip() for name in names.split(",") if name.strip()), agreement_timeout=float(timeout)
        )
