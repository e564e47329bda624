"""The package and its documents use the words of docs/glossary.md, one word for one thing.

The last column of the glossary's tables names what must not be used: names in backquotes are forbidden as a part of an
identifier, phrases in quotes are forbidden in prose.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
FOLDERS = ("core", "comm", "construct", "eager", "optim", "passes", "state_dict", "checkpoint", "explain", "top")
FOLDERS += ("integrations", "docs")

# A whole string, or from Python 3.12 on the text between the braces of an f-string.
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

# Identifiers that contain a forbidden word, and why they may.
EXEMPT = {
    "UnshardHandle": "FSDP2's name for what unshard(async_op=True) returns",
    "RemovableHandle": "torch's name for what registering a hook returns",
    "parts": "pathlib's attribute; allowed as an attribute only",
    "Number": "numbers.Number of the standard library",
    "FileNotFoundError": "Python's name",
    "found_inf": "GradScaler's name",
    "found_inf_per_device": "GradScaler's name",
    "_found_inf_per_device": "GradScaler's name",
    "kept_unsharded": "names the decision to keep a unit unsharded",
    "free_kept_unsharded": "as kept_unsharded",
    "_take_kept_unsharded": "as kept_unsharded",
    "predict_runs": "training runs, as the command line's option --runs",
    "fit_runs": "likewise",
    "runs": "likewise; allowed as an attribute only",
    "KeptUnsharded": "names the decision to keep a unit unsharded",
}
ATTRIBUTES_ONLY = {"parts", "runs"}

# How a phrase of the glossary is recognized in a text, with its inflections.
IDIOMS = {
    "flat number": r"flat[- ]number(s|ed)?",
    "stamp": r"stamp(s|ed)?",
    "twin": r"twins?",
    "materialise": r"materialis(e|es|ed|ing|ation)",
    "exchange of slices": r"exchanges?( of)? slices|reduce by an exchange",
    "gather ahead": r"gather(s|ed|ing)? (\w+ )?ahead",
    "gathered one ahead": r"one ahead",
    "hand over": r"hand(s|ed|ing)? over|hand-overs?",
    "lend": r"lend(s|ing)?|lent",
    "take back": r"tak(e|es|en|ing) back|took back",
    "launched together": r"launch(es|ed)? together",
    "agreement": r"agreements?",
    "unsynced": r"unsynced",
    "kept gradient": r"kept gradients?|gradients? (that )?(is|are|was|were) kept|what was kept",
    "file of times": r"files? of times",
    "marks of": r"marks? of (a|the|its) (tasks?|times?)|link file",
    "beat": r"beat(s|en|ing)?",
    "by turns": r"by turns",
    "in turns": r"in turns",
    "take turns": r"tak(e|es|ing) turns|turn by turn",
    "lean": r"lean(er|est)?",
    "aside": r"aside(?! from)",
    "publish": r"publish(es|ed|ing)?",
}


class Rules(NamedTuple):
    """What the glossary forbids."""

    words: frozenset[str]  # as a part of an identifier
    idioms: re.Pattern[str]  # in prose


class Violation(NamedTuple):
    """A word or phrase at a place that can be opened."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@cache
def rules() -> Rules:
    """The last column of every table of the glossary."""
    rows = [line.strip().strip("|").split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    column = " ".join(row[-1] for row in rows)
    words = frozenset(re.findall(r"`(\w+)`", column))
    phrases = re.findall(r'"([^"]+)"', column)
    pattern = "|".join(IDIOMS[phrase] for phrase in phrases).replace(" ", r"\s+")
    return Rules(words, re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE))


# --- identifiers ------------------------------------------------------------------------------------------------------


def words_of(identifier: str) -> list[str]:
    """`_flatParam_ids` is flat, param, ids."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def identifiers(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line and text of each identifier of a module, and whether it is an attribute of something."""
    yield 1, path.stem, False
    for node in ast.walk(ast.parse(path.read_text())):
        line = getattr(node, "lineno", 1)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name, False
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield line, name, False
            case ast.Attribute(attr=name):
                yield line, name, True
            case ast.alias(name=name, asname=other):
                yield from ((line, each, False) for each in [*name.split("."), *([other] if other else [])])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield line, name, False
            case ast.Constant(value=str(text)):  # operators and environment variables are named in strings
                for name in re.findall(r"fsdp_flat::(\w+)|(FSDP_COMPILE_\w+)", text):
                    yield line, "".join(name), False


def forbidden_identifiers(folder: str) -> list[Violation]:
    """Identifiers of a folder's modules that contain a forbidden word."""
    violations = []
    for path in sources(folder):
        if path.suffix != ".py":
            continue
        for line, name, attribute in identifiers(path):
            exempt = name in EXEMPT and (attribute or name not in ATTRIBUTES_ONLY)
            if not exempt and rules().words.intersection(words_of(name)):
                violations.append(Violation(shown(path), line, name))
    return sorted(set(violations))


# --- prose ------------------------------------------------------------------------------------------------------------


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each comment block and string of a module, of each paragraph of a document."""
    text = path.read_text()
    if path.suffix == ".md":
        for block in re.finditer(r"(?:.+\n?)+", text):
            if path != GLOSSARY or not block.group().startswith("|"):
                yield 1 + text.count("\n", 0, block.start()), block.group()
        return
    comment: list[str] = []  # the lines of one block of comments
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != last + 1:
                yield last - len(comment) + 1, " ".join(comment)
                comment = []
            comment.append(token.string.lstrip("# "))
            last = token.start[0]
        elif token.type in STRINGS:
            yield token.start[0], token.string
    if comment:
        yield last - len(comment) + 1, " ".join(comment)


def forbidden_idioms(folder: str) -> list[Violation]:
    """Phrases of a folder's comments, strings and documents that the glossary forbids."""
    violations = []
    for path in sources(folder):
        for first, text in prose(path):
            for match in rules().idioms.finditer(text):
                line = first + text.count("\n", 0, match.start())
                violations.append(Violation(shown(path), line, f'"{match.group()}"'))
    return sorted(set(violations))


# --- files ------------------------------------------------------------------------------------------------------------


def sources(folder: str) -> list[Path]:
    """The files of one part of the tree; "top" is what lies in no folder of the package."""
    if folder == "docs":
        return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    package = ROOT / "fsdp_compile"
    return sorted(package.glob("*.py") if folder == "top" else (package / folder).rglob("*.py"))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def report(violations: list[Violation]) -> str:
    """All violations, the most frequent first, for the message of a failed test."""
    counts = Counter(each.text for each in violations)
    common = ", ".join(f"{text} {count}" for text, count in counts.most_common(12))
    return "\n".join([f"{len(violations)} words that docs/glossary.md forbids: {common}", *map(str, violations)])


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_identifiers(folder: str) -> None:
    """No identifier has a word that the glossary forbids as a part of it."""
    if violations := forbidden_identifiers(folder):
        pytest.fail(report(violations), pytrace=False)


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose(folder: str) -> None:
    """No comment, string or document has a phrase that the glossary forbids."""
    if violations := forbidden_idioms(folder):
        pytest.fail(report(violations), pytrace=False)


def test_every_file_is_read() -> None:
    """No module of the package lies outside the folders above."""
    read = {path for folder in FOLDERS for path in sources(folder) if path.suffix == ".py"}
    assert read == set((ROOT / "fsdp_compile").rglob("*.py"))


@pytest.mark.parametrize(
    ("identifier", "caught"),
    [
        ("flat_number", True),
        ("FullHandle", True),
        ("_keptViews", True),
        ("numbers", False),
        ("handler", False),
        ("partsOf", True),
    ],
)
def test_an_identifier_is_divided_into_words(identifier: str, caught: bool) -> None:
    """Words count, not letters within a longer word."""
    assert bool(rules().words.intersection(words_of(identifier))) == caught


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("units are gathered\n    one ahead", True),
        ("Ranks take turns", True),
        ("it is handed over to autograd", True),
        ("their return values", False),
        ("aside from that", False),
        ("a timestamp", False),
    ],
)
def test_an_idiom_is_recognized(text: str, caught: bool) -> None:
    """Phrases count over line ends and with their inflections."""
    assert bool(rules().idioms.search(text)) == caught


if __name__ == "__main__":  # how much is left
    for each in FOLDERS:
        names, phrases = forbidden_identifiers(each), forbidden_idioms(each)
        print(f"{each:12} {len(names):5} identifiers {len(phrases):5} phrases")
