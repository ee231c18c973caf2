// For Android Studio and Gradle. The scripted build (ci/) takes the same sources; see README.md, "Two builds".
plugins {
    alias(libs.plugins.android.application) apply false
    alias(libs.plugins.android.library) apply false
    alias(libs.plugins.kotlin.jvm) apply false // also the version of the Kotlin that the Android plugin has built in
}
