"""The guarded converter: what it refuses, what it leaves on disk, and that it talks to nobody."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from conversion_models import node, two_conv_layers, two_convs, write_compression, write_model
from onnx import TensorProto

from fleet.device.errors import EdgeloopError, EngineError, UserError
from tasks.mnn import converter
from tasks.mnn.converter import ConvertOptions, convert, dump, publish, supported_ops

CONVERT = (
    "import sys; from pathlib import Path; from tasks.mnn.converter import convert;"
    "convert(Path(sys.argv[1]), Path(sys.argv[2]))"
)
CHILD = Path(converter.__file__).with_name("converter_child.py")


def test_a_model_converts_opens_and_keeps_its_interface(tmp_path: Path) -> None:
    """The record names the model's inputs and outputs as the ONNX has them, and what is on disk."""
    result = convert(two_convs(tmp_path / "m.onnx"), tmp_path / "new" / "m.mnn")
    assert [(s.name, s.shape, s.dtype) for s in result.inputs] == [("input", (1, 3, 8, 8), "float32")]
    assert [(s.name, s.shape) for s in result.outputs] == [("logits", (1, 5, 8, 8))]
    assert result.size_bytes == result.path.stat().st_size
    assert result.audit.ok
    assert result.int8_ops_ran == 0


def test_two_conversions_are_the_same_bytes(tmp_path: Path) -> None:
    """The engine's random uuid is replaced by one derived from the source and the options."""
    onnx = two_convs(tmp_path / "m.onnx")
    first, second = (convert(onnx, tmp_path / name) for name in ("a.mnn", "b.mnn"))
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.sha256 == second.sha256


BYTES = {
    "fp32": (ConvertOptions(), "934b3626e974732b29acc601318df67cf32fbec4144117141f4e75b701412bb7"),
    "fp16": (ConvertOptions(fp16=True), "086a43a46d8997c52f88316a3f83fbf338f9f00a96027b3aed7c17e3c9312fc5"),
    "w8": (ConvertOptions(weight_bits=8), "c86c5ac270ac1ee60fc0ad00881436c7d65370b1b4c99e2ed8f4ff8449e01a9f"),
    "i8": (ConvertOptions(weight_bits=8), "c15516f0e9d55668ce0a01e8479669e733bb11a0c8092744ecf33a8cff8c584c"),
}


@pytest.mark.parametrize("kind", BYTES)
def test_the_bytes_of_a_model_change_with_the_engine_only(kind: str, tmp_path: Path) -> None:
    """An edit of the guard around MNN 3.6.1 leaves each registered model's bytes reproducible."""
    onnx, (options, sha256) = two_convs(tmp_path / "m.onnx"), BYTES[kind]
    assert hashlib.sha256(onnx.read_bytes()).hexdigest().startswith("f8a53e106f7260230c5104f5029df45310")
    if kind == "i8":
        options = replace(options, compression=write_compression(tmp_path / "q.json", two_conv_layers()))
    assert convert(onnx, tmp_path / "m.mnn", options).sha256 == sha256


def test_the_uuid_names_source_and_options(tmp_path: Path) -> None:
    """Another ONNX, option or compression file gives another uuid, which the engine reads back."""
    onnx, other = two_convs(tmp_path / "m.onnx"), two_convs(tmp_path / "n.onnx", seed=1)
    parameters = write_compression(tmp_path / "q.json", two_conv_layers())
    runs = [
        (onnx, ConvertOptions()),
        (other, ConvertOptions()),
        (onnx, ConvertOptions(biz_code="other")),
        (onnx, ConvertOptions(fp16=True)),
        (onnx, ConvertOptions(weight_bits=8)),
        (onnx, ConvertOptions(compression=parameters)),
    ]
    uuids = {dump(convert(source, tmp_path / "m.mnn", options).path).uuid for source, options in runs}
    assert len(uuids) == len(runs)
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid) for uuid in uuids)


def test_a_tensor_named_like_a_uuid_is_not_the_uuid(tmp_path: Path) -> None:
    """The name stays, the uuid still is the same in two conversions."""
    name = "7f504e15-f193-4d66-b1a8-41525dba69f1"
    nodes = [node("Relu", [name], "middle"), node("Neg", ["middle"], "y")]
    onnx = write_model(tmp_path / "m.onnx", nodes, {}, inputs={name: [1, 3, 4, 4]}, outputs=["y"])
    first, second = (convert(onnx, tmp_path / f"{i}.mnn") for i in range(2))
    assert first.inputs[0].name == name
    assert first.sha256 == second.sha256


@pytest.mark.parametrize(
    "suffix", ["/a:0", " b", "\"c'", "é中", "\nd\t", "\\e", "{}[],", "error not support"]
)
def test_any_tensor_name_survives(suffix: str, tmp_path: Path) -> None:
    """Names are data: quotes, newlines, other alphabets and words of failure in them change nothing."""
    onnx = two_convs(tmp_path / "m.onnx", names=suffix)
    parameters = write_compression(tmp_path / "q.json", two_conv_layers(names=suffix))
    result = convert(onnx, tmp_path / "m.mnn", ConvertOptions(compression=parameters))
    assert result.inputs[0].name == f"input{suffix}"
    assert result.audit.int8_layers == (f"relu1{suffix}", f"clip2{suffix}")


def test_any_path_works(tmp_path: Path) -> None:
    """Folders and files with spaces, quotes, newlines and a leading dash are only paths."""
    folder = tmp_path / '-it\'s a\n"földer"'
    onnx = two_convs(folder / "-m o.onnx")
    assert convert(onnx, folder / "--out x.mnn").path.is_file()


def _truncated(path: Path) -> None:
    path.write_bytes(two_convs(path).read_bytes()[:-200])


HOSTILE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("this is no model"),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "random": lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)),
    "truncated": _truncated,
    "directory": lambda path: path.mkdir(),
    "an mnn": lambda path: convert(two_convs(path.with_name("x.onnx")), path),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_onnx_is_a_user_error_and_the_old_model_stays(kind: str, tmp_path: Path) -> None:
    """The error names the file; an earlier output is not touched, and nothing else appears."""
    onnx, folder = tmp_path / "m.onnx", tmp_path / "out"
    folder.mkdir()
    (folder / "m.mnn").write_bytes(b"the old model")
    HOSTILE[kind](onnx)
    with pytest.raises(UserError, match=r"m\.onnx"):
        convert(onnx, folder / "m.mnn")
    assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == [("m.mnn", b"the old model")]


def _cast_uint8(path: Path, size: int) -> Path:
    nodes = [node("Cast", ["x"], "u", to=TensorProto.UINT8), node("Cast", ["u"], "y", to=TensorProto.FLOAT)]
    return write_model(path, nodes, {}, inputs={"x": [1, size, size]}, outputs=["y"], opset=13)


def _group_norm(path: Path, size: int) -> Path:
    ones = np.ones(size, np.float32)
    nodes = [node("GroupNormalization", ["x", "s", "s"], "y", num_groups=2)]
    return write_model(path, nodes, {"s": ones}, inputs={"x": [1, size, 4, 4]}, outputs=["y"], opset=21)


def _gru(path: Path, size: int) -> Path:
    rng = np.random.default_rng(size)
    constants = {
        "w": rng.normal(size=(1, 3 * size, 5)).astype(np.float32),
        "r": rng.normal(size=(1, 3 * size, size)).astype(np.float32),
    }
    nodes = [node("GRU", ["x", "w", "r"], "y", hidden_size=size)]
    return write_model(path, nodes, constants, inputs={"x": [3, 1, 5]}, outputs=["y"])


def _dilated_pool(path: Path, size: int) -> Path:
    nodes = [node("MaxPool", ["x"], "y", kernel_shape=[3, 3], dilations=[2, 2])]
    return write_model(path, nodes, {}, inputs={"x": [1, 2, size, size]}, outputs=["y"])


def _foreign(path: Path, size: int) -> Path:
    nodes = [node("HardSwish", ["x"], "y", domain="shop.ops")]
    return write_model(path, nodes, {}, inputs={"x": [1, size]}, outputs=["y"], domains=["shop.ops"])


def _training_norm(path: Path, size: int) -> Path:
    ones = np.ones(size, np.float32)
    nodes = [node("BatchNormalization", ["x", "s", "s", "s", "s"], "y", training_mode=1)]
    return write_model(path, nodes, {"s": ones}, inputs={"x": [2, size, 4, 4]}, outputs=["y"])


def _huge(path: Path, size: int) -> Path:
    shape = np.array([100_000, 1_000, 1_000 * size], np.int64)
    nodes = [node("ConstantOfShape", ["n"], "z"), node("Add", ["x", "z"], "y")]
    return write_model(path, nodes, {"n": shape}, inputs={"x": [1]}, outputs=["y"])


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(
    ("build", "says"),
    [
        (_cast_uint8, "the converter crashed with SIGSEGV"),
        (_group_norm, "wrote no file.*\n.*GroupNormalization"),
        (_gru, "cannot run"),
        (_dilated_pool, "'y' has the shape|the engine crashed with SIGFPE"),
        (_foreign, "foreign domains.*shop.ops::HardSwish 'y'"),
        (_training_norm, "training mode.*BatchNormalization 'y'"),
        (_huge, "the converter|the engine"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_without_a_file(
    build: Callable[[Path, int], Path], says: str, size: int, tmp_path: Path
) -> None:
    """A crash, success without a file, no runnable session, wrong shapes: each one error with its reason."""
    with pytest.raises(EngineError, match=says) as refused:
        convert(build(tmp_path / "m.onnx", size), tmp_path / "out" / "m.mnn")
    assert refused.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_converter_that_hangs_is_ended(tmp_path: Path) -> None:
    """Past its time limit the child is killed and nothing is left of it."""
    before = psutil.Process().children(recursive=True)
    with pytest.raises(EngineError, match=r"ran past its limit of 0\.01 s"):
        convert(two_convs(tmp_path / "m.onnx"), tmp_path / "m.mnn", ConvertOptions(timeout_s=0.01))
    assert psutil.Process().children(recursive=True) == before
    assert not (tmp_path / "m.mnn").exists()


@pytest.mark.parametrize(
    "blocked", ["m.onnx/under a file.mnn", "folder", "x" * 300 + ".mnn"], ids=["file", "directory", "long"]
)
def test_an_out_that_cannot_be_written_is_a_user_error(blocked: str, tmp_path: Path) -> None:
    """The path is named, and no temporary file stays beside it."""
    onnx = two_convs(tmp_path / "m.onnx")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match="allowed: a file path"):
        convert(onnx, tmp_path / blocked)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "m.onnx"]


def test_a_temporary_folder_without_space_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is said before the converter truncates its files on it."""
    monkeypatch.setattr(converter, "_COPIES", 1 << 50)
    with pytest.raises(UserError, match=r"bytes free.*\n.*\n.*TMPDIR"):
        convert(two_convs(tmp_path / "m.onnx"), tmp_path / "m.mnn")
    assert not (tmp_path / "m.mnn").exists()


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (PermissionError(errno.EACCES, "Permission denied", "{scratch}/model.onnx"), True),
        (PermissionError(errno.EACCES, "Permission denied", "/elsewhere/q.json"), False),
    ],
    ids=["full", "inside", "elsewhere"],
)
def test_only_what_went_wrong_in_the_temporary_folder_is_blamed_on_it(error: OSError, blamed: bool) -> None:
    """A write without room and a file in it are the folder's; a file elsewhere is told as it is."""

    def work() -> None:
        with converter._scratch() as folder:
            error.filename = error.filename and error.filename.format(scratch=folder)
            raise error

    with pytest.raises(UserError if blamed else PermissionError) as raised:
        work()
    assert ("TMPDIR" in str(raised.value)) is blamed


def test_a_disk_that_keeps_something_else_is_found_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is read back: a torn one is an error, the older file stays and nothing else is left."""
    made, out = tmp_path / "made.mnn", tmp_path / "out" / "m.mnn"
    made.write_bytes(bytes(range(256)) * 40)
    out.parent.mkdir()
    out.write_bytes(b"the old model")

    def torn(descriptor: int) -> None:  # the last thing before the copy is read: here the disk goes wrong
        os.truncate(descriptor, 4096)

    monkeypatch.setattr(os, "fsync", torn)
    with pytest.raises(UserError, match="reads back as something else"):
        publish(made, out)
    assert [(p.name, p.read_bytes()) for p in out.parent.iterdir()] == [("m.mnn", b"the old model")]
    monkeypatch.undo()
    publish(made, out)
    assert out.read_bytes() == made.read_bytes()


def test_two_conversions_to_one_file_leave_one_whole_model(tmp_path: Path) -> None:
    """Whoever renames last wins; a half-written or mixed file never appears."""
    sources = [two_convs(tmp_path / f"{seed}.onnx", seed=seed) for seed in range(2)]
    whole = {convert(source, tmp_path / "alone.mnn").sha256 for source in sources}
    out = tmp_path / "out" / "m.mnn"
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda s=source: results.append(convert(s, out).sha256)) for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == whole
    assert converter.hashlib.sha256(out.read_bytes()).hexdigest() in whole
    assert [p.name for p in out.parent.iterdir()] == ["m.mnn"]


def _limited_child(parent: psutil.Process) -> psutil.Process | None:
    """A converting child that has set its limits, suspended; None when there is none right now."""
    for child in parent.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.rlimit(psutil.RLIMIT_CORE) == (0, 0) and CHILD.name in " ".join(child.cmdline()):
                child.suspend()
                return child
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a CPU limit ends the child, later")
def test_a_killed_parent_takes_its_child_with_it(tmp_path: Path) -> None:
    """kill -9 of the caller ends even a converter that hangs, and the old model stays."""
    onnx, out = two_convs(tmp_path / "m.onnx", width=64), tmp_path / "m.mnn"
    out.write_bytes(b"the old model")
    scratch = tmp_path / "scratch"  # killed, the parent leaves it behind
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    parent = psutil.Popen([sys.executable, "-c", CONVERT, str(onnx), str(out)], env=environment)
    child = None
    while child is None and parent.poll() is None:
        child = _limited_child(parent)
    parent.kill()
    parent.wait()
    assert child is not None
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive
    assert out.read_bytes() == b"the old model"


@pytest.mark.parametrize(
    "options",
    [{"weight_bits": 4}, {"weight_bits": 8, "fp16": True}, {"biz_code": ""}, {"biz_code": "a\nb"}],
    ids=str,
)
def test_options_the_guard_does_not_vouch_for_are_refused(options: dict[str, object]) -> None:
    """Only what the audit can check may be asked for."""
    with pytest.raises(UserError, match="allowed"):
        ConvertOptions(**options)  # type: ignore[arg-type]


def test_a_damaged_model_cannot_be_dumped(tmp_path: Path) -> None:
    """Reading a file that is no model ends in an engine error, not in a crash of the caller."""
    broken = tmp_path / "broken.mnn"
    broken.write_bytes(np.random.default_rng(0).bytes(4000))
    with pytest.raises(EdgeloopError, match=r"broken\.mnn"):
        dump(broken)


def test_the_engine_lists_its_operators() -> None:
    """The list comes from the converter itself: it has Conv and no GroupNormalization."""
    known = supported_ops()
    assert {"Conv", "HardSwish", "Gemm"} <= known
    assert "GroupNormalization" not in known


def test_the_child_never_loads_the_wheels_tools(tmp_path: Path) -> None:
    """MNN.tools installs packages and uploads arguments on import; the converting process has not seen it."""
    onnx = two_convs(tmp_path / "m.onnx")
    script = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__');"
        "print('MODULES', *sorted(sys.modules))"
    )
    arguments = ["convert", "-f", "ONNX", "--modelFile", str(onnx), "--MNNModel", str(tmp_path / "m.mnn")]
    said = subprocess.run(
        [sys.executable, "-c", script, str(CHILD), *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    modules = said.partition("MODULES ")[2].split()
    assert "_tools" in modules
    assert (tmp_path / "m.mnn").exists()
    assert [m for m in modules if m.split(".")[0] in {"MNN", "aliyun", "requests", "urllib3", "socket"}] == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_conversion_makes_no_connection_and_runs_no_installer(tmp_path: Path) -> None:
    """Traced with all its children, a conversion opens no internet socket and runs only this Python."""
    onnx, trace = two_convs(tmp_path / "m.onnx"), tmp_path / "trace"
    command = ["strace", "-f", "-e", "trace=network,execve", "-s", "4096", "-o", str(trace)]
    command += [sys.executable, "-c", CONVERT, str(onnx), str(tmp_path / "m.mnn")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr and done.returncode != 0:
        pytest.skip("tracing is not permitted here")
    assert (tmp_path / "m.mnn").exists()
    calls = trace.read_text(encoding="utf-8", errors="replace")
    programs = set(re.findall(r"execve\(\"([^\"]+)\"[^\n]*= 0", calls))
    assert {Path(program).name for program in programs} == {Path(sys.executable).name}
    assert calls.count(CHILD.name) >= 4  # convert, inspect and two for the dump were seen
    assert not re.findall(r"(?:connect|sendto|bind)\([^\n]*AF_INET[^\n]*", calls)
    assert not re.findall(r"socket\(AF_INET6?,[^\n]*", calls)
