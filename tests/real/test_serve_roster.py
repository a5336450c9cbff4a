"""``python -m real.serve --roster FILE``: what the file may say, and engines that come and go while it serves."""

from __future__ import annotations

import json
import pathlib
import urllib.request

import pytest

from real.serve import main
from tests.real.served import Process, start_engine


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "roster.txt: names no engine; write one http://HOST:PORT a line"),
        ("# http://127.0.0.1:9\n\n", "roster.txt: names no engine"),
        ("http://127.0.0.1:9\nhttps://x:1\n", "roster.txt, line 2: https://x:1: give it as http://HOST:PORT"),
        (
            "http://127.0.0.1:9\n\nhttp://127.0.0.1:9 # again\n",
            "roster.txt, line 3: http://127.0.0.1:9 stands in line 1",
        ),
    ],
)
def test_a_bad_file_is_one_message_and_exit_code_2(
    text: str, says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "roster.txt"
    path.write_text(text)
    assert main(["--roster", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]


def test_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--roster", "/nowhere/roster.txt"]) == 2
    assert capsys.readouterr().err == "error: /nowhere/roster.txt: No such file or directory\n"


def test_engines_come_go_and_come_back(tmp_path: pathlib.Path) -> None:
    engines = [start_engine(tmp_path), start_engine(tmp_path)]
    path = tmp_path / "roster.txt"

    def write(text: str) -> None:
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    first, second = (engine.url for engine in engines)
    write(f"{first}\n")
    gateway = Process(["real.serve", "--roster", str(path)], tmp_path / "serve.log")
    try:
        gateway.url = gateway.until_says(r"serving on (http://\S+) ").group(1)

        def members() -> list[str]:
            with urllib.request.urlopen(f"{gateway.url}/engines", timeout=5) as answer:
                views = json.load(answer)["engines"]
            return [f"{view['address']['host']}:{view['address']['port']}" for view in views]

        gateway.until_says(f"{first[7:]} is routed to")
        write(f"{second}\n")
        gateway.until_says(f"{first[7:]} is no longer named")
        gateway.until_says(f"{second[7:]} is routed to")
        assert members() == [second[7:]]
        write("nonsense\n")
        gateway.until_says("the roster stays as it was: .*line 1: nonsense: give it as")
        assert members() == [second[7:]]
        write(f"{second}\n{first}\n")  # one that comes back is another incarnation: the gateway revives none
        gateway.until_says(rf"(?s){first[7:]} is no longer named.*{first[7:]} is routed to")
        assert sorted(members()) == sorted([first[7:], second[7:]])
    finally:
        gateway.end()
        for engine in engines:
            engine.end()
