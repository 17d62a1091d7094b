plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
}

android {
    namespace = "com.example.jaxspec"
    compileSdk = 35
    defaultConfig {
        applicationId = "com.example.jaxspec"
        minSdk = 24 // of LiteRT 2.3.0's AARs
        targetSdk = 35
        versionCode = 1
        versionName = "1"
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

kotlin {
    compilerOptions { jvmTarget = org.jetbrains.kotlin.gradle.dsl.JvmTarget.JVM_17 }
}

dependencies {
    implementation("com.google.ai.edge.litert:litert:2.3.0")
    // From 2.3.0 on an artifact of its own. Without it the app builds, and the GPU is refused when
    // the model is opened.
    implementation("com.google.ai.edge.litert:litert-gpu:2.3.0")
}
