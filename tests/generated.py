"""Reading the code that Inductor generates, C++ or Triton: what runs in which order, which kernels only move bytes.

program = Program(code)            the text of one generated module, forward or backward
program.steps                      collectives, waits, matrix products, kernels, in the order of the generated code
program.moves()                    stores, inside any kernel, of a value that was loaded and not changed
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ShapeAsConstantBuffer
from torch._inductor.utils import run_fw_bw_and_get_code

_ASSIGN = re.compile(r"^(buf\d+) = (.+)$")
_CALL = re.compile(r"^(?:buf\d+ = )?([\w.]+)\((.*)\)$")
_NAME = re.compile(r"\b(?:buf|primals_|tangents_|arg)\d+\w*\b")
_PART = re.compile(r"^(buf\d+) = (buf\d+)\[\d+\]$")
_MOVERS = re.compile(r"aten\.(clone|copy_?|cat|contiguous|_to_copy|slice_scatter|as_strided_scatter|constant_pad_nd)\b")


@dataclass(frozen=True)
class Move:
    """A store of an unchanged value: from one buffer to another, in a kernel or by a library call."""

    source: str
    target: str
    step: str


@dataclass
class Step:
    """One call in the generated code: what is called, its text, the buffers it names, and the one that it writes.

    `frees` are the buffers that are deleted behind it.
    """

    function: str
    text: str
    names: list[str]
    out: str | None
    frees: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """The variables that a kernel is given, in order."""
        return re.findall(r"\w+", _CALL.match(self.text)[2])

    @property
    def is_product(self) -> bool:
        return bool(
            re.match(
                r"extern_kernels\.(mm|addmm|_scaled_mm|bmm|baddbmm|convolution)|torch\.ops\.aten\.\w*(conv|attention)",
                self.function,
            )
        )

    @property
    def is_wait(self) -> bool:
        return "wait_tensor" in self.function or self.function == "fsdp_collectives.wait"

    @property
    def is_gather(self) -> bool:
        return "all_gather" in self.function

    @property
    def is_reduce(self) -> bool:
        return any(name in self.function for name in (".all_to_all", "reduce_scatter_tensor", "all_reduce"))


@dataclass
class Program:
    """The generated wrapper and kernels of one graph."""

    code: str
    steps: list[Step] = field(init=False)
    alias_of: dict[str, str] = field(init=False, default_factory=dict)  # buffer -> the buffer whose memory it names
    view_of: dict[str, str] = field(init=False, default_factory=dict)  # the same, where that is alive: slices
    parts: dict[str, list[str]] = field(init=False, default_factory=dict)  # what a call returned -> the tensors in it

    def __post_init__(self) -> None:
        self.kernels = {name: (params, body) for name, params, body in kernels(self.code)}
        self.steps = list(self._read_steps())

    def _read_steps(self) -> Iterator[Step]:
        in_call, step = False, None
        for line in self.code.splitlines():
            text = line.split("#")[0].strip()
            if re.match(r"def call\(", text) or text == "def call(self, args):":
                in_call = True
            elif in_call and text.startswith("return"):
                return
            elif step is not None and text.startswith("del "):
                step.frees += _NAME.findall(text)
            elif in_call and (read := self._read_line(text)) is not None:
                yield (step := read)

    def _read_line(self, text: str) -> Step | None:
        if part := _PART.match(text):
            self.parts.setdefault(part[2], []).append(part[1])
            return None
        assign = _ASSIGN.match(text)
        target = assign[1] if assign else None
        if assign and (reuse := re.match(r"^(buf\d+); del", assign[2])):
            self.alias_of[assign[1]] = reuse[1]
            return None
        if assign and (view := re.match(r"^reinterpret_tensor\((\w+),", assign[2])):
            self.alias_of[assign[1]] = self.view_of[assign[1]] = view[1]
            return None
        call = _CALL.match(text)
        if call is None or call[1].startswith(("empty_strided", "assert_", "args.")):
            return None
        out = re.search(r"\bout=(\w+)", call[2])
        return Step(call[1].removesuffix(".run"), text, _NAME.findall(call[2]), out[1] if out else target)

    def memory(self, name: str) -> str:
        """The buffer in whose memory `name` lies."""
        while name in self.alias_of:
            name = self.alias_of[name]
        return name

    def viewed(self, name: str) -> str:
        """The buffer that `name` is a slice of, or `name`: memory that was freed before is another buffer here."""
        while name in self.view_of:
            name = self.view_of[name]
        return name

    def gathered(self) -> set[str]:
        """The buffers that all-gathers fill."""
        return {name for step in self.steps if step.is_gather and step.out for name in self.returned(step)}

    def returned(self, step: Step) -> list[str]:
        """What a call returns: one tensor, or those of a coalesced launch."""
        return self.parts.get(step.out, [step.out])

    def packed(self) -> set[str]:
        """The buffers that reduce-scatters and all-reduces read."""
        return {self.memory(name) for step in self.steps if step.is_reduce for name in sent(step)}

    def races(self) -> list[str]:
        """What computes in, or frees, memory of a collective that is not waited for, and collectives that never are."""
        in_flight: list[set[str]] = []  # the memory of each, without inputs of the graph, which nothing writes
        found = []
        for step in self.steps:
            used = {self.memory(name) for name in (*step.names, *self.returned(step)) if name}
            if step.is_wait:
                in_flight = [each for each in in_flight if not used & each]
            found += [step.text for each in in_flight if used & each]
            if step.is_gather or step.is_reduce:
                in_flight.append({name for name in used if name.startswith("buf")})
            freed = {self.memory(name) for name in step.frees if name not in self.view_of}
            found += [f"del {freed & each} behind {step.text}" for each in in_flight if freed & each]
        return found + [f"no wait for {each}" for each in in_flight]

    def moves(self) -> list[Move]:
        """Every store of an unchanged value, and every library call that only moves bytes."""
        found = []
        for step in self.steps:
            if step.function in self.kernels:
                params, body = self.kernels[step.function]
                given = dict(zip(params, step.arguments[: len(params)], strict=True))
                found += [
                    Move(given[s], given[t], step.function) for s, t in _moves_in(body) if s in given and t in given
                ]
            elif _MOVERS.search(step.function):
                found += [Move(name, step.out or step.names[0], step.function) for name in step.names]
        return list(dict.fromkeys(found))  # a vectorised loop stores once more in its tail

    def parameter_moves(self) -> list[Move]:
        """Moves out of a gathered buffer or a shard that is gathered, and moves into a packed buffer."""
        gathered, packed = self.gathered(), self.packed()
        shards = {self.memory(name) for step in self.steps if step.is_gather for name in sent(step)}
        return [
            move
            for move in self.moves()
            if self.memory(move.source) in gathered | shards or self.memory(move.target) in packed
        ]

    def shared_kernels(self) -> list[str]:
        """Kernels that write gradients of two units, the root aside: it shares one with what it is computed beside."""
        roots = {self.memory(step.names[0]) for step in [each for each in self.steps if each.is_reduce][-1:]}
        found = []
        for step in self.steps:
            if step.function in self.kernels:
                written = {self.memory(name) for name in step.names if name in self.view_of} & self.packed()
                found += [step.text] if len(written - roots) > 1 else []
        return found

    def products_into_packs(self) -> list[Step]:
        """Matrix products that write into a slice of a packed buffer."""
        packed = self.packed()
        return [
            s for s in self.steps if s.is_product and s.out and s.out in self.alias_of and self.memory(s.out) in packed
        ]


def sent(step: Step) -> list[str]:
    """The buffers that a collective sends: several, if one call launches several."""
    together = re.search(r"coalesced\.default\(\[(.*?)\]", step.text)
    return _NAME.findall(together[1]) if together else step.names[:1]


def launches(program: Program) -> list[str]:
    """Starts and waits of collectives in the order of the generated code, as a plan calls them."""
    started: dict[str | None, str] = {}
    found = []
    for step in program.steps:
        if step.is_gather or step.is_reduce:
            kind = "gather" if step.is_gather else "reduce"
            started.update(dict.fromkeys(program.returned(step), kind))
            found += [kind] * len(sent(step))
        elif step.is_wait:
            found.append({"gather": "wait", "reduce": "wait_reduce"}[started[step.names[0]]])
    return found


def kernels(code: str) -> Iterator[tuple[str, list[str], str]]:
    """Each kernel: its name, the pointers that it is given, its text."""
    for name, body in re.findall(r"^(\w+) = async_compile\.cpp_pybinding\(.*?r'''(.*?)'''\)", code, re.S | re.M):
        params = re.search(r"void\s+kernel\((.*?)\)\s*\{", body, re.S)
        assert params is not None
        yield name, re.findall(r"(\w+)(?:,|$)", re.sub(r"\s+", " ", params[1])), body
    for name, body in re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.S | re.M):
        params = re.search(rf"def {name}\((.*?)\):", body)
        assert params is not None
        yield name, re.findall(r"\w+_ptr\d+", params[1]), body


_DEFINITION = re.compile(r"(?:auto )?(tmp\d+) = (.+?);?$")
_STORE = re.compile(r"(?P<value>tmp\d+)\.store\((?P<to>\w+) |tl\.store\((?P<tile_to>\w+) .*\), (?P<tile>tmp\d+)\b")
_STORE_SCALAR = re.compile(r"(?P<to>\w+)\[.*\] = (?P<value>tmp\d+);$")
_LOADS = (
    re.compile(r"at::vec::\w+<.*?>::loadu\((\w+) \+ "),
    re.compile(r"tl\.load\((\w+) \+ (?!.*\)\.to\()"),
    re.compile(r"(\w+)\[[^\]]*(?:\[[^\]]*\])*[^\]]*\]$"),
)


def _moves_in(body: str) -> Iterator[tuple[str, str]]:
    """(source pointer, target pointer) of each store whose value is exactly a load."""
    defined: dict[str, str] = {}
    for line in map(str.strip, body.splitlines()):
        if definition := _DEFINITION.match(line):
            defined[definition[1]] = definition[2]
        elif transposed := re.match(r"at::vec::transpose_mxn<.*?>\((\w+) \+ .*?(tmp\d+)\b.*\);$", line):
            defined[transposed[2]] = f"{transposed[1]}[0]"
        elif store := _STORE.match(line) or _STORE_SCALAR.match(line):
            found = store.groupdict()
            if source := _loaded(found["value"] or found["tile"], defined):
                yield source, found["to"] or found["tile_to"]


def _loaded(value: str, defined: dict[str, str]) -> str | None:
    """The pointer that `value` was loaded from unchanged, or None if it was computed."""
    expression = defined.get(value, "")
    if re.fullmatch(r"tmp\d+", expression):
        return _loaded(expression, defined)
    load = next((found for pattern in _LOADS if (found := pattern.match(expression))), None)
    if load is None or re.search(r"\btmp\d+\b", expression[len(load[1]) :].replace(load[1], "")):
        return None  # computed, or looked up by an index that is data, as an embedding is
    return _loaded(load[1], defined) if load[1].startswith("tmp") else load[1]


@contextmanager
def kernels_not_built() -> Iterator[None]:
    """Inductor generates code only for who collects it, and builds none: graphs return empty tensors of right shapes.

    On a fake process group values mean nothing, building takes nearly all of the time, and generating half of the rest.
    """

    def only_generate(lowering: GraphLowering) -> SimpleNamespace:
        if GraphLowering.save_output_code is not None:  # somebody, as below, collects the code
            GraphLowering.save_output_code(lowering.codegen()[0].value)
        else:
            lowering.scheduler = SimpleNamespace(nodes=[])  # which Inductor logs
        return SimpleNamespace(call=lambda args: _outputs(lowering, args))

    with mock.patch.object(GraphLowering, "compile_to_module", only_generate):
        yield


def _outputs(lowering: GraphLowering, args: list[Any]) -> list[Tensor | int | None]:
    """Empty tensors of the shapes that the graph's outputs have for these inputs, and its sizes."""
    known = dict[Any, int]()  # symbolic sizes
    for value, arg in zip(lowering.graph_inputs.values(), args, strict=True):
        if isinstance(arg, int):
            known[value] = arg
        elif isinstance(arg, Tensor):
            known |= zip(value.get_size(), arg.shape, strict=True)

    def sizes(those: Any) -> list[int]:
        return [int(sympy.sympify(each).xreplace(known)) for each in those]

    def output(out: Any) -> Tensor | int | None:
        if isinstance(out, ShapeAsConstantBuffer):
            return sizes([out.expr])[0]
        layout = out.maybe_get_layout()
        if layout is None:
            return None  # no gradient for this input
        return torch.empty_strided(sizes(layout.size), sizes(layout.stride), dtype=layout.dtype)

    return [output(out) for out in lowering.graph_outputs]


def readers_of(program: Program, shard: str) -> list[Step]:
    """What reads a shard beside its all-gathers and `check_ranks`, which asks where it lies."""
    reads = [step for step in program.steps if shard in step.names and not step.is_gather]
    return [step for step in reads if "check_ranks" not in step.function]


def programs(run: Callable[[], Tensor]) -> tuple[Program, Program]:
    """Compile and run `run`, a forward that returns a scalar loss, and its backward; the two generated programs.

    Whatever is compiled, nothing else uses memory that a collective still uses.
    """
    _, codes = run_fw_bw_and_get_code(run)
    assert len(codes) == 2, f"expected one forward and one backward, found {len(codes)} graphs"
    forward, backward = map(Program, codes)
    assert forward.races() == backward.races() == []
    return forward, backward
