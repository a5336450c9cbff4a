"""Genuine SGLang with the tiny model on this CPU: what it serves, what it loads, how it dies (docs/sglang_cpu.md)."""

from __future__ import annotations

import pathlib
import subprocess
import threading
import time
from typing import Any

import pytest

from real import tiny_model
from real.sglang_cpu import environment
from tests.real.sglang_server import GenuineServer, Keeper, serving

pytestmark = pytest.mark.sglang_cpu

PROMPT = [1000, 1001, 1002, 1003]
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def server(keeper: Keeper) -> GenuineServer:
    """A server that the tests share until one of them ends it."""
    return keeper.server()


def _torn(models: pathlib.Path, folder: pathlib.Path, file: str) -> pathlib.Path:
    """A copy of version 1 of which one file has lost its second half."""
    folder.mkdir()
    for path in (models / "1").iterdir():
        data = path.read_bytes()
        (folder / path.name).write_bytes(data[: len(data) // 2] if path.name == file else data)
    return folder


# ---- what it serves ----


def test_greedy_tokens_belong_to_the_weights(server: GenuineServer, models: pathlib.Path) -> None:
    first = server.generate(PROMPT, 32)
    assert first["output_ids"] == server.generate(PROMPT, 32)["output_ids"]
    assert len(set(first["output_ids"])) > 8  # a constant would tell no version from another
    assert first["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 32}]

    assert server.load(models / "2", "2")[0] == 200
    second = server.generate(PROMPT, 32)
    assert second["output_ids"][:4] != first["output_ids"][:4]
    assert second["meta_info"]["weight_version"] == "2"

    # The same weights in another number of shards.
    assert server.load(models / "1 again", "1")[0] == 200
    assert server.generate(PROMPT, 32)["output_ids"] == first["output_ids"]


def test_prompts_of_every_token_and_length_that_runs_use(server: GenuineServer) -> None:
    assert server.call("/v1/models")[1]["data"][0]["max_model_len"] == tiny_model.CONTEXT
    begun = time.monotonic()
    answer = server.generate([1000 + 7 * number % 900 for number in range(2_000)], 1)
    took = time.monotonic() - begun
    assert answer["meta_info"]["prompt_tokens"] == 2_000
    assert took < 10, f"{took:.1f} s; 0.05 s on an idle machine"  # a run's time-outs allow no more
    status, refused = server.call("/generate", {"input_ids": [1000] * tiny_model.CONTEXT})
    assert status == 400, refused


def test_text_and_chat(server: GenuineServer) -> None:
    chat = {
        "model": "tiny", "max_tokens": 8, "temperature": 0,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve kalo 🙂"}],
    }  # fmt: skip
    status, answer = server.call("/v1/chat/completions", chat)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["message"]["content"]
    word = tiny_model.word(1500)
    status, answer = server.call("/generate", {"text": word, "sampling_params": {"max_new_tokens": 1}})
    assert (status, answer["meta_info"]["prompt_tokens"]) == (200, 1)


def test_it_writes_nothing_into_the_home_folder_and_idles(server: GenuineServer) -> None:
    assert list(server.home.rglob("*")) == []
    before = _cpu_s(server)
    time.sleep(3)
    assert _cpu_s(server) - before < 1.5  # without --sleep-on-idle the scheduler alone takes all three


def _cpu_s(server: GenuineServer) -> float:
    fields = pathlib.Path(f"/proc/{server.parts()['scheduler']}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_it_takes_less_than_two_gigabytes(server: GenuineServer) -> None:
    assert server.memory_bytes() < 2e9


# ---- what it loads ----


def test_update_to_a_broken_index_or_no_folder_leaves_the_old_weights(
    server: GenuineServer, models: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert server.load(models / "1", "1")[0] == 200
    served = server.generate(PROMPT, 8)["output_ids"]
    for folder in (_torn(models, tmp_path / "torn", tiny_model.INDEX), tmp_path / "absent"):
        status, answer = server.load(folder, "3")
        assert (status, answer["success"]) == (400, False)
        after = server.generate(PROMPT, 8)
        assert (after["output_ids"], after["meta_info"]["weight_version"]) == (served, "1")


def test_update_does_not_read_config_and_tokenizer(
    server: GenuineServer, models: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for file in ("config.json", "tokenizer.json"):
        assert server.load(_torn(models, tmp_path / file, file), "1")[0] == 200
    assert server.generate(PROMPT, 8)["meta_info"]["weight_version"] == "1"


def test_update_to_a_torn_shard_kills_the_engine(
    server: GenuineServer, models: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Not an error answer: the process kills itself, and whoever asked is left with an unknown outcome."""
    torn = _torn(models, tmp_path / "torn", SHARD)
    with pytest.raises(OSError):
        server.load(torn, "2")
    assert server.process.wait(timeout=10) == -9
    assert "SafetensorError" in server.log.read_text(encoding="utf-8", errors="replace")


def test_start_with_a_torn_shard_fails(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    torn = _torn(models, tmp_path / "torn", SHARD)
    (tmp_path / "engine").mkdir()
    server = GenuineServer(tmp_path / "engine", torn, "1")
    try:
        with pytest.raises(AssertionError, match="exit code"):
            server.wait_ready()
        assert "SafetensorError" in server.log.read_text(encoding="utf-8", errors="replace")
    finally:
        server.close()


# ---- how it dies ----


@pytest.mark.parametrize(("part", "within_s"), [("main", 3.0), ("scheduler", 5.0), ("detokenizer", 5.0)])
def test_death_of_a_part_is_told_to_clients(server: GenuineServer, part: str, within_s: float) -> None:
    ended: list[tuple[float, Any]] = []

    def call() -> None:
        try:
            told: Any = server.generate(PROMPT, 30_000)
        except OSError as error:
            told = error
        ended.append((time.monotonic(), told))

    client = threading.Thread(target=call)
    client.start()
    time.sleep(1)
    assert not ended
    parts = server.parts()
    begun = time.monotonic()
    subprocess.run(["kill", "-9", str(parts[part])], check=True)
    client.join(timeout=90)
    at, told = ended[0]
    assert isinstance(told, OSError), told
    # 0.15 s for main, 0.9 s for the others on a busy machine; 5.9 and 66 s with SGLang's own settings.
    assert at - begun < within_s
    server.process.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in parts.values()):
        assert time.monotonic() < deadline, f"left running: {parts}"
        time.sleep(0.05)


# ---- deterministic mode ----


def test_seeds_sample_alike_in_deterministic_mode(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with serving(tmp_path, models / "1", "1", "--enable-deterministic-inference") as server:

        def sampled(seed: int) -> list[int]:
            return server.generate(PROMPT, 24, temperature=1.0, sampling_seed=seed)["output_ids"]

        assert sampled(5) == sampled(5)
        assert sampled(5) != sampled(6)


def test_hash_of_seeds_is_murmur_hash_3() -> None:
    """Known answers of MurmurHash3 x86 32 with seed 0 over four little-endian words."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sgl_kernel, torch\n"
        "t = lambda *v: torch.tensor(v, dtype=torch.int64)\n"
        "seeds = t(0, 42, -1, 0x123456789abcdef)\n"
        "print(sgl_kernel.murmur_hash32(seeds, t(0, 7, 2**31 - 1, 1000), t(0, 1, 2047)).to(torch.int64).tolist())"
    )
    stand_ins = environment.SERVER.parent / "stand_ins"
    done = subprocess.run(
        [str(environment.interpreter()), "-c", code, str(stand_ins)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    expected = [
        [_murmur3(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position, column) for column in (0, 1, 2047)]
        for seed, position in ((0, 0), (42, 7), (-1, 2**31 - 1), (0x123456789ABCDEF, 1000))
    ]
    assert done.stdout.strip() == str(expected)


def test_murmur3_of_this_test_has_the_published_answers() -> None:
    assert _murmur3(0) == 0x2362F9DE  # four zero bytes, seed 0
    assert _murmur3(0x87654321) == 0xF55B516B  # 21 43 65 87, seed 0


def _murmur3(*words: int) -> int:
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 & 0xFFFFFFFF
        word = (word << 15 | word >> 17) * 0x1B873593 & 0xFFFFFFFF
        state ^= word
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16
