"""Extend MkDocs: pages of source files, formulas without scripts, tutorials that run.

MkDocs calls the functions named ``on_...`` while it builds the site (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests use parts of this module without the extra `docs`
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
# Pages whose files are at the root of the repository, where people look for them.
AT_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# Files of the repository that a page links to are shown by pages below this folder of the site.
SOURCE = "source"
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".cu": "cpp", ".md": "markdown", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}
MOST_LINES = 1000
# Notebooks that are stored as text and run while the site is built.
TUTORIALS = "tutorials"
TITLED = re.compile(r'^```python title="(src/[^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


def on_files(files: Files, config) -> Files:
    """Add the pages at the root of the repository, and one for each file of it that some page links to."""
    sys.path.append(str(ROOT / "scripts"))  # here, since MkDocs restores the path after it loaded this file
    for name, uri in AT_ROOT.items():
        files.append(generated(config, uri, moved((ROOT / name).read_text())))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    for uri, text in pages:
        for _, link, _, _ in LINK.findall(text):
            add_source(files, config, repository_path(uri, link))
        for path, _ in TITLED.findall(text):
            add_source(files, config, path)
    return files


def generated(config, uri: str, content: str | bytes):
    """Make a file of the site that does not exist on disk."""
    from mkdocs.structure.files import File

    return File.generated(config, uri, content=content)


def moved(text: str) -> str:
    """Rewrite the links of a page at the root of the repository as if it were in docs/."""
    return LINK.sub(lambda m: f"{m[1]}{posixpath.relpath(m[2], 'docs')}{m[3] or ''}{m[4]}", text)


def repository_path(uri: str, link: str) -> str:
    """Return the target of a link on a page of docs/, relative to the root of the repository."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), link))


def source_uri(path: str) -> str | None:
    """Return the page or file of the site that shows a file of the repository; None for files of docs/."""
    if path in AT_ROOT:
        return AT_ROOT[path]
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return None
    return f"{SOURCE}/{path}" if path.endswith(".png") else f"{SOURCE}/{path}.md"


def add_source(files: Files, config, path: str) -> None:
    """Add the page that shows a file of the repository, or lists a folder, unless it exists."""
    uri, file = source_uri(path), ROOT / path
    if uri is None or uri in files.src_uris or not file.exists():
        return
    if path.endswith(".png"):
        files.append(generated(config, uri, file.read_bytes()))
        return
    hidden = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    if file.is_dir():
        names = sorted(child.name for child in file.iterdir() if child.suffix == ".py")
        content = f"{hidden}# {path}\n\n" + "".join(
            f"- [{name}](../{'../' * path.count('/')}{SOURCE}/{path}/{name}.md)\n" for name in names
        )
        files.append(generated(config, uri, content))
        for name in names:
            add_source(files, config, f"{path}/{name}")
        return
    lines = file.read_text().splitlines()
    text, language = "\n".join(lines[:MOST_LINES]), LANGUAGES.get(file.suffix, "text")
    more = f"\n\n{len(lines) - MOST_LINES} more lines are in the file." if len(lines) > MOST_LINES else ""
    content = f'{hidden}# {path}\n\n`````{language} linenums="1"\n{text}\n`````{more}\n'
    files.append(generated(config, uri, content))


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Run a tutorial, and point links at the pages that show files of the repository."""
    uri = page.file.src_uri
    if uri.startswith(f"{SOURCE}/"):
        return markdown
    here = posixpath.dirname(uri) or "."
    if "<!-- diagram: " in markdown:
        from diagrams import DIAGRAMS

        markdown = re.sub(r"<!-- diagram: (\w+) -->", lambda match: DIAGRAMS[match[1]](), markdown)
    if here == TUTORIALS and python_in(markdown):
        from notebooks import with_outputs

        markdown, shown = with_outputs(markdown, posixpath.splitext(posixpath.basename(uri))[0])
        for name, content in shown.items():
            files.append(generated(config, f"{TUTORIALS}/{name}", content))

    def point(match: re.Match) -> str:
        target = source_uri(repository_path(uri, match[2]))
        link = match[2] if target is None else posixpath.relpath(target, here)
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    def place(match: re.Match) -> str:
        """Add a link to the lines of the file below a piece of source."""
        path, code = match[1], match[2]
        line = line_of(path, code)
        # Write HTML, because MkDocs does not know anchors of lines. The page of FILE.py.md is FILE.py.html.
        link = posixpath.relpath(f"{SOURCE}/{path}.html", here)
        where = f'<p class="where"><a href="{link}#__codelineno-0-{line}">{path}, line {line}</a></p>'
        return f"```python\n{code}```\n\n{where}\n"

    return LINK.sub(point, TITLED.sub(place, markdown))


def python_in(markdown: str) -> bool:
    return "```python\n" in markdown


def line_of(path: str, code: str) -> int:
    """Return the number of the line at which a piece of code begins in a file, ignoring indentation.

    Raises:
        ValueError: the file has no such lines.
    """
    wanted = [line.strip() for line in code.splitlines()]
    lines = [line.strip() for line in (ROOT / path).read_text().splitlines()]
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return start + 1
    raise ValueError(f"{path} has no such lines any more:\n{code}")


def on_page_context(context, page, config, nav):
    """Use the whole width where the left column would hold one link, and name a class of the API once."""
    if not page.parent:
        page.meta["hide"] = [*page.meta.get("hide", []), "navigation"]
    for heading in page.toc:
        for child in heading.children:
            child.children = [below for one in child.children for below in lifted(one, child.title)]
    return context


def lifted(heading, title: str) -> list:
    """Return a heading of the table of contents, or the headings below it if it repeats the title above."""
    if heading.title.lower() != title.lower():
        return [heading]
    return [below for child in heading.children for below in lifted(child, title)]


def on_page_content(html: str, page, config, files: Files) -> str:
    """Write formulas as MathML, which browsers draw by themselves."""
    html = re.sub(
        r'<div class="arithmatex">\\\[(.*?)\\\]</div>',
        lambda m: formula(m[1], "block"),
        html,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda m: formula(m[1], "inline"),
        html,
        flags=re.DOTALL,
    )


def formula(latex: str, display: str) -> str:
    """Convert a formula to MathML. The page holds it with HTML escapes."""
    from latex2mathml.converter import convert

    for escaped, plain in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"), ("{aligned}", "{align*}")):
        latex = latex.replace(escaped, plain)
    return convert(latex.strip(), display=display)
