"""The documentation is a site without dead ends, also for models, and asks no other host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / "scripts/docs", "--out", out],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "site"


def test_every_page_and_every_example_is_on_the_site(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    pages += [path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py")]
    places = [page.with_name("index.md") if page.name == "README.md" else page for page in pages]
    assert [place for place in places if not (site / place.with_suffix(".html")).exists()] == []
    assert (site / "pages.html").exists(), "docs/README.md: index.html is the README"


def test_blocks_of_code_are_shown_as_code(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(r"(^|<p>)```", page.read_text(), re.MULTILINE), page.name


def test_a_page_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="([^"]+)"', page.read_text()
        )
        assert loaded and not [address for address in loaded if "//" in address], page.name


def test_models_find_every_page_as_markdown(site: Path) -> None:
    listed = (site / "llms.txt").read_text()
    assert listed.startswith("# Hutch\n\n> ")
    places = re.findall(r"^- \[.+?\]\((\S+\.md)\)", listed, re.MULTILINE)
    pages = {page.relative_to(site).with_suffix(".md") for page in site.rglob("*.html")}
    assert {Path(place) for place in places} == pages - {Path("404.md")}
    whole = (site / "llms-full.txt").read_text()
    for place in places:
        text = (site / place).read_text()
        assert text.strip() in whole
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (site / place).parent.joinpath(target).exists(), f"{place}: {target}"


def test_a_dead_link_and_a_page_nobody_can_find_fail_the_build(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    for name in ("docs", "examples", "website"):
        shutil.copytree(ROOT / name, root / name)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "scripts/docs"):
        (root / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, root / path.relative_to(ROOT))
    (root / "docs/guides/new.md").write_text(
        "# New\n\n[No page](nowhere.md), [no part](files.md#no)\n"
    )
    (root / "docs/lost.md").write_text("# Lost\n\nNo navigation leads here.\n")
    done = build(root, tmp_path / "out")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "nowhere.md" in said and "#no" in said and "lost.md" in said, said
