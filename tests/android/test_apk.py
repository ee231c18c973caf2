"""The signed APK: what Android will check, and what we promise of it."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest

from android_demo.ci import apk, apk_zip, core, signing
from android_demo.ci.engines import Libraries
from tests.android import elf

#: with the default bundle inside, for one ABI
MOST_BYTES = 60_000_000
#: what every Android has
SYSTEM = {"libc.so", "libm.so", "libdl.so", "liblog.so", "libandroid.so"}
MACHINES = {"arm64-v8a": elf.AARCH64, "x86_64": elf.X86_64}
#: 16 KB pages want segments of as much; ExecuTorch's own dependency is older than those
SMALL_PAGES = {"libfbjni.so", "libc++_shared.so"}

pytestmark = pytest.mark.skipif(not (core.BUNDLE / "manifest.json").is_file(), reason="no build/bundle; run: make")


@pytest.fixture(scope="module")
def apk_tools() -> apk.Tools:
    return apk.Tools.fetched()


@pytest.fixture(scope="module")
def built() -> Path:
    return apk.build(apk.Kind())


def test_it_is_signed_and_one_flipped_byte_breaks_that(apk_tools: apk.Tools, built: Path, tmp_path: Path) -> None:
    said = signing.verify(apk_tools.apksigner, built)
    assert re.search(r"Verified using v2 scheme.*: true", said) and "WARNING" not in said
    content = bytearray(built.read_bytes())
    broken = tmp_path / "broken.apk"
    for name in ("classes.dex", "assets/bundle/drafter.onnx", "lib/arm64-v8a/libonnxruntime.so"):
        place = apk_zip.offsets(built)[name][0] + 1000
        content[place] ^= 1
        broken.write_bytes(content)
        with pytest.raises(core.BuildError, match="DOES NOT VERIFY"):
            signing.verify(apk_tools.apksigner, broken)
        content[place] ^= 1


def test_files_lie_where_android_maps_them(built: Path) -> None:
    offsets = apk_zip.offsets(built)
    for name, (offset, stored) in offsets.items():
        wanted = 16384 if name.endswith(".so") else 4 if name == "resources.arsc" else 0
        assert not wanted or (stored and offset % wanted == 0), name
    for name in ("drafter.onnx", "drafter.onnx.data"):
        assert offsets[f"assets/bundle/{name}"][1], f"{name} is compressed"
    assert built.stat().st_size <= MOST_BYTES


def test_a_zip_that_android_cannot_map_is_noticed(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.apk", tmp_path / "bad.apk"
    names = ("lib/arm64-v8a/libx.so", "resources.arsc", "a", "assets/bundle/x.onnx")
    apk_zip.write(good, [(name, name.encode() * 50) for name in names])
    assert apk_zip.misplaced(good) == []
    with zipfile.ZipFile(bad, "w") as archive:
        for name in names:
            archive.writestr(name, name.encode() * 50)
        archive.writestr("assets/bundle/y.onnx", b"y" * 50, zipfile.ZIP_DEFLATED)
    assert {"lib/arm64-v8a/libx.so", "assets/bundle/y.onnx"} <= set(apk_zip.misplaced(bad))


def test_it_ships_the_bundle_and_nothing_else(built: Path) -> None:
    files = json.loads((core.BUNDLE / "manifest.json").read_text(encoding="utf-8"))["files"]
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        assert {name for name in names if name.startswith("assets/")} == {
            f"assets/bundle/{name}" for name in [*files, "manifest.json"]
        }
        for name, entry in files.items():
            assert hashlib.sha256(archive.read(f"assets/bundle/{name}")).hexdigest() == entry["sha256"], name
    assert {name.split("/")[1] for name in names if name.startswith("lib/")} == {"arm64-v8a"}
    rest = {name for name in names if not name.startswith(("assets/", "lib/", "res/", "META-INF/"))}
    assert rest == {"AndroidManifest.xml", "classes.dex", "resources.arsc"}


def test_manifest(apk_tools: apk.Tools, built: Path) -> None:
    said = core.run([apk_tools.aapt2, "dump", "badging", built])
    level = core.versions()
    assert f"package: name='{apk.PACKAGE}' versionCode='{level['appVersionCode']}'" in said
    assert re.findall(r"uses-permission: name='(.*?)'", said) == [
        "android.permission.INTERNET", "android.permission.ACCESS_NETWORK_STATE",
    ]  # fmt: skip
    assert f"\nsdkVersion:'{level['minSdk']}'" in said and f"targetSdkVersion:'{level['targetSdk']}'" in said
    assert f"launchable-activity: name='{apk.PACKAGE}.ChatActivity'" in said
    assert "application-debuggable" not in said
    tree = core.run([apk_tools.aapt2, "dump", "xmltree", built, "--file", "AndroidManifest.xml"])
    for attribute in ("allowBackup", "extractNativeLibs"):
        assert re.search(rf":{attribute}\(.*\)=false", tree), attribute
    exported = re.findall(r":exported\(.*\)=(\w+)", tree)
    assert exported == ["true", "false"]
    assert "usesCleartextTraffic" not in tree and "E: provider" not in tree and "E: receiver" not in tree
    rules = core.run([apk_tools.aapt2, "dump", "xmltree", built, "--file", "res/xml/network_security_config.xml"])
    base, local = rules.split("E: domain-config")
    assert "cleartextTrafficPermitted=false" in base and "cleartextTrafficPermitted=true" in local
    assert set(re.findall(r"T: '(.*?)'", local)) == {"localhost", "127.0.0.1", "10.0.2.2"}


def test_code_keeps_what_is_looked_up_by_name(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        code = archive.read("classes.dex")
    assert code[:4] == b"dex\n"
    named = ["ai/onnxruntime/OnnxTensor", "ai/onnxruntime/OrtEnvironment"]
    for name in [*named, *(f"dev/outrider/app/{name}" for name in ("OutriderApp", "ChatActivity", "SettingsActivity"))]:
        assert f"L{name};".encode() in code, name
    assert b"Lorg/pytorch/executorch/Tensor$Tensor_float32;" not in code, "ExecuTorch is shipped by a flag alone"
    assert b"events.data.microsoft.com" not in code


@pytest.mark.parametrize("abi", apk.ABIS)
@pytest.mark.parametrize("executorch", [False, True])
def test_natives_are_complete_and_fit_the_processor(abi: str, executorch: bool) -> None:
    kind = apk.Kind((abi,), executorch)
    shipped = {Path(name).name: data for name, data in apk.natives(Libraries.fetched(), kind)}
    assert ("libexecutorch.so" in shipped) == executorch
    for name, data in shipped.items():
        library = elf.read(data)
        assert library.machine == MACHINES[abi], name
        assert set(library.needed) <= SYSTEM | set(shipped), (name, library.needed)
        assert library.pages >= (4096 if name in SMALL_PAGES else apk_zip.PAGE), name
        assert b"events.data.microsoft.com" not in data, name


def test_layouts_are_accessible() -> None:
    """Every button is 48dp or more, text grows with the user's setting, nothing knows left from right."""
    files = sorted((apk.SOURCES / "main" / "res").rglob("*.xml"))
    assert len(files) > 10
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r'textSize(">|=")\d+(dp|px|dip)', text), file
        assert not re.search(r"android:\w*(Left|Right)=", text), file
        for tag in re.findall(r"<(?:Button|EditText|CheckBox|RadioButton|Switch)\b.*?/>", text, re.DOTALL):
            assert 'minHeight="48dp"' in tag or re.search(r'style="@style/(Action|Field|Choice)"', tag), tag
            assert re.search(r"android:(text|hint|contentDescription)=\"@string/", tag) or "labelFor" in text, tag
        assert not re.search(r'android:(text|hint|contentDescription|label)="[^@]', text), (
            f"{file}: words in the layout"
        )
    styles = (apk.SOURCES / "main" / "res" / "values" / "styles.xml").read_text(encoding="utf-8")
    for name in ("Action", "Field", "Choice"):
        style = re.search(rf'<style name="{name}".*?</style>', styles, re.DOTALL)
        assert style and '"android:minHeight">48dp' in style[0], name


@pytest.mark.parametrize("folder", ["values", "values-night"])
def test_colours_can_be_read(folder: str) -> None:
    text = (apk.SOURCES / "main" / "res" / folder / "colors.xml").read_text(encoding="utf-8")
    colours = dict(re.findall(r'name="(\w+)">#FF(\w{6})<', text))

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name in ("text", "faint", "accent", "provisional", "kept", "withdrawn"):
        for ground in ("background", "surface"):
            low, high = sorted((light(colours[name]), light(colours[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)
