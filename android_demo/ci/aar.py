"""Build the library as one AAR, the jar for an app's own tests, and for each the POM with its dependencies."""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from android_demo.ci import apk_zip, core, engines
from android_demo.ci.core import PROJECT, versions
from android_demo.ci.pins import REPOSITORY

OUTPUT = REPOSITORY / "build" / "android"
GROUP, NAME, TESTING = "dev.outrider", "outrider", "outrider-testing"
#: artifacts in a Maven repository, and their packaging
ARTIFACTS = {NAME: "aar", TESTING: "jar"}
#: package of the library's resources and manifest; an app must use another
NAMESPACE = "dev.outrider"
MANIFEST = PROJECT / "engines" / "src" / "main" / "AndroidManifest.xml"
RULES = PROJECT / "engines" / "consumer-rules.pro"
#: metadata that Android's plugin writes into an AAR: any plugin and any compileSdk may use it
METADATA = """aarFormatVersion=1.0
aarMetadataVersion=1.0
minCompileSdk=1
minCompileSdkExtension=0
minAndroidGradlePluginVersion=1.0.0
coreLibraryDesugaringEnabled=false
"""
#: group, name, version's key in Gradle's catalog, scope, type, optional
DEPENDENCIES = (
    ("org.jetbrains.kotlin", "kotlin-stdlib", "kotlinStdlib", "compile", "", False),
    ("org.jetbrains.kotlinx", "kotlinx-coroutines-core", "coroutines", "compile", "", False),
    ("com.microsoft.onnxruntime", "onnxruntime-android", "onnxruntime", "runtime", "aar", False),
    ("org.pytorch", "executorch-android", "executorch", "runtime", "aar", True),
)


def build(folder: Path = OUTPUT) -> Path:
    """Build `outrider-VERSION.aar` and `outrider-testing-VERSION.jar` in `folder`, each with its POM beside it.

    They are the same bytes every time.

    Raises FetchError or BuildError.
    """
    tools = core.Toolchain.fetched()
    classes = [core.build(tools), engines.build(tools, engines.Libraries.fetched())]
    folder.mkdir(parents=True, exist_ok=True)
    contents = {NAME: content(classes), TESTING: testing(core.build_fixtures(tools))}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".aar-") as aside:
        for name, entries in contents.items():
            made = Path(aside) / name
            apk_zip.write(made, entries)
            file(folder, name, "pom").write_bytes(pom(name))
            made.replace(file(folder, name))
    return file(folder, NAME)


def file(folder: Path, name: str, suffix: str = "") -> Path:
    """Return the path of an artifact, or of its POM, in `folder`."""
    return folder / f"{name}-{versions()['appVersion']}.{suffix or ARTIFACTS[name]}"


def install(folder: Path, repository: Path) -> Path:
    """Copy the artifacts in `folder` to their places in a Maven repository in a folder; return the group's place."""
    group = repository.joinpath(*GROUP.split("."))
    for name in ARTIFACTS:
        place = group / name / versions()["appVersion"]
        place.mkdir(parents=True, exist_ok=True)
        for source in (file(folder, name), file(folder, name, "pom")):
            part = place / f"{source.name}.part"
            shutil.copyfile(source, part)
            for algorithm in ("sha1", "sha256"):
                digest = hashlib.new(algorithm, source.read_bytes()).hexdigest()
                (place / f"{source.name}.{algorithm}").write_text(digest, encoding="ascii")
            part.replace(place / source.name)
    return group


def content(classes: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the AAR's files. classes: the folders that make up its classes.jar."""
    yield "AndroidManifest.xml", manifest()
    yield "R.txt", b""
    yield "META-INF/com/android/build/gradle/aar-metadata.properties", METADATA.encode()
    yield "META-INF/LICENSE", (REPOSITORY / "LICENSE").read_bytes()
    yield "proguard.txt", RULES.read_bytes()
    jar = io.BytesIO()
    apk_zip.write(jar, _class_files(classes), level=0)  # the AAR compresses all classes together, which takes less
    yield "classes.jar", jar.getvalue()


def testing(classes: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in the jar for an app's tests."""
    yield "META-INF/LICENSE", (REPOSITORY / "LICENSE").read_bytes()
    yield from _class_files([classes])


def manifest() -> bytes:
    """Return the library's manifest with the additions of Gradle's plugin: package and oldest supported Android."""
    source = MANIFEST.read_text(encoding="utf-8")
    opened = source.replace("<manifest ", f'<manifest package="{NAMESPACE}" ', 1)
    level = f'\n    <uses-sdk android:minSdkVersion="{versions()["minSdk"]}" />\n'
    return opened.replace("</manifest>", f"{level}</manifest>").encode()


def pom(name: str) -> bytes:
    """Return an artifact's Maven description: of the library with ExecuTorch as an optional engine."""
    version = versions()
    needs = DEPENDENCIES if name == NAME else ((GROUP, NAME, "appVersion", "compile", "aar", False),)
    root = ElementTree.Element("project", {"xmlns": "http://maven.apache.org/POM/4.0.0"})
    about = {
        "modelVersion": "4.0.0", "groupId": GROUP, "artifactId": name, "version": version["appVersion"],
        "packaging": ARTIFACTS[name], "name": "Outrider" if name == NAME else "Outrider's fakes for tests",
        "description": "An on-device LLM runtime that drafts on the device and is verified in the cloud",
    }  # fmt: skip
    for key, value in about.items():
        ElementTree.SubElement(root, key).text = value
    licence = ElementTree.SubElement(ElementTree.SubElement(root, "licenses"), "license")
    ElementTree.SubElement(licence, "name").text = "Apache-2.0"
    needed = ElementTree.SubElement(root, "dependencies")
    for group, artifact, key, scope, kind, optional in needs:
        row = ElementTree.SubElement(needed, "dependency")
        fields = {"groupId": group, "artifactId": artifact, "version": version[key], "type": kind, "scope": scope,
                  "optional": "true" if optional else ""}  # fmt: skip
        for field, value in fields.items():
            if value:
                ElementTree.SubElement(row, field).text = value
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _class_files(classes: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield compiled classes and the Kotlin compiler's metadata of them."""
    for folder in classes:
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix in (".class", ".kotlin_module"):
                yield path.relative_to(folder).as_posix(), path.read_bytes()
