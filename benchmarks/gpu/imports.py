"""Part a: versions, the card, packages that can be imported, the program p2pd, modules of tutti.

Imports nothing but the standard library and torch, so that it tells of a machine where nothing else
is installed. Each package is imported in a process of its own.
"""

import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from benchmarks.gpu.wheels import MODULES, THERE
from benchmarks.report import ROOT, Report

IMPORT_S = 60.0
CONTEXT_MIB = 768
"""As ``CONTEXT`` in node/model/device.py."""
APART = (
    "node.control.observer",
    "node.local.worker",
    "node.serve.app",
    "node.serve.loopback",
    "node.serve.command",
    "node.tui.app",
    "node.web.app",
    "node.web.door",
    "node.web.command",
)
"""Modules that need what no daemon loads (py-libp2p, textual, starlette), or that are a program."""
EACH = """
import importlib, json, pkgutil, sys
import node.core.bare
import node
found = {}
for module in pkgutil.walk_packages(node.__path__, "node."):
    if module.name not in sys.argv[1:]:
        try:
            importlib.import_module(module.name)
            found[module.name] = ""
        except Exception as error:
            found[module.name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def rows(report: Report, device: str, rehearse: bool) -> None:
    """Add rows on the machine, the cheapest first."""
    import torch

    report.add("6.a Python", platform.python_version(), f"{sys.executable}, {platform.platform()}")
    build = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    report.add("6.a torch", torch.__version__, build)
    if not rehearse:
        _card(report, torch.device(device))
    report.add("6.a cores", os.cpu_count() or 0, "", platform.machine())
    _packages(report)
    _p2pd(report)
    _modules(report)


def _card(report: Report, device) -> None:
    """The card, its driver, and the memory that a process takes beside its tensors."""
    import torch

    before = smi("memory.used", device.index or 0)
    tensor = torch.zeros(1, device=device)
    torch.mm(tensor.expand(64, 64), tensor.expand(64, 64))
    torch.cuda.synchronize(device)
    after = smi("memory.used", device.index or 0)
    about = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    report.add(
        "6.a card",
        about.name,
        f"capability {about.major}.{about.minor}, {about.multi_processor_count} multiprocessors",
        f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free; bf16 "
        f"{'works' if torch.cuda.is_bf16_supported() else 'DOES NOT WORK'}",
    )
    report.add("6.a driver", smi("driver_version", device.index or 0) or "unknown", "")
    if not (before.isdigit() and after.isdigit()):
        report.add("6.a memory of a context", "unknown", "MiB", "nvidia-smi does not tell")
        return
    kept = torch.cuda.memory_reserved(device) >> 20
    context = int(after) - int(before) - kept
    report.add(
        "6.a memory of a context",
        context,
        "MiB beside tensors, of each process",
        f"nvidia-smi: {before} and {after} MiB, {kept} of them torch's",
        f"at most {CONTEXT_MIB}, as planned",
        holds=context <= CONTEXT_MIB,
    )


def smi(field: str, index: int) -> str:
    """A field of a card as nvidia-smi tells it; empty where it does not."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, f"--id={index}"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _packages(report: Report) -> None:
    asked = {**{name: name for name in THERE}, **MODULES}
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        said = dict(zip(asked, pool.map(_imported, asked.values()), strict=True))
    missing = {name: why for name, why in said.items() if why}
    versions = ", ".join(f"{name} {_version(name)}" for name in asked if name not in missing)
    report.add(
        "6.a packages that can be imported",
        len(asked) - len(missing),
        f"of {len(asked)}",
        "; ".join(f"{name}: {why}" for name, why in missing.items()) or versions,
        f"all {len(asked)}",
        holds=not missing,
    )


def _imported(module: str) -> str:
    """The last line of the error of importing ``module``; empty where it can be imported."""
    return _run([sys.executable, "-c", f"import {module}"])[1]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?"


def _p2pd(report: Report) -> None:
    """The program is static, so it needs a kernel that takes it and the right to run it."""
    try:
        files = metadata.files("hivemind") or []
    except metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.name == "p2pd"]
    out, why = _run([str(paths[0]), "-h"]) if paths else ("", "hivemind is not installed")
    report.add(
        "6.a p2pd runs",
        int(not why),
        f"of 1; {paths[0].stat().st_size / 2**20:.1f} MiB" if paths else "of 1",
        why or str(paths[0]),
        "1",
        holds=not why,
    )


def _modules(report: Report) -> None:
    out, why = _run([sys.executable, "-c", EACH, *APART])
    found: dict[str, str] = {} if why else json.loads(out.splitlines()[-1])
    wrong = {name: text for name, text in found.items() if text}
    told = why or "; ".join(f"{name}: {text}" for name, text in wrong.items())
    report.add(
        "6.a modules of tutti that can be imported",
        len(found) - len(wrong),
        f"of {len(found)}",
        told[:600],
        "all",
        holds=bool(found) and not wrong,
    )


def _run(command: list[str]) -> tuple[str, str]:
    """(stdout of a command, its error: the last line of stderr, "" after exit code 0)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_S, cwd=ROOT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return done.stdout, "" if done.returncode == 0 else last
