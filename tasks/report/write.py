"""Writing reports/release.html: one page with nothing in it to fetch or to run."""

import base64
import contextlib
import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from tasks.provenance import sha256_of
from tasks.report.evidence import read_evidence
from tasks.report.glossary import used_terms
from tasks.report.sections import Page, page
from tasks.report.text import figures, printable, shorten, signed
from tasks.stage import REPORTS, write_text

RELEASE = REPORTS / "release.html"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A report as it was when it was written."""

    path: Path
    sha256: str
    evidence_sha256: str
    """Of the gate's verdict that it shows."""

    @classmethod
    def now(cls, path: Path, evidence_sha256: str) -> "Drawn":
        """The report that lies there, just written of this evidence."""
        return cls(path=path, sha256=sha256_of(path), evidence_sha256=evidence_sha256)

    def is_of(self, evidence_sha256: str) -> bool:
        """Whether it shows this evidence, and is what was written."""
        same = self.evidence_sha256 == evidence_sha256
        return same and self.path.is_file() and sha256_of(self.path) == self.sha256


def write_report(workspace_folder: Path) -> Path:
    """Write the release report of what lies in a workspace, whatever the gate said of it.

    Args:
        workspace_folder: The folder with params.yaml, models and reports.

    Returns:
        The file, reports/release.html: the same bytes for the same evidence.

    Raises:
        UserError: a file is there and is not what its stage writes. What is absent is said in the report.
    """
    text = render(page(read_evidence(workspace_folder)))
    path = workspace_folder / RELEASE
    try:
        write_text(path, text)
    except OSError:
        with contextlib.suppress(OSError):
            path.with_name(f".{path.name}.{os.getpid()}").unlink(missing_ok=True)
        raise
    return path


def render(content: Page) -> str:
    """The page as HTML."""
    environment = _environment()
    style = Markup(environment.loader.get_source(environment, "style.css")[0])  # type: ignore[union-attr]  # noqa: S704
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    body = environment.get_template("body.html.j2").render(page=content, evidence=content.evidence)
    return environment.get_template("page.html.j2").render(
        page=content,
        style=style,
        style_sha256=digest,
        body=Markup(body),  # noqa: S704  # rendered with autoescape on
        terms=used_terms(body),
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "shorten": shorten,
        "printable": printable,
        "signed": signed,
        "figures": figures,
        "percent": lambda share, digits=2: f"{100 * share:.{digits}f}",
    }
    return environment
