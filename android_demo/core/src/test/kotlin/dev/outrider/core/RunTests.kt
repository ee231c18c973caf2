package dev.outrider.core

import java.lang.reflect.InvocationTargetException
import kotlin.system.exitProcess

/**
 * Runs test methods, named as CLASS#METHOD, without JUnit: code converted back from dex has no annotations. A class's
 * `clean` runs after each.
 */
fun main(names: Array<String>) {
    var failed = 0
    for (name in names) {
        val (type, method) = name.split('#')
        val test = Class.forName(type).getDeclaredConstructor().newInstance()
        try {
            test.javaClass.getMethod(method).invoke(test)
            println("passed $name")
        } catch (error: InvocationTargetException) {
            println("failed $name: ${error.targetException.stackTraceToString().take(3000)}")
            failed++
        } finally {
            test.javaClass.methods.find { it.name == "clean" }?.invoke(test)
        }
    }
    exitProcess(if (failed == 0) 0 else 1)
}
