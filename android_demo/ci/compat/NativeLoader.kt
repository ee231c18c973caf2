/** The part of nativeloader that ExecuTorch's Java classes call; see Hybrid.kt. */
package com.facebook.soloader.nativeloader

/** Loads native libraries. */
interface NativeLoaderDelegate {
    /** Load [name]; return whether this call did so. */
    fun loadLibrary(name: String, flags: Int): Boolean
}

/** Loads as the system does. */
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
