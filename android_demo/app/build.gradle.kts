import groovy.json.JsonSlurper

plugins {
    alias(libs.plugins.android.application)
}

android {
    namespace = "dev.outrider.app"
    compileSdk = libs.versions.compileSdk.get().toInt()
    defaultConfig {
        applicationId = "dev.outrider.app"
        minSdk = libs.versions.minSdk.get().toInt()
        targetSdk = libs.versions.targetSdk.get().toInt()
        versionCode = libs.versions.appVersionCode.get().toInt()
        versionName = libs.versions.appVersion.get()
        // -Pabis=arm64-v8a,x86_64 for an emulator too
        ndk { abiFilters += providers.gradleProperty("abis").getOrElse("arm64-v8a").split(",") }
    }
    buildTypes {
        release {
            isMinifyEnabled = true
            proguardFiles(getDefaultProguardFile("proguard-android-optimize.txt"), "proguard-rules.pro")
            signingConfig = signingConfigs.getByName("debug") // sign with a key of your own before you publish
        }
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_11
        targetCompatibility = JavaVersion.VERSION_11
    }
    androidResources { noCompress += listOf("onnx", "data", "pte", "f32", "u32") }
    packaging {
        jniLibs { useLegacyPackaging = false }
        resources { excludes += listOf("DebugProbesKt.bin", "META-INF/**", "kotlin/**") }
    }
    testOptions {
        unitTests.all { it.useJUnitPlatform() }
    }
}

kotlin {
    compilerOptions { optIn.add("dev.outrider.core.protocol.EngineApi") } // JSON
}

dependencies {
    implementation(project(":engines"))
    implementation(libs.onnxruntime.android)
    if (providers.gradleProperty("executorch").isPresent) implementation(libs.executorch.android) // -Pexecutorch
    testImplementation(testFixtures(project(":core")))
    testImplementation(platform(libs.junit.bom))
    testImplementation(libs.kotlin.test.junit5)
    testRuntimeOnly(libs.junit.launcher)
}

/** The files of a bundle that its manifest lists, as the app's assets. */
abstract class BundleAssets : DefaultTask() {
    @get:InputDirectory
    abstract val bundle: DirectoryProperty

    @get:OutputDirectory
    abstract val assets: DirectoryProperty

    @TaskAction
    fun copy() {
        val from = bundle.get().asFile
        val to = assets.get().asFile.apply { deleteRecursively() }.resolve("bundle")
        val manifest = JsonSlurper().parse(from.resolve("manifest.json")) as Map<*, *>
        val names = (manifest["files"] as Map<*, *>).keys.map { it.toString() }
        for (name in names + "manifest.json") from.resolve(name).copyTo(to.resolve(name))
    }
}

// -Pbundle=FOLDER; by default the one that `make` writes
val bundleAssets = tasks.register<BundleAssets>("bundleAssets") {
    bundle = rootDir.resolve(providers.gradleProperty("bundle").getOrElse("../build/bundle"))
}
androidComponents.onVariants { it.sources.assets?.addGeneratedSourceDirectory(bundleAssets, BundleAssets::assets) }
