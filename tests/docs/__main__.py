"""``python -m tests.docs``: write anew what the documentation takes from the code, and what its sessions print."""

from __future__ import annotations

import pathlib
import sys
import tempfile

from tests.docs.generated import faults_page, with_sections
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, play, replace_block, without_wall_times


def main() -> int:
    """Says which pages changed. Read the difference before you commit it."""
    (DOCS / "faults.md").write_text(faults_page(), encoding="utf-8")
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        path.write_text(with_sections(before), encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            played = play(page, pathlib.Path(folder))
        files = [(block, (ROOT / block.file).read_text(encoding="utf-8")) for block in blocks(page) if block.file]
        for block, text in sorted([*played, *files], key=lambda one: one[0].line, reverse=True):
            if without_wall_times(text) != without_wall_times(block.text):
                replace_block(page, block, text)
        if path.read_text(encoding="utf-8") != before:
            print(f"{page}: changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
