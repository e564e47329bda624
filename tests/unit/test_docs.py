"""The documents build without a warning, and every link in them leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]  # not built by mkdocs


def test_the_documents_build(tmp_path: Path) -> None:
    """`mkdocs build --strict`: no page, anchor or docstring is missing, and no page is left out of the navigation.

    With `--quiet` warnings would not be counted.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    page = (tmp_path / "reference" / "index.html").read_text()
    assert 'id="fsdp_compile.fully_shard"' in page
    assert "fonts.googleapis.com" not in page, "expected no font from the network; set `font: false`"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", each)) for each in headings]
    return {re.sub(r"\s+", "-", each.strip().lower()) for each in plain}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures of the documents that mkdocs does not build, with their anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: expected {target} to exist"
        assert not anchor or anchor in anchors(file), f"{page.name}: expected a heading for {target}"


def test_no_path_of_a_machine() -> None:
    """Documents name no absolute path and no host of a package registry."""
    for page in [*OUTSIDE, *(ROOT / "docs").glob("*.md")]:
        assert not re.findall(r"(?<![\w.:/])/(?:work|home|root|tmp|mnt)/\S*|file://\S*", page.read_text()), page


def test_files_that_are_named_exist() -> None:
    """Every file of the package and of the tests that a document names is there."""
    missing = []
    for page in [*OUTSIDE, *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`([\w/]+/\w+\.py)\b", page.read_text()):
            if not (ROOT / name).exists() and not (ROOT / "fsdp_compile" / name).exists():
                missing.append(f"{page.name}: {name}")
    assert missing == []


def test_the_list_of_private_names_is_complete() -> None:
    """docs/upgrading_torch.md has a row for each `_torch.py`."""
    package = ROOT / "fsdp_compile"
    rows = re.findall(r"^\| `([\w/]+/_torch\.py)`", (ROOT / "docs" / "upgrading_torch.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.relative_to(package).as_posix() for path in package.rglob("_torch.py"))
