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
        """From the cache, or fetched now. Raises FetchError."""
        folder = provided("engines")
        onnx, executorch = folder["com.github.asus4.onnxruntime"], folder["react-native-executorch"] / "package"
        return cls(
            onnx_classes=onnx / "classes.jar", onnx_natives=onnx / "jni",
            executorch_classes=executorch / "android" / "libs" / "classes.jar",
            executorch_natives=executorch / "third-party" / "android" / "libs" / "executorch",
        )  # fmt: skip

    @property
    def fbjni_natives(self) -> Path:
        """What ExecuTorch's natives need beside them: fetched for those who ship or run ExecuTorch alone."""
        return provided("fbjni")["react-native"] / "jni"

    @property
    def classes(self) -> list[Path]:
        """What code that uses the engines is compiled against."""
        return [self.onnx_classes, self.executorch_classes]


def build(tools: core.Toolchain, libraries: Libraries) -> Path:
    """The classes of `engines`."""
    needed = [core.build(tools), tools.android, tools.coroutines, *libraries.classes]
    flags = core.library_flags("outrider-engines")
    return core.compile_kotlin(tools, SOURCES / "main" / "kotlin", OUTPUT / "main", needed, *flags)


def build_tests(tools: core.Toolchain, libraries: Libraries) -> list[Path]:
    """The classpath that runs this part's test programs, without what runs the natives."""
    tests = core.build_tests(tools)
    needed = [build(tools, libraries), *libraries.classes, *tests]
    flags = (f"-Xfriend-paths={needed[0]},{core.build(tools)},{tests[0]}", core.ENGINE_API)
    return [core.compile_kotlin(tools, SOURCES / "test" / "kotlin", OUTPUT / "test", needed, *flags), *needed]
