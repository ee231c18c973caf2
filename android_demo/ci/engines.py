"""The pinned libraries of both engines, and android_demo/engines compiled against them and Android's own API."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from android_demo.ci import core
from android_demo.ci.pins import REPOSITORY
from android_demo.ci.store import provided

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

    @classmethod
    def fetched(cls) -> Libraries:
        """Return them from the cache, or fetch them now. Raises FetchError."""
        folder = provided("engines")
        onnx, executorch = folder["com.github.asus4.onnxruntime"], folder["react-native-executorch"] / "package"
        return cls(
            onnx_classes=onnx / "classes.jar", onnx_natives=onnx / "jni",
            executorch_classes=executorch / "android" / "libs" / "classes.jar",
            executorch_natives=executorch / "third-party" / "android" / "libs" / "executorch",
        )  # fmt: skip

    @property
    def fbjni_natives(self) -> Path:
        """Further natives that ExecuTorch's need: fetched only to ship or run ExecuTorch."""
        return provided("fbjni")["react-native"] / "jni"

    @property
    def classes(self) -> list[Path]:
        """The classes that code using the engines is compiled against."""
        return [self.onnx_classes, self.executorch_classes]


def build(tools: core.Toolchain, libraries: Libraries) -> Path:
    """Return the classes of `engines`."""
    needed = [core.build(tools), tools.android, tools.coroutines, *libraries.classes]
    flags = core.library_flags("outrider-engines")
    return core.compile_kotlin(tools, SOURCES / "main" / "kotlin", OUTPUT / "main", needed, *flags)


def build_tests(tools: core.Toolchain, libraries: Libraries) -> list[Path]:
    """Return the classpath that runs this part's test programs, without the JVM's natives."""
    tests = core.build_tests(tools)
    needed = [build(tools, libraries), *libraries.classes, *tests]
    flags = (f"-Xfriend-paths={needed[0]},{core.build(tools)},{tests[0]}", core.ENGINE_API)
    return [core.compile_kotlin(tools, SOURCES / "test" / "kotlin", OUTPUT / "test", needed, *flags), *needed]
