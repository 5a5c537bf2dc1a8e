"""What the site of mkdocs.yml shows: README.md as its home, docs/, and docstrings.

A page is known to mkdocs by its path in the repository, so that links and pictures lead
where they do there; its address leaves out `docs/`.
"""
# ruff: noqa: INP001, N802

import pathlib
import re
from typing import Any

import markdown
from mkdocs.structure.files import File, Files

_ROOT = pathlib.Path(__file__).parents[1]
_SHOWN = ["README.md", "CHANGELOG.md", "benchmarks/*.md", "docs/*.md"]
_SHOWN += ["docs/*.png", "docs/*.svg", "examples/*.png"]


class _WithoutQuotes(markdown.Extension):
    """Has no block quotes: in a docstring, `seed: >= 0.` is none."""

    def extendMarkdown(self, md: markdown.Markdown) -> None:
        """Leave them out."""
        md.parser.blockprocessors.deregister("quote")


def on_config(config: Any) -> None:
    """Change how pages and docstrings are read."""
    config.markdown_extensions.append(_WithoutQuotes())


def on_files(files: Files, config: Any) -> Files:
    """Return what the site has, in place of what docs/ alone would have."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for pattern in _SHOWN:
        for path in _ROOT.glob(pattern):
            files.append(_find(path.relative_to(_ROOT).as_posix(), config))
    for module in re.findall(r"api/([\w.]+)\.md", str(config.nav)):
        text = f"# `{module}`\n\n::: {module}\n"
        files.append(File.generated(config, f"api/{module}.md", content=text))
    return files


def _find(path: str, config: Any) -> File:
    """Return a file of the repository, at its address on the site."""
    place = config.site_dir, config.use_directory_urls
    shown = "contents.md" if path == "docs/index.md" else path.removeprefix("docs/")
    address = File(shown, None, *place).dest_uri
    return File(path, str(_ROOT), *place, dest_uri=address)
