"""The code blocks of documents, which run as their reader would run them, and what the pages show that they print.

    ```python              runs: all such blocks of a page, in order, are one script
    ```text                what rank 0 has printed there since the last block; `...` stands for anything
    ```shell               its lines run as commands after the page's Python, in the same folder
    <!-- file: gpt.py -->  before a Python block: it is also written to that file
    <!-- not run: why -->  before a block that cannot run here: it needs a GPU, a private file, or minutes
    <!-- setup             Python that the reader is taken to have
    ...
    -->

`torchrun pages.py PAGE PORT` runs the Python of a page.
"""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Block:
    """A code block: its language, its first line, its text, the file it is, and why it does not run."""

    page: Path
    language: str
    line: int
    code: str
    file: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line + 1}"

    def check(self, printed: str) -> None:
        """AssertionError unless that is what this block shows."""
        shown, found = ("\n".join(map(str.rstrip, text.strip().splitlines())) for text in (self.code, printed))
        pattern = ".*?".join(map(re.escape, shown.split("...")))
        assert re.fullmatch(pattern, found, re.DOTALL), f"{self} shows\n{shown}\nand this was printed:\n{found}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines = page.read_text().splitlines()
    said: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if comment := re.fullmatch(r"<!-- (file|not run): (.+) -->", line):
            said[comment[1]] = comment[2]
        elif line == "<!-- setup" or line.startswith("```"):
            end = lines.index("-->" if line == "<!-- setup" else "```", at)
            language = "python" if line == "<!-- setup" else line.removeprefix("```")
            yield Block(page, language, at, "\n".join(lines[at:end]), said.get("file", ""), said.get("not run", ""))
            said, at = {}, end + 1
        elif line:
            said = {}


def run_python(page: Path) -> None:
    """Run the Python of a page here; AssertionError if rank 0 prints something else than the page shows."""
    sys.modules["__main__"] = module = ModuleType("__main__")  # where Dynamo looks names up
    names = vars(module)
    printed, shows = "", os.environ["RANK"] == "0" and any(block.language == "text" for block in blocks_of(page))
    before = ""
    for block in blocks_of(page):
        if block.language == "python" and not block.reason:
            if block.file and os.environ["RANK"] == "0":
                Path(block.file).write_text(block.code)
            with redirect_stdout(io.StringIO()) as output:
                exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
            printed += output.getvalue()
        elif block.language == "text" and before == "python" and not block.reason:
            if shows:
                block.check(printed)
            printed = ""
        before = block.language
    assert not (shows and printed), f"{page.name} does not show that this was printed:\n{printed}"


def run_commands(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Run the commands of a page; AssertionError if one fails or prints something else than the page shows."""
    path = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    printed, before = "", ""
    for block in blocks_of(page):
        if block.language == "shell" and not block.reason:
            command = ["bash", "-e", "-o", "pipefail", "-c", block.code]
            done = subprocess.run(command, cwd=folder, env=environment | {"PATH": path}, capture_output=True, text=True,
                                  timeout=250)  # fmt: skip
            assert done.returncode == 0, f"{block}: {done.stderr[-2000:]}"
            printed = done.stdout
        elif block.language == "text" and before == "shell" and not block.reason:
            block.check(printed)
        before = block.language


if __name__ == "__main__":
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # its keys are those of one process group, and pages make others
    os.environ["MASTER_PORT"] = sys.argv[2]
    run_python(Path(sys.argv[1]))
