import org.jetbrains.kotlin.gradle.dsl.JvmTarget
import org.jetbrains.kotlin.gradle.dsl.KotlinVersion

plugins {
    alias(libs.plugins.kotlin.jvm)
}

java {
    sourceCompatibility = JavaVersion.VERSION_1_8
    targetCompatibility = JavaVersion.VERSION_1_8
}

kotlin {
    explicitApi()
    coreLibrariesVersion = libs.versions.kotlinStdlib.get()
    compilerOptions {
        jvmTarget = JvmTarget.JVM_1_8
        languageVersion = KotlinVersion.KOTLIN_2_1
        apiVersion = KotlinVersion.KOTLIN_2_1
        freeCompilerArgs.add("-Xsuppress-version-warnings")
        optIn.add("dev.outrider.core.protocol.EngineApi")
        allWarningsAsErrors = true
    }
}

dependencies {
    api(libs.coroutines.core)
    testImplementation(platform(libs.junit.bom))
    testImplementation(libs.kotlin.test.junit5)
    testRuntimeOnly(libs.junit.launcher)
}

tasks.test {
    useJUnitPlatform()
    systemProperty("vectors", rootDir.resolve("../outrider_core/protocol/vectors"))
    systemProperty("bundle", rootDir.resolve("../build/bundle")) // `make` writes it
}

// The app's tests use this module's, such as an engine that is a hash.
val tests by configurations.creating {
    isCanBeConsumed = true
    isCanBeResolved = false
}
val testJar by tasks.registering(Jar::class) {
    archiveClassifier = "tests"
    from(sourceSets.test.get().output)
}
artifacts.add(tests.name, testJar)
