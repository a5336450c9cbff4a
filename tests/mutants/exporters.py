"""Wrong exporters, and a trainer that serves a right one as well as a wrong one."""

from __future__ import annotations

from typing import Any

from protocol.ports import backend
from protocol.training.checkpoint import MANIFEST, Exporter, describe, encode_manifest, exports
from scenarios.trainer import SyntheticTrainer
from tests.mutants.registry import Mutant


class FillingTrainer(SyntheticTrainer):
    """Returns the shards, and also puts them into the list that its caller passed, if it did."""

    async def shards(self, version: str, into: list[Any] | None = None) -> tuple[tuple[str, bytes, int], ...]:
        made = await super().shards(version)
        if into is not None:
            into.extend(made)
        return made


class _OwnExport(Exporter):
    """The happy path of an export, with the two places where the mutants go wrong."""

    async def _export(self, version: str) -> str:
        port = backend()
        prefix = self._config.prefix
        temporary = f"{prefix}/.tmp-{port.new_id('export')}"
        shards = await self._shards(version)
        for name, data, nominal_bytes in shards:
            await port.storage.write(f"{temporary}/{name}", data, size_bytes=nominal_bytes, fsync=True)
        manifest = await self._describe(version, temporary, shards)
        await port.storage.write(f"{temporary}/{MANIFEST}", encode_manifest(manifest), fsync=True)
        published = await exports(port.storage, prefix)
        path = f"{prefix}/{len(published) + 1:08d}-{version}"
        await port.storage.rename(temporary, path)
        port.emit("export.published", version=version, path=path, weight_hash=manifest.weight_hash)
        return path

    async def _shards(self, version: str) -> tuple[tuple[str, bytes, int], ...]:
        return await self._trainer.shards(version)

    async def _describe(self, version: str, temporary: str, shards: tuple[tuple[str, bytes, int], ...]) -> Any:
        return describe(version, shards)


class HashesWhatItReadsBack(_OwnExport):
    """Takes the hashes of the manifest from the files as they are in storage: a torn one matches itself."""

    async def _describe(self, version: str, temporary: str, shards: tuple[tuple[str, bytes, int], ...]) -> Any:
        storage = backend().storage
        return describe(version, [(n, await storage.read(f"{temporary}/{n}"), size) for n, _, size in shards])


class ReadsItsOwnArgument(_OwnExport):
    """Looks for the result in the list that it sent: what is changed after it was sent changes only at the receiver."""

    async def _shards(self, version: str) -> tuple[tuple[str, bytes, int], ...]:
        into: list[Any] = []
        trainer: Any = self._trainer
        await trainer.shards(version, into)
        return tuple(into)


MUTANTS = (
    Mutant(
        "manifest of what was read back",
        "scaling 9",
        "exporter",
        Exporter,
        HashesWhatItReadsBack,
        "torn",
        "loaded_export_is_whole",
    ),
    Mutant(
        "message changed after it was sent",
        "DESIGN copies",
        "exporter",
        Exporter,
        ReadsItsOwnArgument,
        "export_later",
        "reached",
    ),
)
