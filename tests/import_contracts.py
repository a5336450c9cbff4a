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
    """

    type_name = "allowlist"

    package = fields.StringField()
    allowed = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        package = str(self.package)
        permitted = {package, *map(str, self.allowed)}  # type: ignore[call-overload]
        violations = []
        for importer in sorted(m for m in graph.modules if _within(m, package)):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if imported.partition(".")[0] in STANDARD:
                    continue
                if not any(_within(imported, name) for name in permitted):
                    details = graph.get_import_details(importer=importer, imported=imported)
                    lines = sorted({int(d["line_number"]) for d in details})
                    violations.append((importer, imported, lines))
        return ContractCheck(kept=not violations, metadata={"violations": violations})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, lines in check.metadata["violations"]:
            where = ", ".join(f"l.{line}" for line in lines)
            output.print_error(f"{importer} must not import {imported} ({where})", bold=False)
        output.print_error(f"Allowed: the standard library, {', '.join(sorted(map(str, self.allowed)))}", bold=False)  # type: ignore[call-overload]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
