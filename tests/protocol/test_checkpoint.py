"""Exports: whole or not there, and a torn one is known by its hash (scaling.md 9)."""

from __future__ import annotations

import asyncio

import pytest

from protocol.config import ExportConfig
from protocol.errors import CorruptExport, DiskFull, Outcome, StorageError
from protocol.training.checkpoint import (
    MANIFEST,
    Exporter,
    decode_manifest,
    describe,
    encode_manifest,
    exports,
    latest_export,
    load_export,
    verify_export,
)
from tests.protocol.fake import FakeBackend, FakeTrainer, run


def exporter(**config: object) -> Exporter:
    return Exporter(ExportConfig(**config), FakeTrainer())  # type: ignore[arg-type]


def test_an_export_is_read_back_as_it_was_written() -> None:
    async def body(world: FakeBackend) -> None:
        path = await exporter().export("7")
        assert path == "exports/00000001-7"
        assert await latest_export(world.storage, "exports") == path
        export = await load_export(world.storage, path)
        assert export.manifest.version == "7"
        assert export.shards == tuple((name, data) for name, data, _ in await FakeTrainer().shards("7"))
        assert await verify_export(world.storage, path) == export.manifest
        (published,) = world.of("export.published")
        assert published == {"version": "7", "path": path, "weight_hash": export.manifest.weight_hash}
        assert not [p for p in world.storage.files if ".tmp-" in p]

    run(body)


def test_nothing_is_published_until_the_rename() -> None:
    async def body(world: FakeBackend) -> None:
        task = asyncio.ensure_future(exporter().export("7"))
        seen = []
        while not task.done():
            seen.append(await latest_export(world.storage, "exports"))
        assert seen[0] is None
        for path in {p for p in seen if p is not None}:
            await verify_export(world.storage, path)

    run(body)


@pytest.mark.parametrize("torn", ["model-0.bin", "model-1.bin", MANIFEST])
def test_a_torn_file_makes_the_export_corrupt(torn: str) -> None:
    async def body(world: FakeBackend) -> None:
        world.storage.tear = [torn]
        path = await exporter().export("7")  # the write said success
        for read in (load_export, verify_export):
            with pytest.raises(CorruptExport, match=torn) as caught:
                await read(world.storage, path)
            assert caught.value.outcome is Outcome.NOT_DONE

    run(body)


@pytest.mark.parametrize("change", ["altered", "missing", "swapped", "hash"])
def test_what_was_altered_is_found(change: str) -> None:
    async def body(world: FakeBackend) -> None:
        path = await exporter().export("7")
        files = world.storage.files
        one, two = f"{path}/model-0.bin", f"{path}/model-1.bin"
        if change == "altered":
            files[one] = b"x" + files[one][1:]
        elif change == "missing":
            del files[two]
        elif change == "swapped":
            files[one], files[two] = files[two], files[one]
        else:
            files[f"{path}/{MANIFEST}"] = files[f"{path}/{MANIFEST}"].replace(b'"weight_hash": "', b'"weight_hash": "0')
        with pytest.raises(CorruptExport):
            await verify_export(world.storage, path)

    run(body)


def test_a_folder_without_manifest_is_no_export() -> None:
    async def body(world: FakeBackend) -> None:
        world.storage.files["exports/00000009-9/model-0.bin"] = b"x"
        with pytest.raises(CorruptExport, match=MANIFEST):
            await load_export(world.storage, "exports/00000009-9")

    run(body)


@pytest.mark.parametrize("bad", [b"", b"[]", b"{}", b'{"version": "1", "weight_hash": "x", "shards": [{"name": "a"}]}'])
def test_a_broken_manifest_says_what_is_wrong(bad: bytes) -> None:
    with pytest.raises(ValueError):
        decode_manifest(bad)


def test_a_manifest_survives_its_encoding() -> None:
    manifest = describe("3", (("a.bin", b"aa", 10), ("b.bin", b"", 20)))
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert [size for _, size, _ in manifest.shards] == [2, 0]


def test_the_newest_export_is_the_one_published_last() -> None:
    async def body(world: FakeBackend) -> None:
        made = exporter()
        for version in ("10", "9", "10"):
            await made.export(version)
        assert await exports(world.storage, "exports") == (
            "exports/00000003-10",
            "exports/00000002-9",
            "exports/00000001-10",
        )

    run(body)


def test_old_exports_go_only_after_a_new_one_is_there() -> None:
    async def body(world: FakeBackend) -> None:
        made = exporter(keep=2)
        for version in ("1", "2", "3"):
            await made.export(version)
        world.storage.fail["model-1.bin"] = DiskFull("no space")
        with pytest.raises(DiskFull) as caught:
            await made.export("4")
        assert caught.value.outcome is Outcome.NOT_DONE
        assert await exports(world.storage, "exports") == ("exports/00000003-3", "exports/00000002-2")
        assert not [p for p in world.storage.files if ".tmp-" in p]

    run(body)


def test_an_export_that_takes_too_long_is_of_unknown_outcome_and_its_remains_go_with_the_next() -> None:
    class Slow(FakeTrainer):
        slow = True

        async def shards(self, version: str) -> tuple[tuple[str, bytes, int], ...]:
            await asyncio.sleep(100 if self.slow else 0)
            return await super().shards(version)

    async def body(world: FakeBackend) -> None:
        trainer = Slow()
        made = Exporter(ExportConfig(timeout_s=10), trainer)
        world.storage.files["exports/.tmp-old/model-0.bin"] = b"x"
        with pytest.raises(StorageError) as caught:
            await made.export("1")
        assert caught.value.outcome is Outcome.UNKNOWN
        trainer.slow = False
        await made.export("1")
        assert not [p for p in world.storage.files if ".tmp-" in p]

    run(body)


@pytest.mark.parametrize("version", ["", "a/b"])
def test_a_version_that_cannot_be_a_name_is_refused(version: str) -> None:
    async def body(world: FakeBackend) -> None:
        with pytest.raises(StorageError) as caught:
            await exporter().export(version)
        assert caught.value.outcome is Outcome.NOT_DONE and world.storage.files == {}

    run(body)
