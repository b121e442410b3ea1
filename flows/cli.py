"""`edgeloop`, the command line. Importing it imports nothing heavy: a command imports its work when called.

Stdout carries results only: what libraries, compiled ones too, and stages print goes to stderr.
"""

import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from fleet.device.errors import EdgeloopError, UserError
from flows.fleet_cli import fleet
from flows.interrupt import as_ctrl_c, leave
from flows.release_cli import release
from tasks.terminal import plain, plain_lines
from tasks.workspace import disk_full, find_workspace, repository, workspaces

app = App(
    name="edgeloop",
    help=(
        "Real images in, a proven int8 MNN model out.\n\n"
        "Start with `edgeloop build`: it trains, prunes, quantises, converts, measures, judges and registers "
        "a model of handwritten digits. Then `edgeloop init NAME DIR` for your own images, or "
        "`edgeloop convert MODEL.onnx --out MODEL.mnn` for a model you already have.\n\n"
        "Exit codes: 0 done, 1 refused by the gate, 2 input that cannot be used, 3 engine or device error."
    ),
    help_format="markdown",
    result_action="return_value",
)


def _version() -> str:
    from importlib.metadata import version

    return f"edgeloop {version('edgeloop')}, MNN {version('MNN')}"


app.version = _version
app.command(release)
app.command(fleet)


@app.command
def build(
    *,
    preset: Annotated[str | None, Parameter(name=["--preset", "-p"])] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Bring a workspace up to date: run what changed, judge it, register it.

    Args:
        preset: The workspace: digits, a folder of presets/, or one made by `edgeloop init`. Default: the one
            you are in, else digits.
        as_json: Print the result as JSON; everything else goes to stderr.
    """
    from flows.build import build as run_build
    from flows.built_text import print_built

    workspace = find_workspace(preset)
    built = run_build(workspace)
    if as_json:
        print(built.to_json())
    else:
        print_built(built, os.path.relpath(workspace.path / "reports" / "release.html"))
    return 0 if built.gate["verdict"] == "pass" else 1


@app.command
def init(name: str, directory: Path) -> int:
    """Make a workspace for your own images, which stay where they are.

    Args:
        name: Name of the workspace; becomes workspaces/NAME.
        directory: A folder of CLASS/IMAGE or SPLIT/CLASS/IMAGE, or a tar of one.
    """
    from tasks.init import init_workspace

    made, found = init_workspace(repository(), name, directory)
    print(f"{found.images_count} images in {found.classes_count} classes, median side {found.side_px} px")
    print(f"splits: {found.forecast}; repeated and unusable files will be left out")
    for note in found.forecast.notes():
        print(f"note: {plain(note)}")
    print("note: training mirrors images (`flip: true`); turn it off for text, digits, left against right")
    print(f"wrote {made.path / 'params.yaml'}; change what you like, then `edgeloop build --preset {name}`")
    return 0


@app.command
def convert(
    model: Path,
    *,
    out: Path,
    int8: Annotated[bool, Parameter(negative="")] = False,
    calibration: Path | None = None,
    preprocess: Path | None = None,
    fp16: Annotated[bool, Parameter(negative="")] = False,
    weight_bits: int | None = None,
    compression: Path | None = None,
    shape: Annotated[list[str], Parameter(negative="")] = [],  # noqa: B006  # cyclopts copies; None would be `--shape` with no value
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Convert any ONNX model, audit the result, and prove it against ONNX Runtime.

    Args:
        model: The ONNX file.
        out: Where the .mnn goes; written only when every check has passed.
        int8: Quantise weights and activations to int8; needs `--calibration`.
        calibration: A folder of real images, not from the training or the test set.
        preprocess: How an image becomes an input: JSON, the record `preprocess` of a model card. Default:
            centre square, ImageNet's mean and deviation.
        fp16: Store weights in half precision.
        weight_bits: 8 stores weights in int8 and computes in float.
        compression: MNN's compression parameters (JSON): scales of the int8 layers, instead of `--int8`.
        shape: Shape of a dynamic input, as NAME=1,3,224,224; repeatable, several for one name are all tried.
        as_json: Print the result as JSON.
    """
    from tasks.mnn.any_onnx import convert_any
    from tasks.mnn.calibration import read_preprocess
    from tasks.mnn.onnx_summary import summary
    from tasks.mnn.request import ConvertOptions

    result = convert_any(
        model,
        out,
        options=ConvertOptions(fp16=fp16, weight_bits=weight_bits, compression=compression),
        int8=int8,
        calibration=calibration,
        preprocess=read_preprocess(preprocess) if preprocess else None,
        shapes=shape,
        datasets={
            name: path
            for name, w in workspaces(repository()).items()
            if (path := w.path / "data/prepared").is_dir()
        },
    )
    print(json.dumps(result.to_dict(), indent=1) if as_json else plain_lines(summary(result)))
    return 0 if result.ok else EdgeloopError.exit_code


@app.command
def bench(
    *models: Path,
    threads: str = "1",
    precision: str = "normal",
    memory: str = "normal",
    queries: int = 500,
    shape: Annotated[list[str], Parameter(negative="")] = [],  # noqa: B006  # as in `convert`
    preprocess: Path | None = None,
    samples: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Measure MNN models on this host: latency with bounds, memory, layers; several are compared.

    Args:
        models: The .mnn files.
        threads: CPU threads, several with commas: 1,2.
        precision: low, normal or high, several with commas; low computes in fp16 where the CPU has it.
        memory: low, normal or high, several with commas; low keeps int8 weights packed.
        queries: Timed inferences of each model in each config; fewer than 459 bound no P99.
        shape: Shape of a dynamic input, as NAME=1,3,224,224; repeatable for several inputs.
        preprocess: The record `preprocess` of a model card (JSON); adds the time from camera frame to class.
        samples: Write every single latency to this Parquet file.
        as_json: Print the result as JSON.
    """
    from tasks.bench import bench as run_bench
    from tasks.bench import parse_configs
    from tasks.bench_text import print_result
    from tasks.mnn.calibration import read_preprocess

    if not models:
        raise UserError("no model", allowed="one or more .mnn files", next_step="edgeloop bench model.mnn")
    result = run_bench(
        models,
        parse_configs(threads, precision, memory),
        queries=queries,
        shapes=shape,
        preprocess=read_preprocess(preprocess) if preprocess else None,
        samples=samples,
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    else:
        print_result(result)
    return 0


@app.command
def doctor(
    *,
    preprocess: Path | None = None,
    model: str | None = None,
    record: Path | None = None,
    images: int | None = None,
    tensor: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Say what is missing or wrong in this set-up, or in how images are prepared, and how to mend it.

    Args:
        preprocess: A folder of images, best as CLASS/IMAGE: look only at how a model wants images prepared,
            and name what is different.
        model: With `--preprocess`: an .mnn file, or a variant of the workspace. Default: its most accurate.
        record: With `--preprocess`: how your app prepares images: JSON, as `preprocess` in a model card.
            Default: what the model's card says.
        images: With `--preprocess`: how many to use at most. Default: 200.
        tensor: With `--preprocess IMAGE`: the input that an app made of this one image, as .npy; what the app
            did differently is read off it, and no model is asked.
        as_json: Print the findings as JSON.
    """
    from flows.doctor import report

    workspace = find_workspace(None)
    if preprocess is None:
        options = (("--model", model), ("--record", record), ("--images", images), ("--tensor", tensor))
        for option, value in options:
            if value is not None:
                raise UserError(
                    f"{option} without --preprocess",
                    allowed="with `--preprocess IMAGE_DIR`",
                    next_step="name the folder of images that the model is to be held against",
                )
        return report.run(workspace, as_json=as_json)
    if tensor is not None:
        from flows.doctor import tensor as one_tensor

        return one_tensor.run(workspace, preprocess, tensor, model=model, record=record, as_json=as_json)
    from flows.doctor import preprocess_page

    return preprocess_page.run(
        workspace, preprocess, model=model, record=record, images=images, as_json=as_json
    )


@app.command
def ui(*, port: int | None = None) -> int:
    """Show runs, models, reviews, flow runs and reports in the browser until Ctrl-C.

    Args:
        port: Port of the MLflow page on this machine. Default: the one it had last (5000 at first), or a free
            one when that is taken.
    """
    from flows.ui import serve

    return serve(find_workspace(None), port)


def _keep_stdout_for_results() -> None:
    """Give Python's stdout a descriptor of its own, and everybody else's stdout that of stderr."""
    sys.stdout.flush()
    results = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _print_failure(given: Sequence[str], message: str, code: int) -> None:
    """One JSON document on stdout however a `--json` command ends."""
    if "--json" in given:
        print(json.dumps({"ok": False, "error": message, "exit_code": code}, indent=1))


def _unforeseen(error: Exception) -> tuple[int, str]:
    """Print what nobody raised on purpose; its code and text.

    That is a full disk, a path that the system does not take, or a bug with its traceback.
    """
    if known := disk_full(error, repository()) or _unusable_path(error):
        print(f"edgeloop: {plain_lines(str(known))}", file=sys.stderr)
        return known.exit_code, str(known)
    traceback.print_exception(error)
    return EdgeloopError.exit_code, f"{type(error).__name__}: {error}"


_PATH_ERRORS = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
"""What the system says of a path that somebody gave, wherever it is used first."""


def _unusable_path(error: Exception) -> UserError | None:
    if not isinstance(error, OSError) or error.errno not in _PATH_ERRORS or error.filename is None:
        return None
    return UserError(
        f"{os.fsdecode(error.filename)}: {error.strerror}",
        allowed="a path of this system that this user may read, or write where something is written",
        next_step="check how it is spelled and whose it is: `ls -ld` says so",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every error edgeloop raises on purpose is one message and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _keep_stdout_for_results()
        as_ctrl_c()
    try:
        code = app(given, exit_on_error=False)
    except CycloptsError as error:  # cyclopts has printed what was wrong
        code = UserError.exit_code
        _print_failure(given, str(error), code)
    except EdgeloopError as error:
        code = error.exit_code
        _print_failure(given, str(error), code)
        print(f"edgeloop: {plain_lines(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        leave()
    except BrokenPipeError:  # the reader of our output has gone, as in `edgeloop build | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:  # noqa: BLE001  # a bug: Python's own exit code 1 would say that the gate refused
        code, message = _unforeseen(error)
        _print_failure(given, message, code)
    sys.stdout.flush()
    raise SystemExit(code if isinstance(code, int) else 0)
