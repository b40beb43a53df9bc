"""Presets: the models' published numbers, found from a source tree and from an installed package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coordinator import presets
from coordinator.errors import ConfigError
from coordinator.layout import Extra, Layout
from coordinator.presets import load, names

ROOT = Path(__file__).parents[2]

#: Bytes of KV cache for each token, over all layers and heads, as is well known.
TOKEN_BYTES = {
    "Llama-3.1-8B": 32 * 2 * 8 * 128 * 2,  # 128 KiB
    "Llama-3.3-70B": 80 * 2 * 8 * 128 * 2,  # 320 KiB
    "Qwen3-235B-A22B": 94 * 2 * 4 * 128 * 2,  # 188 KiB
    "DeepSeek-V3": 61 * (512 + 64) * 2,  # 68.6 KiB
}


def test_the_presets_are_those_of_the_files() -> None:
    assert names() == sorted(TOKEN_BYTES)


@pytest.mark.parametrize(("name", "token_bytes"), TOKEN_BYTES.items())
def test_each_token_takes_what_the_model_says(name: str, token_bytes: int) -> None:
    layout = load(name)
    layout.check(1)
    assert layout.pool_bytes(1, 1) == token_bytes * layout.page_tokens
    # A latent is whole on every rank.
    assert layout.pool_bytes(1, 8) * 8 == token_bytes * layout.page_tokens * {"latent": 8}.get(
        layout.kv, max(1, 8 // layout.kv_heads)
    )


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'layers = 4\nkv_heads = 2\nhead_size = 64\ndtype = "float8_e4m3"\npage_tokens = 1\n'
        'stages = [3, 1]\nextras = [["k_scale", 1, "float32"]]\n'
    )
    assert load(str(path), 1).stages == ()
    assert load(str(path), 2).stages == (2, 2)
    assert load(str(path)) == Layout(
        4, 1, 2, 64, "float8_e4m3", "apart", (3, 1), (Extra("k_scale", 1, "float32"),)
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layers = 4\n", "missing required field"),
        ("layer = 4\n", "unknown field `layer`"),
        ('layers = "4"\n', r"Expected `int`, got `str` - at `\$.layers`"),
        ('layers = 4\nkv = "inside"\n', r"Invalid enum value 'inside' - at `\$.kv`"),
        ("layers = \n", "Invalid value"),
        ('extras = [["a b", 1, "int8"]]\n', r"at `\$.extras\[0\]\[0\]`"),
    ],
)
def test_a_file_that_says_no_layout_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: .*{told}"):
        load(str(path))


@pytest.mark.parametrize("name", ["Llama", "../local", "configs/layouts/Llama-3.1-8B", ""])
def test_what_is_no_preset_is_refused_naming_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no layout {name!r}: .*DeepSeek-V3, Llama-3.1-8B"):
        load(name)
    with pytest.raises(ConfigError, match=r"no\.toml: cannot be read: No such file"):
        load("no.toml")


@pytest.mark.parametrize("text", ["layers = " + "[" * 5000, "layers = " + "1" * 5000])
def test_a_file_that_no_reader_gets_through_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "endless.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: "):
        load(str(path))


@pytest.mark.parametrize(("stages", "cut"), [(1, ()), (2, (31, 30)), (4, (16, 15, 15, 15))])
def test_stages_differ_by_one_layer_at_most(stages: int, cut: tuple[int, ...]) -> None:
    layout = load("DeepSeek-V3", stages)
    assert layout.stages == cut
    layout.check(2 * stages)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="61 layers cannot be cut into 62 pipeline stages"):
        load("DeepSeek-V3", 62)


def test_an_installed_package_has_them_too(tmp_path: Path) -> None:
    """What is built from the project file has the presets where they are looked for."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "backends", "coordinator", "configs"):
        (tree / name).symlink_to(ROOT / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv.pop())"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = tmp_path / "site"
    code = "from coordinator import presets; print(presets.__file__, presets.load('DeepSeek-V3').layers)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={"PYTHONPATH": str(site)}, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert found == [str(site / "coordinator" / "presets.py"), "61"]
    assert Path(presets.__file__).parent == ROOT / "coordinator"
