package dev.outrider.core.targets

import dev.outrider.core.HashModel
import dev.outrider.core.drafting.EngineError
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.draw
import kotlin.random.Random
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertTrue

/** Reading, judging, writing and loops, with hashes as logits. With a real model: test_kotlin_understudy.py. */
class UnderstudyTest {
    private val prompt = listOf(1, 17, 44, 8, 9)
    private val samplings = listOf(Sampling(), Sampling(0.8, topP = 0.95, seed = 7))

    private fun made() = Understudy({ "" }) { HashModel(50) }

    /** Return the model's text after the prompt, written token by token. */
    private fun plain(count: Int, sampling: Sampling): List<Int> {
        val model = HashModel(50)
        val text = prompt.toMutableList()
        var logits = model.step(0, prompt, 1).single()
        repeat(count) {
            text += draw(logits, sampling, text.size)
            logits = model.step(text.size - 1, text.takeLast(1), 1).single()
        }
        return text
    }

    @Test
    fun writesAsTheModelDecodes() {
        for (sampling in samplings) {
            val understudy = made()
            val text = prompt.toMutableList()
            repeat(30) {
                val (token, probability) = understudy.nextToken(text, Decoding(prompt.size, sampling))
                assertTrue(probability > 0 && probability <= 1)
                text += token
            }
            assertEquals(plain(30, sampling), text)
        }
    }

    @Test
    fun judgesWhatOthersWrote() {
        for (sampling in samplings) {
            val expected = plain(90, sampling) // more than one chunk
            val understudy = made()
            val base = prompt.size + 3
            for (right in listOf(0, 1, 9, 70)) {
                val text = expected.take(base + right)
                val wrong = listOf((expected[text.size] + 1) % 50, 5, 6)
                assertEquals(right, understudy.agreed(text + wrong, base, Decoding(prompt.size, sampling)))
                assertEquals(expected[text.size], understudy.nextToken(text, Decoding(prompt.size, sampling)).token)
            }
            assertEquals(expected.size - base, understudy.agreed(expected, base, Decoding(prompt.size, sampling)))
        }
    }

    @Test
    fun aTextMayChangeAnywhere() {
        val understudy = made()
        val long = prompt + List(67) { it % 40 }
        for (text in listOf(prompt, prompt + 7 + 8, prompt.take(3), prompt.take(3) + 40, prompt, long, long, prompt)) {
            assertEquals(made().nextToken(text, Decoding(0)), understudy.nextToken(text, Decoding(0)))
        }
    }

    @Test
    fun whatIsReadIsNotReadAgain() {
        val model = HashModel(50)
        val understudy = Understudy({ "" }) { model }
        understudy.read(prompt)
        understudy.nextToken(prompt, Decoding(0))
        assertEquals(1, model.steps)
        understudy.nextToken(prompt + 3, Decoding(0))
        assertEquals(2, model.steps)
    }

    @Test
    fun aReadingIsGivenUpAndGoesOnLater() {
        val understudy = made()
        val text = List(150) { it % 50 }
        var asked = 0
        assertFalse(understudy.read(text) { ++asked >= 3 })
        assertTrue(understudy.read(text))
        assertEquals(made().nextToken(text, Decoding(0)), understudy.nextToken(text, Decoding(0)))
    }

    @Test
    fun judgingIsGivenUpBetweenTwoSteps() {
        val expected = plain(2 * 64, Sampling())
        for (allowed in 0..4) { // before opening, before reading, and before each judging step
            var asked = 0
            val understudy = made()
            val agreed = understudy.agreed(expected, prompt.size, Decoding(prompt.size)) { ++asked > allowed }
            assertEquals(if (allowed < 4) null else 2 * 64, agreed)
            assertEquals(allowed > 0, understudy.loaded)
            assertEquals(made().nextToken(expected, Decoding(0)), understudy.nextToken(expected, Decoding(0)))
        }
    }

    /** Vocabularies are padded, and a small model's may be padded to more than the target's. */
    @Test
    fun drawsNoTokenThatTheTargetDoesNotKnow() {
        val bound = Understudy({ "" }, vocab = 30) { HashModel(50) }
        var beyond = 0
        for (seed in 0L until 40) {
            val sampling = Sampling(1.5, seed = seed)
            val free = made().nextToken(prompt, Decoding(0, sampling)).token
            val token = bound.nextToken(prompt, Decoding(0, sampling)).token
            assertTrue(token < 30)
            assertEquals(free < 30, token == free)
            assertEquals(1, bound.agreed(prompt + token, prompt.size, Decoding(0, sampling)))
            if (free >= 30) beyond++
        }
        assertTrue(beyond > 0)
    }

    @Test
    fun memoryComesWithTheFirstUseAndGoesWhenItIsGivenBack() {
        val models = ArrayList<HashModel>()
        val understudy = Understudy({ "" }) { HashModel(50).also(models::add) }
        assertFalse(understudy.loaded)
        val first = understudy.nextToken(prompt, Decoding(0))
        assertTrue(understudy.loaded)
        understudy.unload()
        assertFalse(understudy.loaded)
        assertEquals(first, understudy.nextToken(prompt, Decoding(0)))
        assertEquals(listOf(true, false), models.map { it.closed })
    }

    @Test
    fun whatDoesNotOpenIsTriedAgain() {
        var there = false
        val understudy = Understudy({ "" }) { if (there) HashModel(50) else throw EngineError("not there") }
        assertEquals("not there", assertFailsWith<EngineError> { understudy.load() }.message)
        there = true
        understudy.load()
        assertTrue(understudy.loaded)
    }

    @Test
    fun draftsAreWhatTheTargetWouldDrawOfItsLogits() {
        for (sampling in samplings) {
            val expected = plain(40, sampling)
            val size = prompt.size
            val decoding = Decoding(size, sampling)
            val model = HashModel(50)
            val understudy = Understudy({ "" }) { model }
            val (tokens, scores) = understudy.draft(prompt, 12, decoding)
            assertEquals(expected.subList(size, size + 12), tokens)
            assertEquals(12, scores.size)
            assertTrue((listOf(0.0) + scores).zipWithNext().all { (sooner, later) -> later < sooner })
            understudy.draftAhead(8) { false }
            assertEquals(20 to 20, understudy.drafted to model.steps)
            // the target draws the same and continues: nothing is drafted again
            val text = expected.take(size + 13)
            val (after, known) = understudy.draft(text, 7, decoding)
            assertEquals(expected.subList(size + 13, size + 20), after)
            assertEquals(20 to 20, understudy.drafted to model.steps)
            val fresh = made().draft(text, 7, decoding)
            assertEquals(fresh.first, after)
            for ((one, other) in fresh.second.zip(known)) assertEquals(one, other, 1e-9)
            assertEquals(after.take(3), understudy.draft(text, 3, decoding).first)
            // it draws another token
            val other = expected.take(size + 14) + (expected[size + 14] + 1) % 50
            assertEquals(made().draft(other, 5, decoding), understudy.draft(other, 5, decoding))
            assertEquals(made().nextToken(other, decoding), understudy.nextToken(other, decoding))
            understudy.unload()
            understudy.draftAhead(8) { false } // without a draft
            assertFalse(understudy.loaded)
        }
    }

    @Test
    fun aDraftIsGivenUpAndEndsWithTheContext() {
        assertEquals(emptyList<Int>() to emptyList(), made().draft(prompt, 8, Decoding(prompt.size)) { true })
        var asked = 0
        // checks at the beginning, while reading the prompt, and after two tokens
        val cut = made().draft(prompt, 8, Decoding(prompt.size)) { asked++ >= 5 }
        assertEquals(plain(2, Sampling()).drop(prompt.size), cut.first)
        val bound = Understudy({ "" }, maxContext = prompt.size + 3) { HashModel(50) }
        assertEquals(plain(3, Sampling()).drop(prompt.size), bound.draft(prompt, 8, Decoding(prompt.size)).first)
    }

    @Test
    fun draftsUnderAnotherConstraintAreNotTaken() {
        val understudy = made()
        val free = made().draft(prompt, 6, Decoding(prompt.size)).first
        val constraint = Constraint(prompt.size, biases = mapOf(free[0] to -100f))
        assertEquals(free, understudy.draft(prompt, 6, Decoding(prompt.size)).first)
        val bound = understudy.draft(prompt, 6, Decoding(prompt.size, constraint = constraint)).first
        val text = prompt.toMutableList()
        repeat(6) { text += made().nextToken(text, Decoding(prompt.size, constraint = constraint)).token }
        assertEquals(text.drop(prompt.size), bound)
        assertTrue(free[0] !in bound)
        assertEquals(free, understudy.draft(prompt, 6, Decoding(prompt.size)).first)
        assertEquals(18, understudy.drafted)
    }

    @Test
    fun repetitionsAreTheLongestOnes() {
        val random = Random(0)
        var found = 0
        repeat(2000) {
            val answer = List(random.nextInt(60)) { random.nextInt(if (random.nextBoolean()) 2 else 1) }
            val expected = HashMap<Int, Int>()
            for (end in answer.indices) {
                val before = answer.take(end).reversed()
                val length = before.zip(answer.reversed()).takeWhile { (one, other) -> one == other }.size
                if (length >= DRY_ALLOWED) expected[answer[end]] = maxOf(length, expected[answer[end]] ?: 0)
            }
            assertEquals(expected, repetitions(answer))
            found += expected.size
        }
        assertTrue(found > 100)
    }

    /** Repeats the same twelve words. */
    private class Looping : UnderstudyModel {
        override fun step(past: Int, tokens: List<Int>, wanted: Int): List<FloatArray> =
            tokens.takeLast(wanted).map { token ->
                FloatArray(50).also {
                    it[if (token in 20..31) 20 + (token - 19) % 12 else 20] = 6f
                    it[40] = 5f
                }
            }

        override fun close() = Unit
    }

    @Test
    fun loopsEndButNotInCode() {
        for (fenced in listOf(false, true)) {
            val understudy = Understudy({ if (fenced) "```kotlin\n" else "``` ```" }) { Looping() }
            val text = (prompt + 20).toMutableList()
            repeat(60) { text += understudy.nextToken(text, Decoding(prompt.size)).token }
            assertEquals(fenced, text.drop(prompt.size).all { it in 20..31 })
        }
    }
}
