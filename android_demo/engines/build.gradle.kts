import org.jetbrains.kotlin.gradle.dsl.KotlinVersion

plugins {
    alias(libs.plugins.android.library)
}

android {
    namespace = "dev.outrider.engines"
    compileSdk = libs.versions.compileSdk.get().toInt()
    defaultConfig {
        minSdk = libs.versions.minSdk.get().toInt()
        consumerProguardFiles("consumer-rules.pro")
    }
    // src/test is run from Python (tests/android/test_kotlin_engines.py) and reads core's internals.
    sourceSets.named("test") { kotlin.directories.clear() }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_11
        targetCompatibility = JavaVersion.VERSION_11
    }
}

kotlin {
    explicitApi()
    coreLibrariesVersion = libs.versions.kotlinStdlib.get()
    compilerOptions {
        languageVersion = KotlinVersion.KOTLIN_2_1
        apiVersion = KotlinVersion.KOTLIN_2_1
        freeCompilerArgs.add("-Xsuppress-version-warnings")
        optIn.add("dev.outrider.core.protocol.EngineApi")
    }
}

dependencies {
    api(project(":core"))
    // Which of the two an app ships is the app's choice; openEngine finds out.
    compileOnly(libs.onnxruntime.android)
    compileOnly(libs.executorch.android)
}
