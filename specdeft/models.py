"""Load a causal language model and its tokenizer by name or folder, with errors a person can act on.

Knows nothing of draft heads, trees, attention or generation.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from specdeft import demo_model
from specdeft.errors import SpecdeftError

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
# by name, since each lives in another library: huggingface_hub, httpx, requests
UNREACHABLE = {"ConnectionError", "ConnectError", "TimeoutException", "OfflineModeIsEnabled", "LocalEntryNotFoundError"}


def load_model(
    name_or_path: str | PathLike[str],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer.

    Args:
        name_or_path: `"smollm2-135m-instruct"` (the demonstration model: fetched and converted on first use), a folder,
            or a Hub name.
        dtype: a `torch.dtype` or one of float32, bfloat16, float16 (fp32, bf16, fp16). Default: bfloat16 on a GPU,
            float32 on a CPU.
        device: default `cuda` where there is one, else `cpu`.

    Raises:
        SpecdeftError: a missing folder, a name that the Hub does not know or does not hand out, a Hub that cannot be
            reached, damaged weights.
        ValueError: an unknown dtype or device.
    """
    device, dtype = device_and_dtype(device, dtype)
    name = str(name_or_path)
    tokenizer = load_tokenizer(name)
    folder = _folder(name)

    from transformers import AutoModelForCausalLM

    demonstration = name == demo_model.NAME
    quiet = demonstration or not sys.stderr.isatty()
    with _explained(name, folder), demo_model.quiet_bars() if quiet else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(str(folder or name), dtype=dtype)
    if demonstration:
        model.config.name_or_path = model.name_or_path = demo_model.NAME  # not the path of the cache
    return model.to(device).eval(), tokenizer


def load_tokenizer(name_or_path: str | PathLike[str], local_only: bool = False) -> Any:
    """The tokenizer that `load_model` gives with the model of this name. Raises SpecdeftError as it does.

    With `local_only` nothing is fetched: a name that is not in a local cache is an error at once.
    """
    name = str(name_or_path)
    folder = _folder(name, local_only)

    from transformers import AutoTokenizer

    with _explained(name, folder):
        return AutoTokenizer.from_pretrained(str(folder or name), local_files_only=local_only)


def device_and_dtype(
    device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
) -> tuple[torch.device, torch.dtype]:
    """Where to put a model and in which numbers; defaults and errors as in `load_model`."""
    found = _device(device)
    return found, _dtype(dtype, found)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {device!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: PyTorch {torch.__version__} sees no CUDA device here. Try: device='cpu'")
    return device


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        return DTYPES[dtype]
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    return dtype


def _folder(name: str, local_only: bool = False) -> Path | None:
    """The folder that `name` stands for, or None for a Hub name. A path that cannot be a Hub name must exist."""
    if name == demo_model.NAME:
        return demo_model.ensure(local_only)
    if not name.strip():
        raise SpecdeftError(f"model: expected a name or a folder, got {name!r}. Try: {demo_model.NAME}")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SpecdeftError(f"model folder {name} has no config.json: not a transformers model folder")
        return path
    if path.exists():
        raise SpecdeftError(f"model {name}: expected a folder with config.json and weights, got a file")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SpecdeftError(f"model folder {name} does not exist")
    return None


@contextmanager
def _explained(name: str, folder: Path | None) -> Iterator[None]:
    """What transformers, huggingface_hub and safetensors raise, as one line of our own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise SpecdeftError(f"the weights of {name} are damaged or cut short ({error}). Fetch them again") from error
    except (OSError, ValueError, KeyError) as error:
        raise SpecdeftError(_why(name, folder is not None, error)) from error


def _why(name: str, is_folder: bool, error: BaseException) -> str:
    """One line for what went wrong, read from the exception and those that caused it."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds = {kind.__name__ for item in seen for kind in type(item).__mro__}
    if is_folder:
        return f"model folder {name} cannot be loaded: {_first_line(error)}"
    if "GatedRepoError" in kinds:
        return f"model {name} is gated: accept its terms on the Hub, then log in with `hf auth login`"
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"no model called {name}: no such folder, no such Hub repository. Try: {demo_model.NAME}"
    if kinds & UNREACHABLE:
        return (
            f"model {name} is neither a folder nor in the local Hub cache, and the Hub cannot be reached. "
            f"Try: a downloaded folder, or {demo_model.NAME}, which needs the package index only"
        )
    return f"model {name} cannot be loaded: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
