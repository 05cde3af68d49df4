"""Where a number comes from: command, commit, versions, device, date. Always gives something, whatever is missing."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specdeft import __version__

PACKAGES = ("torch", "transformers", "triton", "tokenizers", "safetensors", "numpy")


def environment() -> dict[str, Any]:
    """Versions and devices of this machine, as plain data."""
    facts: dict[str, Any] = {"specdeft": __version__, "commit": _commit(), "python": platform.python_version()}
    facts |= {name: _version(name) for name in PACKAGES}
    facts["platform"] = f"{platform.system()} {platform.machine()}"
    facts["cpu"] = _cpu()
    try:
        import torch

        facts["cpu_threads"] = torch.get_num_threads()
        facts["cuda"] = torch.version.cuda
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a broken torch is what a bug report may be about
        facts["torch_error"] = f"{type(error).__name__}: {error}"
    return facts


def provenance(model: Any) -> dict[str, Any]:
    """What to keep beside a measurement made with `model`, or with anything that has a device and a dtype."""
    device = model.device
    facts = environment()
    on_gpu = device.type == "cuda"
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": facts["devices"][device.index or 0] if on_gpu else f"{facts['cpu']}, {facts['cpu_threads']} threads",
        "dtype": str(model.dtype).removeprefix("torch."),
        **facts,
    }


def command() -> str:
    """The command line that is running. Of an absolute path only the name is kept: where it lay is of no use."""
    name, *arguments = sys.argv
    short = []
    for each in arguments:
        key, equals, value = each.rpartition("=")  # --out=FOLDER, and pairs such as method=FILE
        short.append(key + equals + (os.path.basename(value) if os.path.isabs(value) else value))
    program = "specdeft" if os.path.basename(name) == "__main__.py" else os.path.basename(name)
    return shlex.join([program, *short])


def _commit() -> str | None:
    """Commit of the checkout that the package runs from, with + where files differ from it.

    A copy without history may be told its commit by $SPECDEFT_COMMIT; else None.
    """
    if told := os.environ.get("SPECDEFT_COMMIT"):
        return told
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"
