/**
 * The part of fbjni's Java half that ExecuTorch's natives need. It is on none of the registries that the scripted build
 * uses.
 *
 * Only for that build; the Gradle build takes `com.facebook.fbjni:fbjni`. Names of classes, fields and methods are
 * those that libfbjni.so looks up.
 */
package com.facebook.jni

import com.facebook.soloader.nativeloader.NativeLoader
import java.lang.ref.PhantomReference
import java.lang.ref.ReferenceQueue
import java.util.Collections

/** Holds the native half of a Java object, which is freed with it or by [resetNative]. */
open class HybridData {
    @JvmField internal val mDestructor = Destructor(this)

    /** Free the native half now; a second call does nothing. */
    @Synchronized
    fun resetNative() = mDestructor.destruct()

    fun isValid(): Boolean = mDestructor.mNativePointer != 0L

    /** Frees a native half once [owner] is collected. */
    class Destructor(owner: HybridData) : PhantomReference<HybridData>(owner, QUEUE) {
        /** Written by native code. */
        @Volatile
        @JvmField internal var mNativePointer = 0L

        init {
            LIVE += this
        }

        @Synchronized
        internal fun destruct() {
            LIVE -= this
            val pointer = mNativePointer
            mNativePointer = 0
            if (pointer != 0L) deleteNative(pointer)
        }

        private companion object {
            val QUEUE = ReferenceQueue<HybridData>()

            /** Keeps references reachable until what they refer to is not. */
            val LIVE: MutableSet<Destructor> = Collections.synchronizedSet(HashSet())

            init {
                Thread {
                    while (true) (QUEUE.remove() as Destructor).destruct()
                }.apply {
                    name = "HybridData"
                    isDaemon = true
                    start()
                }
            }

            @JvmStatic external fun deleteNative(pointer: Long)
        }
    }

    private companion object {
        init {
            NativeLoader.loadLibrary("fbjni")
        }
    }
}

/** Base of classes that hold their own native half. */
abstract class HybridClassBase : HybridData()

/** A C++ function as a [Runnable]. */
class NativeRunnable private constructor(@JvmField internal val mHybridData: HybridData) : Runnable {
    external override fun run()
}

/** Runs a C++ function inside a Java frame. */
class ThreadScopeSupport private constructor() {
    private companion object {
        init {
            NativeLoader.loadLibrary("fbjni")
        }

        @JvmStatic fun runStdFunction(pointer: Long) = runStdFunctionImpl(pointer)

        @JvmStatic external fun runStdFunctionImpl(pointer: Long)
    }
}

/** A C++ exception that reached Java. */
open class CppException(message: String) : RuntimeException(message)

/** An exception that is not a std::exception. */
class UnknownCppException : CppException {
    constructor() : super("unknown")

    constructor(message: String) : super(message)
}

/** std::system_error. */
class CppSystemErrorException(message: String, @JvmField val errorCode: Int) : CppException(message)
