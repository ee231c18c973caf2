"""Two builds from one source tree, Gradle's and the scripted one: neither may drift from the other.

Nobody runs Gradle here; these tests read its files.
"""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ElementTree
import zipfile

import pytest

import outrider
from android_demo.ci import aar, apk, apk_zip, app, core, engines
from android_demo.ci.pins import REPOSITORY as ROOT
from android_demo.ci.pins import needed_by, read_pins

PROJECT = ROOT / "android_demo"
ANDROID = "{http://schemas.android.com/apk/res/android}"
MODULES = ("core", "engines", "app")
CATALOG = tomllib.loads((PROJECT / "gradle" / "libs.versions.toml").read_text(encoding="utf-8"))
PINS = {pin.name: pin for pin in needed_by("core", read_pins())}


def script(module: str) -> str:
    """A module's Gradle script without comments."""
    return re.sub(r"//.*", "", (PROJECT / module / "build.gradle.kts").read_text(encoding="utf-8"))


def test_catalog_has_no_dangling_or_unused_names() -> None:
    scripts = "".join(script(module) for module in (*MODULES, "."))
    for name, row in [*CATALOG["libraries"].items(), *CATALOG["plugins"].items()]:
        assert row.get("version", {}).get("ref", "kotlin") in CATALOG["versions"], name
        assert re.search(rf"\blibs\.(plugins\.)?{name.replace('-', '.')}\b", scripts), f"{name} is not used"
    used = re.findall(r"\blibs\.((?:\w+\.)*\w+)", scripts)
    known = {name.replace("-", ".") for name in CATALOG["libraries"]}
    known |= {f"plugins.{name.replace('-', '.')}" for name in CATALOG["plugins"]}
    known |= {f"versions.{name}.get" for name in CATALOG["versions"]}
    assert set(used) <= known | {name.removesuffix(".get") for name in known}, set(used) - known
    assert len(used) > 15


def test_compiler_and_coroutines_are_the_same(tools: core.Toolchain) -> None:
    assert CATALOG["versions"]["kotlin"] == PINS["kotlin-compiler"].version
    level = CATALOG["versions"]["kotlinStdlib"].rpartition(".")[0]
    for module in ("core", "engines"):  # what apps compile against
        assert "coreLibrariesVersion = libs.versions.kotlinStdlib.get()" in script(module)
        for setting in ("languageVersion", "apiVersion"):
            assert f"{setting} = KotlinVersion.KOTLIN_{level.replace('.', '_')}" in script(module)
        assert "explicitApi()" in script(module)
    for module in MODULES:
        assert f'optIn.add("{core.ENGINE_API.partition("=")[2]}")' in script(module)
    assert {"-language-version", "-api-version", "-Xexplicit-api=strict", core.ENGINE_API, level} <= set(
        core.library_flags("any")
    )
    assert CATALOG["versions"]["kotlinStdlib"] == needed_by(f"kotlin-{level}", read_pins())[0].version
    assert PINS["junit5"].version.startswith(CATALOG["versions"]["junit"] + "-")
    marker = "META-INF/kotlinx_coroutines_core.version"
    with zipfile.ZipFile(tools.coroutines) as archive:
        assert archive.read(marker).decode().strip() == CATALOG["versions"]["coroutines"]


def test_onnx_runtime_is_the_same() -> None:
    libraries = engines.Libraries.fetched()
    version = CATALOG["versions"]["onnxruntime"].encode()
    for abi in apk.ABIS:
        assert version in (libraries.onnx_natives / abi / "libonnxruntime.so").read_bytes(), abi
    assert tuple(map(int, version.split(b"."))) < (1, 29), "from 1.29 on it sends telemetry unless told otherwise"


def test_every_path_in_gradle_files_is_there() -> None:
    """From the folder that Gradle resolves it in; `make` writes the bundle."""
    pattern = r'"((?:\.\./)+[^"]+|(?:[\w-]+/)+[\w.-]+|[\w-]+\.(?:pro|kts?|toml|jar|xml))"'
    found = {
        ((PROJECT if name.startswith("../") else PROJECT / module) / name).resolve()
        for module in (".", *MODULES)
        for name in re.findall(pattern, script(module))
    }
    assert found == {core.VECTORS, core.BUNDLE.resolve(), *apk.RULES}
    assert all(path.exists() for path in found - {core.BUNDLE.resolve()})


def test_modules_and_their_sources_are_the_same() -> None:
    settings = (PROJECT / "settings.gradle.kts").read_text(encoding="utf-8")
    assert re.findall(r'":(\w+)"', settings) == list(MODULES)
    assert re.search(r'project\(":core"\)', script("engines")) and re.search(r'project\(":engines"\)', script("app"))
    assert "`java-test-fixtures`" in script("core") and 'testFixtures(project(":core"))' in script("app")
    for module, sources in zip(MODULES, (core.SOURCES, engines.SOURCES, app.SOURCES), strict=True):
        assert sources == PROJECT / module / "src"  # Gradle's own default, which no script changes
        assert "sourceSets" not in re.sub(r'sourceSets\.(test|named\("test"\))', "", script(module))
        found = {path for path in sources.rglob("*") if path.suffix in (".kt", ".java")}
        assert found, module
        for path in found:
            kinds = ("main", "test", "testFixtures") if module == "core" else ("main", "test")
            assert path.relative_to(sources).parts[:2] in [(kind, "kotlin") for kind in kinds], path


def test_levels_and_names_are_the_same() -> None:
    for module in ("engines", "app"):
        for level in ("minSdk", "compileSdk"):
            assert re.search(rf"{level} = libs\.versions\.{level}\.get\(\)\.toInt\(\)", script(module)), (module, level)
    text = script("app")
    assert re.search(r"targetSdk = libs\.versions\.targetSdk\.get\(\)", text)
    assert re.search(r"versionCode = libs\.versions\.appVersionCode\.get\(\)", text)
    assert re.search(r"versionName = libs\.versions\.appVersion\.get\(\)", text)
    for name in ("namespace", "applicationId"):
        assert re.findall(rf'{name} = "(.*)"', text) == [apk.PACKAGE]
    assert CATALOG["versions"]["appVersion"] == outrider.__version__


def test_manifest_says_nothing_that_a_build_adds() -> None:
    root = ElementTree.parse(app.SOURCES / "main" / "AndroidManifest.xml").getroot()
    assert root.attrib == {} and root.find("uses-sdk") is None
    application = root.find("application")
    assert application is not None
    assert f"{ANDROID}extractNativeLibs" not in application.attrib and f"{ANDROID}debuggable" not in application.attrib
    permissions = [row.attrib[f"{ANDROID}name"] for row in root.iter("uses-permission")]
    assert permissions == ["android.permission.INTERNET", "android.permission.ACCESS_NETWORK_STATE"]
    assert list(PROJECT.glob("[ce]*/**/AndroidManifest.xml")) == [aar.MANIFEST]
    library = ElementTree.parse(aar.MANIFEST).getroot()  # Gradle merges it into the app's, the script does not
    assert library.attrib == {} and [row.tag for row in library] == ["uses-permission"]
    assert {row.attrib[f"{ANDROID}name"] for row in library} <= set(permissions)


def test_every_string_is_there_in_german() -> None:
    """With the same places for values."""
    english, german = (
        {
            row.attrib["name"]: row
            for row in ElementTree.parse(app.SOURCES / "main/res" / name / "strings.xml").getroot()
        }
        for name in ("values", "values-de")
    )
    wanted = {name for name, row in english.items() if row.get("translatable") != "false"}
    assert wanted == set(german) and len(wanted) > 40
    for name in wanted:
        places = [sorted(re.findall(r"%\d\$s", rows[name].text or "")) for rows in (english, german)]
        assert places[0] == places[1], name


def test_rules_and_packing_are_the_same() -> None:
    assert 'consumerProguardFiles("consumer-rules.pro")' in script("engines")
    rules = re.search(r"proguardFiles\((.*)\)", script("app"))
    assert rules and re.findall(r'"([\w-]+\.pro)"', rules[1]) == ["proguard-rules.pro"]
    assert [path.relative_to(PROJECT).as_posix() for path in apk.RULES] == [
        "engines/consumer-rules.pro", "app/proguard-rules.pro",
    ]  # fmt: skip
    stored = re.search(r"noCompress \+= listOf\((.*)\)", script("app"))
    assert stored
    for suffix in re.findall(r'"(\w+)"', stored[1]):
        assert apk_zip.alignment(f"assets/bundle/x.{suffix}") == 4, suffix
    for name in ("lib/arm64-v8a/libx.so", "resources.arsc"):
        assert apk_zip.alignment(name)
    assert not apk_zip.alignment("assets/bundle/tokenizer.json")
    assert "useLegacyPackaging = false" in script("app")  # the script: extractNativeLibs
    assert re.findall(r'abiFilters \+= .*getOrElse\("(.*?)"\)', script("app")) == list(apk.Kind().abis)


def test_wrapper_names_a_distribution_by_its_hash() -> None:
    text = (PROJECT / "gradle" / "wrapper" / "gradle-wrapper.properties").read_text(encoding="utf-8")
    assert re.search(r"^distributionSha256Sum=[0-9a-f]{64}$", text, re.M)
    assert re.search(
        r"^distributionUrl=https\\://services\.gradle\.org/distributions/gradle-[\d.]+-bin\.zip$", text, re.M
    )


def test_the_workflow_takes_the_wrappers_gradle() -> None:
    """It has never run, and says so."""
    workflow = (ROOT / ".github" / "workflows" / "android.yml").read_text(encoding="utf-8")
    wrapper = (PROJECT / "gradle" / "wrapper" / "gradle-wrapper.properties").read_text(encoding="utf-8")
    assert workflow.startswith("# Never run") and "name: android (never run)" in workflow
    assert re.findall(r'GRADLE_VERSION: "([\d.]+)"', workflow) == re.findall(r"gradle-([\d.]+)-bin", wrapper)
    assert set(re.findall(r"working-directory: (\S+)", workflow)) == {PROJECT.name}
    assert f"{apk.PACKAGE}/.ChatActivity" in workflow
    patterns = re.findall(r'"([\w./-]+?)(?:/\*\*)?"', re.findall(r"paths: \[(.*)\]", workflow)[0])
    assert len(patterns) == 3 and all((ROOT / pattern).exists() for pattern in patterns)


@pytest.mark.parametrize("name", ["dev/outrider/app", "dev/outrider/app/chat"])
def test_files_are_short_and_logic_knows_no_android(name: str) -> None:
    files = sorted((app.SOURCES / "main" / "kotlin" / name).glob("*.kt"))
    assert len(files) > 5
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 300 and max(map(len, lines)) <= 120, file
        if name.endswith("chat"):
            assert not any(line.startswith("import android") for line in lines), file
