"""The TUF repository over HTTP: by ETag, in ranges, and nothing else of the disk."""

import hashlib
import os

import gateway_kit as kit
import pytest

ROOT_JSON = b'{"signed": {"_type": "root"}}'
TARGET = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    tuf = folder / "tuf"
    for name in ("metadata", "targets/files", "keys"):
        (tuf / name).mkdir(parents=True)
    (tuf / "metadata" / "1.root.json").write_bytes(ROOT_JSON)
    (tuf / "targets" / "files" / "model").write_bytes(TARGET)
    (tuf / "targets" / "empty").write_bytes(b"")
    (tuf / "targets" / "link").symlink_to(tuf / "metadata" / "1.root.json")
    (tuf / "targets" / "folder").symlink_to(tuf / "metadata")
    os.mkfifo(tuf / "targets" / "pipe")
    (tuf / "keys" / "secret").write_text("secret")
    (folder / "outside").write_text("outside")
    with kit.gateway(folder / "state", repository=tuf, compact_every_s=0) as started:
        yield started, tuf


def _get(running, path, **headers):
    return kit.Client(running[0].port).send(
        "GET", f"/repository/{path}", headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def test_a_file_comes_with_its_hash(running):
    """The strong ETag is the content's SHA-256; who has it gets 304 without a body."""
    answer = _get(running, "metadata/1.root.json")
    etag = f'"{hashlib.sha256(ROOT_JSON).hexdigest()}"'
    assert (answer.status, answer.body, answer.headers["etag"]) == (200, ROOT_JSON, etag)
    for condition in (etag, f'"other", {etag}', "*"):
        again = _get(running, "metadata/1.root.json", If_None_Match=condition)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    assert _get(running, "metadata/1.root.json", If_None_Match='"other"').status == 200
    assert _get(running, "targets/empty").body == b""


def test_other_content_has_another_etag(running):
    """A file that was replaced, as TUF's metadata are, is served anew at once."""
    file = running[1] / "metadata" / "timestamp.json"
    tags = []
    for content in (b'{"version": 1}', b'{"version": 2}'):
        file.with_suffix(".new").write_bytes(content)
        file.with_suffix(".new").replace(file)
        answer = _get(running, "metadata/timestamp.json", If_None_Match=tags[-1] if tags else "none")
        assert answer.body == content
        tags.append(answer.headers["etag"])
    assert tags[0] != tags[1]


@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [("bytes=0-9", 0, 10), ("bytes=100-", 100, len(TARGET)), ("bytes=-7", len(TARGET) - 7, len(TARGET))],
)
def test_a_download_can_be_resumed(running, asked, first, end):
    """A range is exactly these bytes, and says which."""
    answer = _get(running, "targets/files/model", Range=asked)
    assert (answer.status, answer.body) == (206, TARGET[first:end])
    assert answer.headers["content-range"] == f"bytes {first}-{end - 1}/{len(TARGET)}"
    assert _get(running, "targets/files/model", Range=asked, If_Range='"old"').body == TARGET


def test_a_range_that_is_not_there_is_refused(running):
    """Behind the end: 416. Several ranges or another unit: the whole file, as RFC 9110 allows."""
    assert _get(running, "targets/files/model", Range=f"bytes={len(TARGET)}-").code == "range"
    for asked in ("bytes=0-1,5-6", "lines=0-1", "bytes=-"):
        assert _get(running, "targets/files/model", Range=asked).body == TARGET


@pytest.mark.parametrize(
    "path",
    [
        *("", "metadata", "metadata/", "metadata/absent.json", "keys/secret", "../outside", "targets/link"),
        *(
            "targets/folder/1.root.json",
            "targets/../keys/secret",
            "targets/%2e%2e/keys/secret",
            "targets/pipe",
        ),
        *(
            "targets//files/model",
            "%2fetc/passwd",
            "targets/files/model%00.txt",
            "targets/.hidden",
            "targets/files",
        ),
    ],
)
def test_nothing_else_is_served(running, path):
    """Other folders, parents, links, pipes and folders do not exist for a client."""
    answer = _get(running, path)
    assert (answer.status, answer.code) == (404, "not_found")


def test_a_gateway_without_repository_has_no_files(tmp_path):
    """404, and the page says that there is no policy."""
    with kit.gateway(tmp_path / "state") as started:
        client = kit.Client(started.port)
        assert client.send("GET", "/repository/metadata/root.json").status == 404
        assert "The repository holds no policy" in client.send("GET", "/").body.decode()
