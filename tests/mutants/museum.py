"""``python -m tests.mutants.museum``: try every mutant and write docs/museum.md. Exit code 1 when one gets away."""

from __future__ import annotations

import pathlib
import sys

from tests.mutants import evidence
from tests.mutants.registry import Mutant, all_mutants
from tests.mutants.trial import try_mutant

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "museum.md"
_MOST_SEEDS = 20

_HEAD = """\
# The museum of wrong variants

Made by `python -m tests.mutants.museum`; do not edit. Each row is a defect, most of which really happened somewhere.
*Caught* means that the check in its column says fail, with witness events, and that the right variant passes that
check, and its whole run, under the same seeds. *Seeds* is how many had to be tried until the first catch; *s* is CPU
time of one trial, the wrong and the right run together.

The *source* says where a defect is from. The numbers are those of the notes that this project was built from:

- `M8` and the like: a finding of the reviews and recorded runs of an elastic reward-model service (pull request 370 of
  redai-studio/Relax on GitHub), in how it scales, drains, cleans up and decides.
- `H4` and the like: a hazard read out of that service's source.
- `P-2`, `C-13`, `H-10` and the like: a wrong variant of admin calls (P), of pause, continue and publication (C), of
  export, health and recovery (H); `G-2`, `A-1`, `W-4`: of the request gate (G), of session affinity (A), of weight
  updates (W); `S-1`: of the session server, of traces and of who owns them (S).
- `G-I3`, `C-I2`, `A-I3`, `W-I2` and the like: an invariant that is broken, of the gate (G), of pause and publication
  (C), of the path of a client's request (A) or of weight updates (W).
- `scaling 5.1`, `engines 3` and the like: a section of the notes on that subject; `DESIGN loop` and the like: a rule of
  this project's design, as in [defense_of_design.md](defense_of_design.md).
- `run sglang-cpu` and the like: found by a real run of this project on that kind of engine.

| mutant | what is wrong | source | in place of | scenario | check | seeds | s |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

_EVIDENCE_HEAD = """
## Wrong evidence

Runs in the format of the published ones (`python -m analysis import genrm`), sound but for one thing. *Caught* means
that the check in its column says what stands beside it, and that the sound run passes. `M47`, an import below code, is
found by the linter.

| run | what is wrong | source | kind | check | says |
| --- | --- | --- | --- | --- | --- |
"""


def row(mutant: Mutant) -> tuple[str, bool]:
    """The mutant's line, and whether it was caught."""
    for tried, seed in enumerate((*mutant.seeds, *range(100, 100 + _MOST_SEEDS)), 1):
        trial = try_mutant(mutant, seed)
        if trial.caught:
            needed, seconds = str(tried), f"{trial.seconds:.1f}"
            break
    else:
        needed, seconds = "**not caught**", ""
    cells = (
        mutant.name, mutant.defect, mutant.source, f"`{mutant.twin.__name__}`", mutant.scenario, f"`{mutant.check}`",
        needed, seconds,
    )  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n", bool(seconds)


def main() -> int:
    lines, missed = [], []
    for mutant in all_mutants():
        line, caught = row(mutant)
        lines.append(line)
        if not caught:
            missed.append(mutant.name)
        print(line, end="", flush=True)
    summary = f"{len(lines) - len(missed)} of {len(lines)} caught"
    wrong, away = evidence.rows()
    print("".join(wrong), end="", flush=True)
    missed += away
    of_evidence = f"{len(wrong) - len(away)} of {len(wrong)} caught"
    PAGE.write_text(
        _HEAD + "".join(lines) + f"\n{summary}.\n" + _EVIDENCE_HEAD + "".join(wrong) + f"\n{of_evidence}.\n"
    )
    summary += f", of wrong evidence {of_evidence}"
    print(f"{PAGE}: {summary}" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
