/** The part of nativeloader that ExecuTorch's Java classes call; see Hybrid.kt. */
package com.facebook.soloader.nativeloader

/** How libraries are loaded. */
interface NativeLoaderDelegate {
    /** Whether [name] was loaded by this call. */
    fun loadLibrary(name: String, flags: Int): Boolean
}

/** As the system does it. */
class SystemDelegate : NativeLoaderDelegate {
    override fun loadLibrary(name: String, flags: Int): Boolean {
        System.loadLibrary(name)
        return true
    }
}

/** Loads libraries by a delegate that is set once. */
class NativeLoader private constructor() {
    companion object {
        private var delegate: NativeLoaderDelegate? = null

        @JvmStatic
        @Synchronized
        fun isInitialized(): Boolean = delegate != null

        @JvmStatic
        @Synchronized
        fun init(delegate: NativeLoaderDelegate) {
            check(this.delegate == null) { "NativeLoader is initialised" }
            this.delegate = delegate
        }

        @JvmStatic
        @Synchronized
        fun loadLibrary(name: String): Boolean = (delegate ?: SystemDelegate()).loadLibrary(name, 0)
    }
}
