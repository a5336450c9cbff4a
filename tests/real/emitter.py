"""Processes for tests of tables and breakpoints: ``python emitter.py FOLDER NAME WHAT N``. No Ray."""

from __future__ import annotations

import pathlib
import sys

from real.evidence import ProcessLog


def main() -> None:
    folder, name, what, n = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    log = ProcessLog(folder, name, 1, 0)
    if what == "emit":
        for number in range(n):
            log.emit("storage.renamed", old=str(number), new=name)
            pathlib.Path(folder, f"effect-{name}-{number}").touch()
    elif what == "claim":
        for _ in range(n):
            for fault in log.faults.active("torn_export"):
                log.faults.claim(fault, f"tear {name}")
    elif what == "claim_until_told":
        met = 0
        while not pathlib.Path(folder, "enough").exists():
            met += sum(log.faults.claim(fault, "reply_lost") for fault in log.faults.active("reply_lost"))
            if met:
                pathlib.Path(folder, f"met-{name}").touch()
        print(met)
    elif what == "spend":
        for _ in range(n):
            for fault in log.faults.active("disk_full"):
                print(log.faults.spend(fault, 10, 1005))


if __name__ == "__main__":
    main()
