"""Processes for tests of tables and breakpoints: ``python emitter.py FOLDER NAME WHAT N``. No Ray."""

from __future__ import annotations

import pathlib
import sys
import time

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
    elif what == "claim_until_healed":
        met = 0
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            standing = list(log.faults.active("reply_lost"))
            if not standing and met:
                break
            met += sum(log.faults.claim(fault, "reply_lost") for fault in standing)
        print(met)
    elif what == "spend":
        for _ in range(n):
            for fault in log.faults.active("disk_full"):
                print(log.faults.spend(fault, 10, 1005))


if __name__ == "__main__":
    main()
