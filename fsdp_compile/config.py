"""What users may choose about compilation, `CompileConfig`, and how files of settings are read. Imports no torch."""

import json
import os
import pathlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any

MOST_BYTES = 1 << 28  # of a file of text

MEASURE, MEASURED = "measure", "measured:"  # what `CompileConfig.link` may be, or begin with once ranks have measured


def check_type(name: str, value: Any, expected: Any) -> None:
    """Raise TypeError unless `value`, the argument of that name, is an instance of `expected`, a class or a union.

    A bool is no int here, and an int is a float.
    """
    kinds = expected.__args__ if isinstance(expected, UnionType) else (expected,)
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if not fits or (isinstance(value, bool) and bool not in kinds):
        names = (
            ("an " if kind.__name__[0] in "iIO" else "a ") + kind.__name__ for kind in kinds if kind is not NoneType
        )
        words = " or ".join([*names, *(["None"] if NoneType in kinds else [])])
        raise TypeError(f"{name}: expected {words}, found {type(value).__name__}")


@dataclass(frozen=True)
class CompileConfig:
    """The configuration of the graph passes. Fields that decide generated code are part of the compile caches' key.

    `torch.compile(model, backend="fsdp_compile", options={...})` takes the fields as options. Plain
    `torch.compile(model)` takes them from the environment (`FSDP_COMPILE_DISABLE=pin_order,order`) when the first
    model is sharded.

    Attributes:
        disable: names of passes to leave out (`fsdp_compile.passes.PASSES` lists them).
        reduces_in_flight: how many reduce-scatters may run before the oldest one is waited for. Each of them keeps the
            packed gradients of its unit alive until its wait. None: the newest and half a module.
        check_ranks_timeout: seconds that a rank waits for the others before it runs a compiled graph for the first
            time; compilation may take longer on some ranks.
        link: what connects the ranks, for a search of the plan with the shortest simulated step. A name in
            `fsdp_compile.passes.cost.hardware.links()`, `custom:<latency in seconds>,<bandwidth in bytes per second>`,
            or "measure": the ranks measure it together, for less than a second, when they first compile a sharded
            model. None: collectives follow the order of blocks, which needs no figures.
        device: what computes: a name in `fsdp_compile.passes.cost.hardware.devices()`, such as "h100", or the path of
            a hardware file. None looks it up by the name that the device itself reports; a CPU, and a device of another
            name, is measured with the link.
        budget: bytes that may be alive at once in a graph: shards, activations, gathered and packed buffers. The plan
            is searched within it, for a link that the ranks measure if none is named. None: there is no limit.
        profile: has no effect, warns, and will go; plans are made from the figures of `device`.
        plan: path of a file with plans to follow, as `str(plan)` under the headings `forward:` and `backward:`.
        record_profile: likewise.
        share_artifacts: likewise; `torch.compiler.save_cache_artifacts` takes compiled code to other ranks.

    Raises:
        TypeError: a field has a value of another type.
        ValueError: a field has a value that it cannot have.
    """

    disable: tuple[str, ...] = ()
    reduces_in_flight: int | None = None
    check_ranks_timeout: float = 600.0
    link: str | None = None
    device: str | None = None
    budget: int | None = None
    profile: str | None = None
    plan: str | None = None
    record_profile: bool = False
    share_artifacts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.disable, tuple | list) or not all(isinstance(each, str) for each in self.disable):
            raise TypeError(f"disable: expected a tuple of names of passes, found {self.disable!r}")
        object.__setattr__(self, "disable", tuple(self.disable))
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, each.name, value := os.fspath(value))
            check_type(each.name, value, each.type)
        if self.reduces_in_flight is not None and self.reduces_in_flight < 1:
            raise ValueError(f"reduces_in_flight must be at least 1, or None, not {self.reduces_in_flight}")
        if not self.check_ranks_timeout > 0:
            raise ValueError(f"check_ranks_timeout must be above 0 seconds, not {self.check_ranks_timeout}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget must be at least 1 byte, or None, not {self.budget}")
        for each in fields(self):
            if each.name in _WITHOUT_EFFECT and getattr(self, each.name) != each.default:
                text = f"{each.name} has no effect any more, and version 0.4 will not take it: "
                warnings.warn(text + _WITHOUT_EFFECT[each.name], FutureWarning, stacklevel=3)
                object.__setattr__(self, each.name, each.default)
        if self.link == "auto":
            text = "link='auto' is link='measure' now; without a link steps follow the order of blocks: leave it out"
            warnings.warn(text, FutureWarning, stacklevel=3)
        if self.link == "auto" or (self.link is None and (self.device, self.budget) != (None, None)):
            object.__setattr__(self, "link", MEASURE)

    @property
    def without_search(self) -> "CompileConfig":
        """This configuration where no link is known: collectives follow the order of blocks."""
        return replace(self, link=None, device=None, budget=None)

    @property
    def file_contents(self) -> tuple[str, ...]:
        """Contents of the files that the configuration names: they decide generated code, so cache keys hold them.

        Raises:
            ValueError: a file cannot be read, and is named.
        """
        device = self.device if self.device is not None and self.device.endswith(".json") else None
        files = {"device": device, "plan": self.plan}
        return tuple(_text_of(name, path) for name, path in files.items() if path is not None)

    @classmethod
    def from_environment(cls) -> "CompileConfig":
        """The configuration of plain `torch.compile`: field `name` from `FSDP_COMPILE_NAME`, where that is set.
        `FSDP_COMPILE_LINK=none` stands for None.

        Raises:
            ValueError: a variable has a value of another type than its field, or is that of an option that is gone; it
                is named.
        """
        for name, instead in _GONE.items():
            if os.environ.get(variable := f"FSDP_COMPILE_{name.upper()}"):
                raise ValueError(f"{variable}: this option is gone; {instead}")
        variables = {name: f"FSDP_COMPILE_{name.upper()}" for name in _PARSERS}
        return cls(**{name: _parse(name, variable) for name, variable in variables.items() if os.environ.get(variable)})


_PARSERS: dict[str, Callable[[str], Any]] = {
    "disable": lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
    "check_ranks_timeout": float,
    "link": lambda text: None if text == "none" else text,
    "device": str,
    "budget": int,
    "profile": str,
    "plan": str,
    "share_artifacts": lambda text: bool(int(text)),
}


_GONE = {"activations": "torch.utils.checkpoint and torch._functorch.config.activation_memory_budget are what remains"}


_PLANS = (
    "plans are made from the figures of the device, which the option device may name, as a file that `fsdp-compile "
    "calibrate` has written"
)
_WITHOUT_EFFECT = {
    "profile": _PLANS,
    "record_profile": _PLANS,
    "share_artifacts": "each rank compiles; torch.compiler.save_cache_artifacts() of one serves all in a later job",
}


def _text_of(name: str, path: str) -> str:
    try:
        return read_text(pathlib.Path(path))
    except ValueError as error:
        raise ValueError(f"{name}: cannot read {path}: {error}") from None


def _parse(name: str, variable: str) -> Any:
    try:
        return _PARSERS[name](os.environ[variable])
    except ValueError:
        raise ValueError(f"{variable} must be a number, not {os.environ[variable]!r}") from None


def path_in(folder: pathlib.Path, name: str, error: type[Exception] = ValueError) -> pathlib.Path:
    """The path of `name` in `folder`; it need not exist. `error` if it lies outside or is neither file nor folder.

    Links may lead to the folder itself, or from a snapshot in Hugging Face's cache to its `blobs`.
    """
    path, inside = folder / name, folder.resolve()
    try:
        target = path.resolve()
        is_other = target.exists() and not (target.is_file() or target.is_dir())
    except (OSError, RuntimeError) as found:  # a circle of links, a name that is too long
        raise error(f"{path}: expected a file, found {found}") from None
    allowed = [inside, *(above.parent / "blobs" for above in inside.parents if above.name == "snapshots")]
    if pathlib.Path(name).is_absolute() or not any(each in target.parents for each in allowed):
        raise error(f"{folder}: expected names of files in the folder, found {name!r}, which is {target}; if you trust "
                    f"what lies there, copy it into the folder")  # fmt: skip
    if is_other:
        raise error(f"{path}: expected a regular file, found another kind; remove it")
    return path


def file_in(folder: pathlib.Path, name: str, error: type[Exception] = ValueError) -> pathlib.Path:
    """As `path_in`, but a folder is refused too."""
    path = path_in(folder, name, error)
    if path.is_dir():
        raise error(f"{path}: expected a regular file, found a folder; remove it")
    return path


def read_text(path: pathlib.Path) -> str:
    """The text of a file. ValueError if it is no regular file, too large, or not UTF-8."""
    if not path.is_file():
        raise ValueError(f"no regular file {path.name}")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes, and {MOST_BYTES} are the most that is read")
    return path.read_text(encoding="utf-8")


def read_json(path: pathlib.Path) -> Any:
    """What a file of JSON says. ValueError if it cannot be read as above, is no JSON, or is nested too deeply."""
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
