"""The pinned libraries of both engines, and android_demo/engines compiled against them and Android's own API."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from android_demo.ci import core
from android_demo.ci.pins import REPOSITORY, Pin, cache_folder, needed_by, read_pins, unpacked

SOURCES = REPOSITORY / "android_demo" / "engines" / "src"
OUTPUT = REPOSITORY / "build" / "android" / "engines"


@dataclass(frozen=True)
class Libraries:
    """Java classes and natives of ONNX Runtime and ExecuTorch, as an app ships them.

    *_natives: folders with one folder per ABI.
    """

    onnx_classes: Path
    onnx_natives: Path
    executorch_classes: Path
    executorch_natives: Path
    fbjni_natives: Path

    @classmethod
    def fetched(cls) -> Libraries:
        """From the cache, or fetched now. Raises FetchError."""
        cache = cache_folder()
        pins = {pin.name: pin for pin in needed_by("engines", read_pins())}
        folder = {name: unpacked(pin, cache) / "package" for name, pin in pins.items()}
        onnx, native = "com.github.asus4.onnxruntime", "react-native"
        onnx_aar = _opened(pins[onnx], folder[onnx] / "Plugins" / "Android" / "onnxruntime.aar")
        made = f"{native}-{pins[native].version}"
        aars = folder[native] / "android" / "com" / "facebook" / "react" / native / pins[native].version
        native_aar = _opened(pins[native], aars / f"{made}-release.aar")
        executorch = folder["react-native-executorch"]
        return cls(
            onnx_classes=onnx_aar / "classes.jar", onnx_natives=onnx_aar / "jni",
            executorch_classes=executorch / "android" / "libs" / "classes.jar",
            executorch_natives=executorch / "third-party" / "android" / "libs" / "executorch",
            fbjni_natives=native_aar / "jni",
        )  # fmt: skip

    @property
    def classes(self) -> list[Path]:
        """What code that uses the engines is compiled against."""
        return [self.onnx_classes, self.executorch_classes]


def build(tools: core.Toolchain, libraries: Libraries) -> Path:
    """The classes of `engines`. No JDK on the classpath: what compiles uses nothing that Android lacks."""
    needed = [core.build(tools), tools.android, tools.coroutines, *libraries.classes]
    return core.compile_kotlin(tools, SOURCES / "main" / "kotlin", OUTPUT / "main", needed, "-no-jdk")


def build_tests(tools: core.Toolchain, libraries: Libraries) -> list[Path]:
    """The classpath that runs this part's test programs, without what runs the natives."""
    needed = [build(tools, libraries), *libraries.classes, *core.build_tests(tools)]
    flags = f"-Xfriend-paths={needed[0]},{core.build(tools)}"
    return [core.compile_kotlin(tools, SOURCES / "test" / "kotlin", OUTPUT / "test", needed, flags), *needed]


def _opened(pin: Pin, aar: Path) -> Path:
    """The content of an AAR of `pin`, unpacked once beside the pin's own."""
    folder = cache_folder() / f"{pin.name}-{pin.version}-{pin.sha256[:8]}-{aar.stem}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".unpack-") as aside:
            content = Path(aside) / "content"
            shutil.unpack_archive(aar, content, "zip")
            content.replace(folder)
    return folder
