"""The import-linter contract behind DESIGN.md's table: a package imports what is listed and nothing else."""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

# CPython's own tests come with the interpreter, but are not counted among its modules.
STANDARD = sys.stdlib_module_names | {"test"}


class AllowlistContract(Contract):
    """``package`` may import itself, the standard library and ``allowed`` (each with all that lies below it).

    import-linter's own ``forbidden`` contract names what is refused, so a new dependency passes until somebody thinks
    of it. Only direct imports count: what an allowed module imports is its own contract's matter.

    ``exceptions``: lines of ``importer -> imported``, each with all that lies below, that are permitted besides. One
    that no import needs breaks the contract, so that none outlives its reason.
    """

    type_name = "allowlist"

    package = fields.StringField()
    allowed = fields.SetField(subfield=fields.StringField())
    exceptions = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        package = str(self.package)
        permitted = {package, *map(str, self.allowed)}  # type: ignore[call-overload]
        excepted = [tuple(map(str.strip, str(line).split("->"))) for line in self.exceptions or ()]  # type: ignore[union-attr,attr-defined]
        unused = set(excepted)
        violations = []
        for importer in sorted(m for m in graph.modules if _within(m, package)):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if imported.partition(".")[0] in STANDARD:
                    continue
                if not any(_within(imported, name) for name in permitted):
                    used = [(a, b) for a, b in excepted if _within(importer, a) and _within(imported, b)]
                    if used:
                        unused.difference_update(used)
                        continue
                    details = graph.get_import_details(importer=importer, imported=imported)
                    lines = sorted({int(d["line_number"]) for d in details})
                    violations.append((importer, imported, lines))
        metadata = {"violations": violations, "unused": [" -> ".join(pair) for pair in excepted if pair in unused]}
        return ContractCheck(kept=not violations and not unused, metadata=metadata)

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, lines in check.metadata["violations"]:
            where = ", ".join(f"l.{line}" for line in lines)
            output.print_error(f"{importer} must not import {imported} ({where})", bold=False)
        for line in check.metadata["unused"]:
            output.print_error(f"no import needs the exception {line}", bold=False)
        output.print_error(f"Allowed: the standard library, {', '.join(sorted(map(str, self.allowed)))}", bold=False)  # type: ignore[call-overload]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
