"""The store: what arrives is what was sent, and a store that fails for a while is asked again."""

import time

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite import store as store_module
from harness.extensions.suite.store import DamagedBlobError, Store, digest_of, fetch_goldens, share_golden


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    return path


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    url = str(tmp_path / "store") if request.param == "folder" else f"memory://{tmp_path.name}"
    store = Store(url, patience_s=0.0)
    store.check()
    return store


def damage(store, digest, content=b"other"):
    store._files.pipe_file(store._path(digest), content)


def test_a_file_arrives_as_it_was_sent(store, file, tmp_path):
    digest = store.put(file)
    store.get(digest, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    assert digest == digest_of(file)


def test_what_is_there_is_not_written_again(store, file, monkeypatch):
    digest = store.put(file)
    monkeypatch.setattr(store._files, "put_file", None)
    assert store.put(file) == digest


@pytest.mark.parametrize("content", [b"", b"content", b"c0ntent" * 1000])
def test_what_was_damaged_does_not_arrive_and_is_written_anew(store, file, tmp_path, content):
    digest = store.put(file)
    damage(store, digest, content)
    with pytest.raises(DamagedBlobError):
        store.get(digest, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    store.put(file)
    store.get(digest, tmp_path / "back")


def test_what_is_not_there_is_said_at_once(store, tmp_path):
    with pytest.raises(DamagedBlobError, match="has no"):
        store.get("0" * 64, tmp_path / "back")


def failing(store, monkeypatch, times):
    """Have the store fail so many times."""
    put, left = store._files.put_file, [times]

    def put_file(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise ConnectionError("away")
        return put(*arguments, **options)

    monkeypatch.setattr(store._files, "put_file", put_file)
    monkeypatch.setattr(store_module, "_FIRST_WAIT_S", 0.001)


def test_a_store_that_fails_for_a_while_is_asked_again(store, file, monkeypatch, tmp_path):
    failing(store, monkeypatch, 3)
    store._patience_s = 30.0
    store.get(store.put(file), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.read_bytes()


def test_patience_has_an_end(store, file, monkeypatch):
    failing(store, monkeypatch, 1_000_000)
    store._patience_s = 0.05
    begin = time.monotonic()
    with pytest.raises(HarnessError, match="ConnectionError: away") as caught:
        store.put(file)
    assert caught.value.code is Code.STORE_FAILED
    assert time.monotonic() - begin >= 0.01


def test_nothing_is_left_of_a_write_that_failed(tmp_path, file, monkeypatch):
    store = Store(str(tmp_path / "store"), patience_s=0.0)
    store.check()
    monkeypatch.setattr(store_module.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(HarnessError, match="no space"):
        store.put(file)
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("url", ["no-such-protocol://bucket/folder", "/proc/version/store"])
def test_a_store_that_cannot_be_used_is_said_before_anything_runs(url):
    with pytest.raises(HarnessError) as caught:
        Store(url, patience_s=0.0).check()
    assert caught.value.code is Code.STORE_FAILED
    assert url in str(caught.value)


def test_a_full_store_is_said(tmp_path, monkeypatch):
    store = Store(str(tmp_path / "store"))

    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._files, "pipe_file", full)
    with pytest.raises(HarnessError, match="No space left"):
        store.check()


def test_a_golden_travels_from_one_cache_into_another(store, tmp_path, monkeypatch):
    made = tmp_path / "one" / "goldens" / "name"
    made.mkdir(parents=True)
    for name in ("golden.json", "step-0.safetensors"):
        (made / name).write_text(name)
    stored = share_golden(made, store)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
    fetch_goldens([stored], store)
    arrived = tmp_path / "other" / "goldens" / "name"
    assert {path.name: path.read_text() for path in arrived.iterdir()} == {
        name: name for name in ("golden.json", "step-0.safetensors")
    }
    damage(store, stored.index)
    fetch_goldens([stored], store)  # it is there: nothing is read


def test_of_a_golden_that_does_not_arrive_whole_nothing_is_put_into_the_cache(store, tmp_path, monkeypatch):
    made = tmp_path / "goldens" / "name"
    made.mkdir(parents=True)
    (made / "golden.json").write_text("{}")
    stored = share_golden(made, store)
    damage(store, digest_of(made / "golden.json"))
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
    with pytest.raises(DamagedBlobError):
        fetch_goldens([stored], store)
    assert list((tmp_path / "other" / "goldens").iterdir()) == []
