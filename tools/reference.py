"""Reference pages from the code itself: commands, settings and metrics.

``python -m tools.reference`` writes them into docs/reference; a test compares the pages with the
code. Nothing is described here: every text is the help, the docstring or the rule that the program
uses too.
"""

import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import tomlkit
from prometheus_client.core import Metric

from cli import app
from node.app.snapshot import gauges, sent_gauge, tasks_gauge, totals_of
from node.config import ENVIRONMENT, KNOWN, NodeSettings
from node.config import SECTIONS as NODE_SECTIONS
from node.core.tables import Setting, settings_of
from node.manifest import GONE
from node.manifest import SECTIONS as MANIFEST_SECTIONS
from node.telemetry.metrics import Metrics
from protos import control_pb2

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
_WRITTEN = "<!-- Written by `make reference`. Changes belong into the code. -->"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown, with an empty line behind it."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return [*lines, ""]


def prose(text: str) -> str:
    """Text of the program as one line of Markdown."""
    text = " ".join(text.split()).replace("``", "`")
    pieces = re.split(r"(`[^`]*`)", text)
    for place in range(0, len(pieces), 2):
        escaped = re.sub(r"([\\*]|(?<!\w)_|_(?!\w))", r"\\\1", pieces[place])
        pieces[place] = re.sub(r"<(?=[A-Za-z/!])", "&lt;", escaped)
    return "".join(pieces).replace("|", "\\|")


def code(text: str) -> str:
    """Text of the program as it is typed."""
    if "|" not in text:
        return f"`{text}`"
    # In the cell of a table, not every renderer takes the backslash out of a code span.
    escaped = html.escape(text, quote=False).replace("|", "&#124;")
    return f"<code>{escaped}</code>"


def page(title: str, about: str, body: list[str]) -> str:
    """A page of the reference."""
    return "\n".join([_WRITTEN, "", f"# {title}", "", about, "", *body]).rstrip() + "\n"


# ------------------------------------------------------------------ the command line


def commands(
    group: click.Group, context: click.Context
) -> Iterator[tuple[click.Context, click.Command]]:
    """Every visible command of a group and of its groups, each with its context."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        yield inner, command
        if isinstance(command, click.Group):
            yield from commands(command, inner)


def option_rows(command: click.Command, context: click.Context) -> list[list[str]]:
    """Rows for the arguments and options of a command, as its help has them."""
    rows = list[list[str]]()
    for one in command.get_params(context):
        record = one.get_help_record(context)
        if record is not None:
            typed, meaning = record
            rows.append([code(" ".join(typed.split())), prose(meaning)])
        elif isinstance(one, click.Argument):
            rows.append([code(one.make_metavar(context)), prose(getattr(one, "help", "") or "")])
    return rows


def paragraphs(help_text: str) -> list[str]:
    """Help of a command in Markdown: paragraphs, and blocks that click does not wrap."""
    lines = list[str]()
    for block in inspect.cleandoc(help_text).split("\n\n"):
        if block.startswith("\b"):
            lines += ["```text", block.removeprefix("\b").strip("\n"), "```", ""]
        else:
            lines += [prose(block), ""]
    return lines


def command_line() -> str:
    """The page of all commands, in the order of ``tutti help``."""
    context = click.Context(app, info_name="tutti", **app.context_settings)
    body = list[str]()
    heading_of = {verb.name: heading for heading, verbs in app.panels.items() for verb in verbs}
    for heading in app.panels:
        body += [f"## {heading}", ""]
        for inner, command in commands(app, context):
            words = inner.command_path.split()
            if heading_of[words[1]] != heading:
                continue
            usage = " ".join([inner.command_path, *command.collect_usage_pieces(inner)])
            body += [f"### {inner.command_path}", "", "```text", usage, "```", ""]
            body += paragraphs(command.help or "")
            rows = option_rows(command, inner)
            if rows:
                body += table(["argument or option", "meaning"], rows)
    about = f"{prose(app.help or '')} {prose(app.epilog or '')}"
    return page("Command line", about, body)


# ------------------------------------------------------------------ settings


def value(held: Any) -> str:
    """A default as it stands in a file; empty for none."""
    if held is None:
        return ""
    item = tomlkit.item(list(held) if isinstance(held, tuple) else held)
    return code(item.as_string())


def allowed(setting: Setting) -> str:
    """Values that a setting may have."""
    if setting.rule.choices:
        return ", ".join(code(str(choice)) for choice in setting.rule.choices)
    return prose(setting.range_sentence)


def setting_row(setting: Setting) -> list[str]:
    """Row of a setting: name, default, allowed, meaning."""
    return [code(setting.name), value(setting.default), allowed(setting), prose(setting.text)]


def about_of(kind: type) -> str:
    """First paragraph of a class's docstring."""
    return prose((inspect.getdoc(kind) or "").partition("\n\n")[0])


def manifest() -> str:
    """The page of all settings of a run."""
    body = list[str]()
    for section, kind in MANIFEST_SECTIONS.items():
        known = settings_of({section: kind})
        rows = [setting_row(setting) for setting in known.values()]
        body += [f"## {section}", "", about_of(kind), ""]
        body += table(["setting", "default", "allowed", "meaning"], rows)
    body += ["## Settings that are gone", ""]
    rows = [[code(name), prose(instead)] for name, (*_, instead) in GONE.items()]
    body += table(["setting", "instead"], rows)
    about = (
        "Settings of a run, which all its peers share. "
        "[The manifest](../operating.md#the-manifest) says how the file is made and read."
    )
    return page("Manifest", about, body)


def settings() -> str:
    """The page of all settings of one peer."""
    variables: dict[str, list[str]] = {}
    for variable, name in ENVIRONMENT.items():
        variables.setdefault(name, []).append(variable)
    body = list[str]()
    for section, kind in {"": NodeSettings, **NODE_SECTIONS}.items():
        body += [f"## {section or 'node'}", "", about_of(kind), ""]
        rows = list[list[str]]()
        for name, setting in KNOWN.items():
            if name.rpartition(".")[0] == section:
                environment = ", ".join(code(one) for one in variables[name])
                rows.append([*setting_row(setting), environment])
        body += table(["setting", "default", "allowed", "meaning", "environment"], rows)
    about = (
        "Settings of one peer: flags first, then `TUTTI_*`, then the file that `--config` names, "
        "then `config.toml`, then the defaults. No manifest changes them."
    )
    return page("Settings of a peer", about, body)


# ------------------------------------------------------------------ metrics


def metric_row(name: str, metric: Metric, labels: list[str]) -> list[str]:
    return [code(name), metric.type, ", ".join(map(code, labels)), prose(metric.documentation)]


def metrics() -> str:
    """The page of all numbers that a daemon gives to Prometheus."""
    own = Metrics()
    rows = list[list[str]]()
    for held in vars(own).values():
        for metric in held.collect() if hasattr(held, "describe") else ():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            # The library tells the labels of a metric without samples in no other way.
            rows.append(metric_row(name, metric, [*held._labelnames]))
    snapshot = control_pb2.Snapshot()
    sent = sent_gauge([control_pb2.SentLine(measured=1)])
    for metric in [*gauges(snapshot), sent, tasks_gauge({"": 0})]:
        labels = [*metric.samples[0].labels]
        rows.append(metric_row(metric.name, metric, labels))
    for name, text, totals in totals_of(snapshot, 0):
        labels = ["result"] if any(totals) else []
        rows.append([code(f"tutti_{name}"), "counter", ", ".join(map(code, labels)), prose(text)])
    about = (
        "Numbers of a daemon for Prometheus, on its metrics page. The page is served on loopback "
        "only, at the port that `tutti status` shows (`--metrics-port`)."
    )
    return page("Metrics", about, table(["name", "kind", "labels", "meaning"], sorted(rows)))


PAGES = {
    "cli.md": command_line,
    "manifest.md": manifest,
    "settings.md": settings,
    "metrics.md": metrics,
}
"""Pages of docs/reference, and their writers."""


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
