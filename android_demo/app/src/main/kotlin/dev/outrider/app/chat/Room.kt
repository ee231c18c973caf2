package dev.outrider.app.chat

/** Bytes that the device has left. memory: for all apps; lowMemory: the system begins to end apps. */
data class Space(val disk: Long, val memory: Long, val lowMemory: Boolean)

/** The size of a bundle. files: all files to copy; weights: the engine's files, which are loaded. */
data class Needs(val files: Long, val weights: Long) {
    /**
     * Estimated need while an answer is in progress: a graph's weights may be packed into a second copy, and there are
     * the drafter's cache, the tokenizer and a step's temporaries.
     */
    val memory: Long get() = weights * 5 / 2 + (48L shl 20)
}

/** Whether there is room for a bundle. [missing]: bytes. */
sealed class Room {
    object Enough : Room()

    data class NoDisk(val missing: Long) : Room()

    data class NoMemory(val missing: Long) : Room()
}

/** kept: bytes of disk that must stay free. Memory is not checked for a bundle that is only copied. */
fun roomFor(needs: Needs, space: Space, kept: Long = 64L shl 20): Room {
    val disk = needs.files + kept - space.disk
    val memory = needs.memory - space.memory
    return when {
        disk > 0 -> Room.NoDisk(disk)
        memory > 0 || space.lowMemory -> Room.NoMemory(maxOf(memory, 0))
        else -> Room.Enough
    }
}
