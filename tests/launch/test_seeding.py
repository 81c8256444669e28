"""Packed compile caches: what is packed, what is unpacked, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config.schema import RunConfig
from service.launch import seeding
from service.launch.environment import inspect_node
from tests.launch.running import Running, wait_for

KEY = "torch-2_triton-3_cuda-13_H200_x86"


def filled(cache: Path) -> Path:
    """A cache as compilers leave it."""
    files = {
        "inductor/ab/code.py": "x",
        "triton/K/kernel.cubin": "cubin",
        "triton/K/__grp__kernel.json": json.dumps({"child_paths": {"kernel.cubin": f"{cache}/triton/K/kernel.cubin"}}),
        "triton/S/launcher.so": "binary",
        # What stays at home.
        "triton/K/tmp.pid_7_x/kernel.ptx": "half",
        "inductor/locks/a": "",
        "inductor/ab/a.lock": "",
        "cuda/index": "x",
        "home/.secret": "x",
    }
    for name, text in files.items():
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text(text)
    (cache / "triton/S/launcher.so").chmod(0o755)
    return cache


def files_of(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}


PACKED = {"inductor/ab/code.py", "triton/K/kernel.cubin", "triton/K/__grp__kernel.json", "triton/S/launcher.so"}


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """A directory with the seed of a filled cache."""
    assert seeding.pack(tmp_path / "seeds", filled(tmp_path / "first" / KEY)) is not None
    return tmp_path / "seeds"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The empty cache of another node."""
    made = tmp_path / "second" / KEY
    made.mkdir(parents=True)
    return made


def test_another_node_has_what_was_packed(seeds: Path, cache: Path) -> None:
    assert seeding.unpack(seeds, cache) == f"cache seed: 4 files from {seeds}/{KEY}.tar.gz"
    assert files_of(cache) == PACKED | {seeding.MARK}
    assert os.access(cache / "triton/S/launcher.so", os.X_OK)
    group = json.loads((cache / "triton/K/__grp__kernel.json").read_text())
    assert group == {"child_paths": {"kernel.cubin": f"{cache}/triton/K/kernel.cubin"}}
    # Once is enough.
    assert seeding.unpack(seeds, cache) is None


def test_what_the_node_has_stays(seeds: Path, cache: Path) -> None:
    (cache / "triton/K").mkdir(parents=True)
    (cache / "triton/K/kernel.cubin").write_text("mine")
    seeding.unpack(seeds, cache)
    assert (cache / "triton/K/kernel.cubin").read_text() == "mine"
    assert files_of(cache) == PACKED | {seeding.MARK}


def test_a_seed_is_made_once_and_not_of_nothing(seeds: Path, cache: Path, tmp_path: Path) -> None:
    before = (seeds / f"{KEY}.tar.gz").read_bytes()
    filled(tmp_path / "first" / KEY).joinpath("inductor/new").write_text("x")
    assert seeding.pack(seeds, tmp_path / "first" / KEY) is None
    assert (seeds / f"{KEY}.tar.gz").read_bytes() == before
    assert seeding.pack(tmp_path / "other", cache) is None
    assert not (tmp_path / "other").exists()


def test_without_a_seed_of_this_kind_of_node_nothing_is_said(seeds: Path, tmp_path: Path) -> None:
    other = tmp_path / "second" / "torch-9_triton-3_cuda-13_H200_x86"
    other.mkdir(parents=True)
    assert seeding.unpack(seeds, other) is None
    assert seeding.unpack(tmp_path / "nothing", other) is None
    assert list(other.iterdir()) == []


def archive(file: Path, *members: tarfile.TarInfo, key: str = KEY, head: bool = True, content: bytes = b"") -> None:
    """Write a seed by hand; `content` is the last member's, the others' is x."""
    with tarfile.open(file, "w:gz") as made:
        if head:
            described = json.dumps({"key": key, "files": len(members)}).encode()
            info = tarfile.TarInfo(seeding.HEAD)
            info.size = len(described)
            made.addfile(info, io.BytesIO(described))
        for info in members:
            if content and info is members[-1]:
                info.size = len(content)
            made.addfile(info, io.BytesIO(content or b"x" * info.size))


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside"),
        member("triton/../../outside"),
        member("/tmp/outside"),
        member("elsewhere/x"),
        member("triton/link", tarfile.SYMTYPE, "/etc"),
        member("triton/link", tarfile.LNKTYPE, "/etc/passwd"),
        member("triton/device", tarfile.CHRTYPE),
        member("triton/pipe", tarfile.FIFOTYPE),
        member("triton"),
    ],
    ids=lambda info: f"{info.name} {info.type!r}",
)
def test_a_seed_that_writes_elsewhere_is_refused_whole(tmp_path: Path, cache: Path, bad: tarfile.TarInfo) -> None:
    archive(tmp_path / f"{KEY}.tar.gz", member("triton/good"), bad)
    said = seeding.unpack(tmp_path, cache)
    assert said is not None
    assert f"is ignored: it holds {bad.name!r}, which is no file of a cache" in said
    assert said.count("\n") == 0
    assert list(cache.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"second", f"{KEY}.tar.gz"}


def test_seeds_that_do_not_fit_are_one_line(tmp_path: Path, seeds: Path, cache: Path) -> None:
    file = seeds / f"{KEY}.tar.gz"
    whole = file.read_bytes()
    for content, words in (
        (whole[: len(whole) // 2], "is damaged"),
        (b"", "is damaged"),
        (b"nonsense" * 100, "is damaged"),
    ):
        file.write_bytes(content)
        said = seeding.unpack(seeds, cache)
        assert said is not None
        assert words in said
    archive(file, member("triton/x"), key="torch-1")
    assert "is ignored: it is of 'torch-1'" in str(seeding.unpack(seeds, cache))
    archive(file, member("triton/x"), head=False)
    assert "it is not a seed of hiera-train" in str(seeding.unpack(seeds, cache))
    assert list(cache.iterdir()) == []


def refused(seeds: Path, cache: Path) -> str:
    """What is said of a seed that is not unpacked; nothing of it is in the cache."""
    said = seeding.unpack(seeds, cache)
    assert said is not None
    assert f"{KEY}.tar.gz is ignored: " in said
    assert "\n" not in said
    assert list(cache.iterdir()) == []
    return said


def decompressed(data: bytes) -> bytes | None:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return None


def test_a_flipped_byte_is_damage_wherever_it_is(seeds: Path, cache: Path) -> None:
    file = seeds / f"{KEY}.tar.gz"
    whole = file.read_bytes()
    # Behind gzip's header, which ends with a name.
    for place in range(whole.index(b"\0", 10) + 1, len(whole)):
        flipped = whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        # In a run of zeros, a copy from another distance is the same.
        if decompressed(flipped) != decompressed(whole):
            file.write_bytes(flipped)
            refused(seeds, cache)
    file.write_bytes(whole[:-8] + bytes(4) + whole[-4:])
    assert "is damaged (BadGzipFile)" in refused(seeds, cache)


def test_a_changed_content_is_damage(seeds: Path, cache: Path) -> None:
    """Stored uncompressed, where no decompressor stumbles over it; a header that was changed looks like the end."""
    file = seeds / f"{KEY}.tar.gz"
    plain = gzip.decompress(file.read_bytes())
    stored = gzip.compress(plain, compresslevel=0)
    for text in (b"cubin\0", b"launcher.so", b"ustar"):
        place = stored.rindex(text)
        file.write_bytes(stored[:place] + b"?" + stored[place + 1 :])
        refused(seeds, cache)
    file.write_bytes(stored)
    assert "4 files from" in str(seeding.unpack(seeds, cache))


def test_a_seed_that_is_cut_off_is_refused_whole(seeds: Path, cache: Path) -> None:
    file = seeds / f"{KEY}.tar.gz"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refused(seeds, cache)


def test_an_archive_that_was_cut_off_before_it_was_compressed_is_refused_whole(seeds: Path, cache: Path) -> None:
    file = seeds / f"{KEY}.tar.gz"
    plain = gzip.decompress(file.read_bytes())
    with tarfile.open(fileobj=io.BytesIO(plain)) as made:
        starts = [info.offset for info in made.getmembers()]
        ends = [info.offset_data for info in made.getmembers()]
    for length in sorted({0, *starts, *ends, *(start + 100 for start in starts), *(end + 1 for end in ends)}):
        file.write_bytes(gzip.compress(plain[:length], compresslevel=1))
        refused(seeds, cache)


def test_what_follows_the_end_is_damage(seeds: Path, cache: Path) -> None:
    file = seeds / f"{KEY}.tar.gz"
    whole = file.read_bytes()
    for more in (b"nonsense", gzip.compress(bytes(1 << 20))):
        file.write_bytes(whole + more)
        assert "is damaged" in refused(seeds, cache)


@pytest.mark.parametrize(
    "content",
    [
        b'{"child_paths": []}',
        b'{"child_paths": {"a": 1}}',
        b"{}",
        b"[]",
        b'"child_paths"',
        b"[" * 100_000,
        b'{"child_paths": {}}'.ljust(5 << 20),
        b"\xff",
    ],
    ids=["list", "number", "empty", "no mapping", "text", "nested", "large", "no UTF-8"],
)
def test_a_broken_list_of_a_kernels_files_is_refused_whole(tmp_path: Path, cache: Path, content: bytes) -> None:
    archive(tmp_path / f"{KEY}.tar.gz", member("triton/good"), member("triton/K/__grp__k.json"), content=content)
    refused(tmp_path, cache)


@pytest.mark.parametrize("head", ["[]", "{}", '{"key": "K"}', '{"key": "K", "files": "many"}', "[" * 4000, "\n"])
def test_a_broken_head_is_refused(tmp_path: Path, cache: Path, head: str) -> None:
    info = tarfile.TarInfo(seeding.HEAD)
    archive(tmp_path / f"{KEY}.tar.gz", info, head=False, content=head.replace('"K"', f'"{KEY}"').encode())
    refused(tmp_path, cache)


def test_names_that_are_too_deep_are_refused(tmp_path: Path, cache: Path) -> None:
    archive(tmp_path / f"{KEY}.tar.gz", member("triton/" + "a/" * 1900 + "b"))
    assert "which is no file of a cache" in refused(tmp_path, cache)


def test_only_a_seed_that_is_not_there_is_passed_over_in_silence(
    seeds: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another launcher takes away what this one was about to: no reason not to unpack.
    (cache / ".seed-gone").symlink_to("nowhere")
    assert "4 files from" in str(seeding.unpack(seeds, cache))
    (cache / seeding.MARK).unlink()

    def swept(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(seeding, "_write", swept)
    assert "is ignored: No such file or directory" in str(seeding.unpack(seeds, cache))
    assert not (cache / seeding.MARK).exists()
    (seeds / f"{KEY}.tar.gz").unlink()
    assert seeding.unpack(seeds, cache) is None


def test_two_nodes_with_one_process_id_pack_together(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, seeds, said = filled(tmp_path / "first" / KEY), tmp_path / "seeds", []
    add_head: Callable[..., None] = seeding._add_head

    def and_the_other(*arguments: object) -> None:
        monkeypatch.setattr(seeding, "_add_head", add_head)
        said.append(seeding.pack(seeds, first))
        add_head(*arguments)

    monkeypatch.setattr(seeding, "_add_head", and_the_other)
    said.append(seeding.pack(seeds, first))
    assert said == [f"cache seed: 4 files packed into {seeds}/{KEY}.tar.gz"] * 2
    assert [path.name for path in seeds.iterdir()] == [f"{KEY}.tar.gz"]
    assert "4 files from" in str(seeding.unpack(seeds, cache))


def test_a_pack_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, seeds = filled(tmp_path / "first" / KEY), tmp_path / "seeds"
    answers = iter([False, True])
    said = seeding.pack(seeds, first, stopped=lambda: next(answers))
    assert said == f"cache seed: {seeds}/{KEY}.tar.gz is not written: a stop was asked for; a later run packs it"
    assert list(seeds.iterdir()) == []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seeding, "_add_head", interrupt)
    with pytest.raises(KeyboardInterrupt):
        seeding.pack(seeds, first)
    assert list(seeds.iterdir()) == []


def test_what_killed_packs_left_is_removed_after_a_day(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for name, hours in ((".a.tar.gz.12", 25), (".b.tar.gz.0f.tmp", 25), (".c.tar.gz.0f.tmp", 23), ("d.tar.gz", 99)):
        (seeds / name).write_text("")
        os.utime(seeds / name, (time.time() - hours * 3600,) * 2)
    seeding.pack(seeds, filled(tmp_path / "first" / KEY))
    assert {path.name for path in seeds.iterdir()} == {".c.tar.gz.0f.tmp", "d.tar.gz", f"{KEY}.tar.gz"}


def test_a_disk_that_refuses_is_one_line(seeds: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = seeding.pack(tmp_path / "file" / "seeds", tmp_path / "first" / KEY)
    assert str(said).startswith("warning: runtime.cache_seed: ")
    (seeds / f"{KEY}.tar.gz").unlink()
    (seeds / f"{KEY}.tar.gz").mkdir()
    assert "is ignored: Is a directory" in str(seeding.unpack(seeds, cache))


def test_a_run_makes_the_seed_and_another_node_takes_it(tmp_path: Path) -> None:
    runtime = {"cache_seed": str(tmp_path / "seeds"), "nproc_per_node": 1, "device": "cpu"}
    config = RunConfig.model_validate({"runtime": {**runtime, "cache_dir": str(tmp_path / "cache")}})
    cache = filled(inspect_node(config, os.environ)[0].cache)
    seed = tmp_path / "seeds" / f"{cache.name}.tar.gz"
    first = Running(tmp_path / "one", {}, {"runtime": runtime}, name="first")
    second = None
    try:
        assert first.wait(240) == 0, first.text()
        assert f"cache seed: 4 files packed into {seed}" in first.text()
        other = {**runtime, "cache_dir": str(tmp_path / "new")}
        second = Running(tmp_path / "two", {}, {"runtime": other}, name="second")
        assert second.wait(240) == 0, second.text()
        assert f"cache seed: 4 files from {seed}" in second.text()
        assert f"compile cache {tmp_path}/new/{cache.name} (5 files)" in second.text()
    finally:
        first.close()
        if second is not None:
            second.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_packing_and_the_run_stays_finished(tmp_path: Path, number: int) -> None:
    runtime = {"cache_seed": str(tmp_path / "seeds"), "nproc_per_node": 1, "device": "cpu"}
    config = RunConfig.model_validate({"runtime": {**runtime, "cache_dir": str(tmp_path / "cache")}})
    cache = inspect_node(config, os.environ)[0].cache
    # Holes cost no disk, and 16 GB of them more time than the signal needs.
    (cache / "inductor").mkdir(parents=True)
    for index in range(4000):
        with (cache / "inductor" / f"{index}.so").open("wb") as file:
            file.truncate(4 << 20)
    running = Running(tmp_path / "run", {"steps": 5}, {"runtime": runtime})
    try:
        seeds = tmp_path / "seeds"
        wait_for(lambda: seeds.is_dir() and list(seeds.iterdir()), 240)
        running.process.send_signal(number)
        assert running.wait(240) == 0, running.text()
        assert "is not written: a stop was asked for" in running.text()
        assert list(seeds.iterdir()) == []
    finally:
        running.close()


KERNEL = """
import os, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(x + at, tl.load(x + at, at < n) * 2, at < n)

source = ASTSource(double, {"x": "*fp32", "n": "i32", "size": "constexpr"}, {"size": 128})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(len(kernel.asm["cubin"]))
"""


def test_triton_finds_its_kernels_in_an_unpacked_cache(tmp_path: Path) -> None:
    """Compiled for an H100, which needs none; in the unpacked cache the assembler is not asked again."""
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    first, second = tmp_path / "a" / KEY, tmp_path / "b" / KEY
    second.mkdir(parents=True)

    def compiled(cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
        environment.update(TRITON_CACHE_DIR=str(cache / "triton"), **more)
        return subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    done = compiled(first)
    assert done.returncode == 0, done.stderr
    seeding.pack(tmp_path / "seeds", first)
    first.rename(tmp_path / "gone")
    seeding.unpack(tmp_path / "seeds", second)
    before = files_of(second)
    again = compiled(second)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    assert files_of(second) == before
    # The proof that an empty cache would have been written to.
    assert files_of(tmp_path / "gone") == before - {seeding.MARK}
