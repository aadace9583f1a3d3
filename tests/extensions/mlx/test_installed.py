"""An engine of an extension is installed where its library is."""

from harness.engines import adapter, engine_names


def test_an_engine_whose_library_is_missing_is_not_called_installed(monkeypatch):
    asked = []
    monkeypatch.setattr(adapter, "find_spec", lambda library: asked.append(library) or (library != "mlx_lm") or None)
    assert set(engine_names()) - set(adapter.installed_engine_names()) == {"mlx"}
    assert {"llama_cpp", "vllm"} <= set(asked)
