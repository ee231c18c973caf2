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
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_11
        targetCompatibility = JavaVersion.VERSION_11
    }
}

dependencies {
    api(project(":core"))
    // Which of the two an app ships is the app's choice; openEngine finds out.
    compileOnly(libs.onnxruntime.android)
    compileOnly(libs.executorch.android)
    // src/test drives both from Python (tests/android/test_engines.py); here it is only compiled.
    testImplementation(project(path = ":core", configuration = "tests"))
}
