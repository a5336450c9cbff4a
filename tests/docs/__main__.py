"""``python -m tests.docs``: write anew what the documentation and the notebooks take from the code."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile

from analysis.errors import BadInput
from analysis.reader import read_json
from analysis.rundir import RunDir, write_manifest
from analysis.verdict import differences, judge_run
from tests.docs.generated import faults_page, with_sections
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, play, replace_block, without_wall_times

_SHIPPED_RUN = ROOT / "notebooks" / "tiny_run"
_RUN_IT = ["-m", "scenarios", "run", "smoke", "--backend", "sim", "--set", "workload.for_s=5", "--no-report"]


def main() -> int:
    """Says what changed. Read the difference before you commit it."""
    (DOCS / "faults.md").write_text(faults_page(), encoding="utf-8")
    for page in PAGES:
        if _write_page(page):
            print(f"{page}: changed")
    shipped = RunDir.open(_SHIPPED_RUN)
    if not _judges_as_before(shipped):
        _run_anew()
        print(f"{_SHIPPED_RUN.relative_to(ROOT)}: changed")
    return 0


def _write_page(page: str) -> bool:
    path = ROOT / page
    before = path.read_text(encoding="utf-8")
    path.write_text(with_sections(before), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        played = play(page, pathlib.Path(folder))
    files = [(block, (ROOT / block.file).read_text(encoding="utf-8")) for block in blocks(page) if block.file]
    for block, text in sorted([*played, *files], key=lambda one: one[0].line, reverse=True):
        if without_wall_times(text) != without_wall_times(block.text):
            replace_block(page, block, text)
    return path.read_text(encoding="utf-8") != before


def _judges_as_before(shipped: RunDir) -> bool:
    try:
        return not differences(judge_run(shipped), read_json(shipped.verdict))
    except BadInput:  # written by a version whose events had other fields
        return False


def _run_anew() -> None:
    """The run that the notebooks read."""
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / "run"
        subprocess.run([sys.executable, *_RUN_IT, "--out", str(made)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for name in ("run.json", "events.jsonl", "verdict.json"):
            shutil.copyfile(made / name, _SHIPPED_RUN / name)
    write_manifest(RunDir.open(_SHIPPED_RUN))


if __name__ == "__main__":
    sys.exit(main())
