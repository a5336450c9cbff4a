"""Command lines and environments of SGLang engines, which need no SGLang to be looked at."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import sys
import tempfile

import pytest

from protocol.ports import EngineOptions, EngineSpec
from real import tiny_model
from real.engines import kinds, sglang_flags
from real.engines.settings import EngineSettings
from real.engines.weights import Weights
from real.sglang_cpu import environment

WEIGHTS = Weights("/run/storage/exports/00000001-4", "4", "abc", 5)


def _command(settings: EngineSettings, folder: pathlib.Path, spec: EngineSpec, weights: Weights | None) -> list[str]:
    return kinds.command(settings, spec, weights, name="policy-0", port=41000, temporary=str(folder))


def _value(command: list[str], option: str) -> str:
    assert command.count(option) == 1, command
    return command[command.index(option) + 1]


def test_cpu_engine_loads_the_export(tmp_path: pathlib.Path) -> None:
    settings = EngineSettings("sglang-cpu", "/env/bin/python", arguments=("--max-total-tokens", "1024"))
    command = _command(settings, tmp_path, EngineSpec("qwen3-0.6b-rtx4090", "exports/00000001-4"), WEIGHTS)
    assert command[0] == "/env/bin/python"
    assert pathlib.Path(command[1]).is_file()
    assert _value(command, "--model-path") == WEIGHTS.folder
    assert _value(command, "--weight-version") == "4"
    assert (_value(command, "--host"), _value(command, "--port")) == ("127.0.0.1", "41000")
    assert command[-2:] == ["--max-total-tokens", "1024"]  # last, so that the operator's value wins


def test_cpu_engine_without_weights_serves_a_tiny_model_of_its_own(tmp_path: pathlib.Path) -> None:
    settings = EngineSettings("sglang-cpu", "python")
    command = _command(settings, tmp_path, EngineSpec("qwen3-0.6b-rtx4090"), None)
    version = _value(command, "--weight-version")
    model = pathlib.Path(_value(command, "--model-path"))
    assert model.is_relative_to(tmp_path)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == tiny_model.files(version)
    named = EngineSettings("sglang-cpu", "python", model="/models/mine")
    assert _value(_command(named, tmp_path, EngineSpec("any"), None), "--model-path") == "/models/mine"


def test_cpu_engine_writes_into_its_own_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/driver")
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "1")
    found = kinds.environment(EngineSettings("sglang-cpu", "python"), ("/repo",), str(tmp_path))
    assert "PYTHONPATH" not in found
    assert found["TMPDIR"] == str(tmp_path)
    assert pathlib.Path(found["SGLANG_CACHE_DIR"]).is_relative_to(tmp_path)
    assert found["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "0"
    assert found["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "1"  # as the operator asked


def test_gpu_engine_takes_its_gpus_and_keeps_its_caches(tmp_path: pathlib.Path) -> None:
    settings = EngineSettings("sglang", "python", model="Qwen/Qwen3-0.6B")
    command = _command(settings, tmp_path, EngineSpec("qwen3-0.6b-rtx4090", num_gpus=4), None)
    assert command[:3] == ["python", "-m", "sglang.launch_server"]
    assert _value(command, "--tp-size") == "4"
    assert _value(command, "--model-path") == "Qwen/Qwen3-0.6B"
    assert "--attention-backend" not in command  # SGLang's own choice is the right one outside deterministic mode
    one = _command(settings, tmp_path, EngineSpec("qwen3-0.6b-rtx4090"), None)
    assert "--tp-size" not in one
    assert "SGLANG_CACHE_DIR" not in sglang_flags.gpu_environment()


@pytest.mark.parametrize(
    ("capability", "name", "backend"),
    [
        ((8, 0), "Ampere", "fa3"), ((8, 6), "Ampere", "fa3"), ((8, 9), "Ada", "fa3"), ((9, 0), "Hopper", "fa3"),
        ((10, 0), "Blackwell", "triton"), ((12, 0), "Blackwell (workstation)", "triton"),
    ],
)  # fmt: skip
def test_deterministic_mode_has_a_backend_for_each_generation(
    capability: tuple[int, int], name: str, backend: str
) -> None:
    found = sglang_flags.generation(capability)
    assert found is not None
    assert found.name == name
    arguments = list(sglang_flags.gpu_arguments([sglang_flags.DETERMINISTIC], capability))
    assert _value(arguments, "--attention-backend") == backend
    assert arguments[-1] == sglang_flags.DETERMINISTIC


def test_every_capability_is_in_one_generation() -> None:
    listed = [capability for found in sglang_flags.GENERATIONS for capability in found.capabilities]
    assert len(listed) == len(set(listed)) > 5


def test_deterministic_mode_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"Turing GPUs \(compute capability 7.5\)"):
        sglang_flags.gpu_arguments([sglang_flags.DETERMINISTIC], (7, 5))


@pytest.mark.parametrize("named", [["--attention-backend", "flashinfer"], ["--attention-backend=flashinfer"]])
def test_an_attention_backend_that_is_named_stays(named: list[str]) -> None:
    arguments = sglang_flags.gpu_arguments([sglang_flags.DETERMINISTIC, *named], (7, 5))
    assert sum(argument.startswith("--attention-backend") for argument in arguments) == 1


def test_an_unknown_gpu_is_left_to_sglang() -> None:
    for capability in (None, (99, 0)):
        assert "--attention-backend" not in sglang_flags.gpu_arguments([sglang_flags.DETERMINISTIC], capability)


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 9.0; echo 8.9", (9, 0)), ("echo No devices were found; exit 6", None), ("exit 0", None)],
)
def test_capability_is_what_nvidia_smi_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: tuple[int, int] | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert sglang_flags.gpu_capability() == expected


def test_deterministic_gpu_engine_asks_for_its_gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 10.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    settings = EngineSettings("sglang", "python", arguments=(sglang_flags.DETERMINISTIC,))
    assert _value(_command(settings, tmp_path, EngineSpec("a"), WEIGHTS), "--attention-backend") == "triton"


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("page-size=16", "--page-size=16"),
        ("--page_size=16", "--page-size=16"),
        ("disable-radix-cache", "--disable-radix-cache"),
        ('json-model-override-args={"a": "b=c"}', '--json-model-override-args={"a": "b=c"}'),
    ],
)
def test_an_argument_is_written_in_any_way(text: str, argument: str) -> None:
    assert sglang_flags.named_argument(text) == argument


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no option of SGLang"),
        ("--page-size 16", "write one NAME or NAME=VALUE at a time"),
        ("port=4", "--port is set by the project; leave it out"),
        ("--model_path=x", "--model-path is set by the project"),
        ("api-key=x", "--api-key is set by the project"),
    ],
)
def test_what_is_no_option_or_ours_is_refused(text: str, why: str) -> None:
    with pytest.raises(sglang_flags.BadArgument, match=why):
        sglang_flags.named_argument(text)


def test_an_interpreter_without_sglang_cannot_be_asked() -> None:
    with pytest.raises(sglang_flags.BadArgument, match=r"refuses --page-size=16: ModuleNotFoundError.*sglang"):
        sglang_flags.check_arguments(sys.executable, ("--page-size=16",), cpu=False)


def test_where_nothing_can_be_written_it_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(sglang_flags.BadArgument, match="could not be asked for SGLang's options: .*'/nowhere/"):
        sglang_flags.check_arguments(sys.executable, ("--page-size=16",), cpu=False)


@pytest.mark.sglang_cpu
def test_genuine_sglang_says_what_it_takes() -> None:
    python = str(environment.interpreter(""))

    def said(*arguments: str) -> str:
        try:
            sglang_flags.check_arguments(python, arguments, cpu=True)
        except sglang_flags.BadArgument as refusal:
            return str(refusal)
        return ""

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # each of them imports SGLang
        taken = pool.submit(said, "--page-size=16", "--disable-radix-cache")
        refusals = {
            why: pool.submit(said, argument)
            for argument, why in (
                ("--page-sise=16", "unrecognized arguments: --page-sise=16"),
                ("--page-size=many", "argument --page-size: invalid int value: 'many'"),
                ("--attention-backend=bogus", "argument --attention-backend: invalid choice: 'bogus'"),
            )
        }
        assert taken.result() == ""
        for why, refusal in refusals.items():
            assert why in refusal.result()


def test_engine_options_of_a_scenario_become_arguments_of_each_kind(tmp_path: pathlib.Path) -> None:
    options = EngineOptions(deterministic=True, attention_backend="fa3", gpu="ada", random_seed=42)
    spec = EngineSpec("qwen3-0.6b-rtx4090", options=options)
    gpu = _command(EngineSettings("sglang", "python", model="m"), tmp_path, spec, None)
    assert (_value(gpu, "--random-seed"), _value(gpu, "--attention-backend")) == ("42", "fa3")
    assert sglang_flags.DETERMINISTIC in gpu
    own = _command(
        EngineSettings("sglang", "python", model="m", arguments=("--random-seed", "7")), tmp_path, spec, None
    )
    assert own[-2:] == ["--random-seed", "7"]  # the operator has the last word
    cpu = _command(EngineSettings("sglang-cpu", "python", model="m"), tmp_path, spec, None)
    assert sglang_flags.DETERMINISTIC in cpu and "fa3" not in cpu
    by_rank = EngineSpec("p", options=EngineOptions(random_seed=None))
    line = kinds.command(
        EngineSettings("sglang", "python", model="m"), by_rank, None, name="policy-3", port=1, temporary=str(tmp_path)
    )
    assert _value(line, "--random-seed") == "3"
    emulated = _command(EngineSettings("emulated", "python"), tmp_path, spec, None)
    assert EngineOptions(**json.loads(_value(emulated, "--options"))) == options and _value(emulated, "--rank") == "0"
    plain = _command(EngineSettings("emulated", "python"), tmp_path, EngineSpec("p"), None)
    assert "--options" not in plain
