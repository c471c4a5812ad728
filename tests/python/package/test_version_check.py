"""The import error with another version of torch than the extension was built with."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch_autobatch import _version_check

ROOT = Path(__file__).parents[3]


def setup_module_of(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Loads ``setup.py`` without running the build."""
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    spec = importlib.util.spec_from_file_location("autobatch_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VERSIONS = ["2.13.0+cpu", "2.12.1+cu130", "2.15.0", "2.11.0+cu130", "2.13.0+cpu.cxx11.abi"]


@pytest.mark.parametrize("version", VERSIONS)
def test_it_names_the_wheel_that_setup_makes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    setup = setup_module_of(monkeypatch)
    monkeypatch.setattr(setup, "torch_version", lambda: version)
    monkeypatch.setattr(_version_check.torch, "__version__", version)
    with pytest.raises(ImportError) as error:
        _version_check.check("2.10.0")
    assert f"ends in '{setup.local_version()}'" in str(error.value)
    _version_check.check(version)


def test_other_systems_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="builds on Linux only; this is win32"):
        setup_module_of(monkeypatch)
