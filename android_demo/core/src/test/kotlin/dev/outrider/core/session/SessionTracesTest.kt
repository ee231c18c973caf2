package dev.outrider.core.session

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.ints
import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.TreeShape
import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.speed.Arm
import dev.outrider.core.speed.Controller
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFalse
import kotlin.test.assertTrue

/** Replays outrider_core/protocol/vectors/sessions.json: the same events must give the same actions and states. */
class SessionTracesTest {
    private val traces = Vectors.read("sessions")

    @Test
    fun everyTraceReplays() {
        assertTrue(traces.size >= 471)
        val calls = HashSet<String>()
        val exits = HashMap<String, MutableSet<String>>()
        for (trace in traces) {
            val session = sessionOf(trace.field<Any>("setup"))
            var before = stateOf(session)
            for ((number, step) in trace.field<List<List<Any?>>>("steps").withIndex()) {
                val (call, arguments, wanted, state) = step
                calls += call as String
                val given = session.call(call, arguments as List<*>).map(::json)
                val where = "${trace.field<String>("name")}, step $number: $call"
                assertTrue(Vectors.same(wanted, given), "$where gives\n$given, not\n$wanted")
                assertEquals(state, stateOf(session), where)
                if (state != before) exits.getOrPut(before) { HashSet() } += call
                before = stateOf(session)
            }
        }
        assertEquals(16, calls.size)
        assertEquals(5, exits.size, "every state but the last is left")
        for ((state, left) in exits) {
            assertTrue((left - setOf("tick", "cancel", "stop")).isNotEmpty(), "$state is left by a time-out alone")
        }
    }

    @Test
    fun aSessionThatActsOtherwiseIsNoticed() {
        val (_, _, wanted) = traces.first().field<List<List<Any?>>>("steps").first { (it[2] as List<*>).isNotEmpty() }
        assertFalse(Vectors.same(wanted, (wanted as List<*>).drop(1)))
    }

    private fun sessionOf(setup: Any?): Session {
        val (heads, headDim) = setup.ints("row_shape")
        val patience = setup.field<Any>("patience")
        val timer = setup.field<Any>("timer")
        val policy = setup.field<Any>("policy")
        val session = Session(
            setup.ints("prompt"), Vectors.sampling(setup.field<Any>("sampling")), setup.ints("eos_ids").toSet(),
            setup.int("max_new"), setup.int("max_context"), RowShape(heads, headDim),
            setup.field<String>("session").hexToBytes(), setup.int("stream"),
            patience = Patience(
                patience.double("open"), patience.double("connect"), patience.double("silence"),
                patience.double("offline"),
            ),
            timer = RoundTimer(timer.double("floor"), timer.double("ceiling"), timer.double("first")),
            policy = Policy(
                named(policy.field("writer")), named(policy.field("on_return")), named(policy.field("offline")),
                policy.double("min_confidence"), policy.int("lead"), policy.double("offline_rate"),
                named(policy.field("understudy")),
            ),
            tuning = tuningOf(setup), understudy = setup.field("understudy"),
            obeys = (setup as Map<*, *>)["obeys"] as Boolean? ?: true,
            sentenceEnds = setup.ints("sentence_ends").toSet(),
            constraint = setup["constraint"]?.let(Vectors::constraint),
            drafter = setup["drafter"] as Boolean? ?: true,
        )
        session.arm = named(setup.field("arm"))
        session.verifier.pinned = setup["arithmetic"] as String? ?: ""
        return session
    }

    /** Sessions that are not free to choose have one mode, and trees as large as they come. */
    private fun tuningOf(setup: Any?): Tuning {
        val free = (setup as Map<*, *>)["tuning"]
        val controller = Controller(named<Arm>(setup.field("arm")))
        if (free == null) return Tuning(controller, TreeShape(255, 64), shaping = false)
        val largest = TreeShape(free.int("nodes"), free.int("depth"), free.int("breadth"), free.double("gain"))
        return Tuning(largest = largest, shaping = free.field("shaping"))
    }

    private fun Session.call(call: String, arguments: List<Any?>): List<Action> {
        fun int(index: Int) = (arguments[index] as Long).toInt()
        fun double(index: Int) = (arguments[index] as Number).toDouble()
        return when (call) {
            "start" -> start(double(0))
            "link_up" -> linkUp(
                Vectors.message(arguments[0]) as Welcome, double(1), if (arguments.size > 2) double(2) else null,
            )
            "link_down" -> linkDown(double(0), refused = arguments.getOrNull(1) == true)
            "message" -> message(Vectors.message(arguments[0]) as ServerMessage, double(1))
            "tree_ready" -> treeReady(
                draftOf(arguments[0]), int(1), double(2), if (arguments.size > 3) double(3) else 0.0,
            )
            "tree_compared" -> treeCompared(draftOf(arguments[0]), int(1), double(2))
            "token_written" -> tokenWritten(int(0), double(1), int(2), double(3))
            "text_read" -> textRead((arguments[0] as Long?)?.toInt(), double(1))
            "set_obeys" -> setObeys(arguments[0] as Boolean, double(1))
            "understudy_failed" -> understudyFailed(arguments[0] as String, double(1))
            "tick" -> tick(double(0))
            "set_arm" -> {
                val arm = named<Arm>(arguments[0] as String)
                tuning.controller.pinned = arm
                changeArm(arm, double(1))
            }
            "pause" -> pause(double(0))
            "proceed" -> proceed(double(0))
            "cancel" -> cancel()
            "stop" -> stop(int(0))
            else -> error("no event $call")
        }
    }

    /** A tree; where more is recorded of its draft, that too. */
    private fun draftOf(fields: Any?): Draft {
        val tree = TokenTree(fields.ints("tokens"), fields.ints("parents"))
        if ("scores" !in fields as Map<*, *>) return Draft(tree)
        val scores = fields.field<List<Number>>("scores").map(Number::toDouble)
        return Draft(tree, scores, fields.int("steps"), fields.field("ahead"), fields.int("kept"))
    }

    private fun stateOf(session: Session): String = when (session.state) {
        State.ALONE -> "writing alone"
        State.WAITING -> "waiting for the link"
        else -> session.state.name.lowercase()
    }

    private fun sizeOf(size: TreeSize): Map<String, Any> =
        mapOf("nodes" to size.nodes, "depth" to size.depth) + size.gain?.let { mapOf("gain" to it) }.orEmpty()

    private fun json(action: Action): List<Any?> = listOf(
        action::class.simpleName,
        when (action) {
            is Send -> Vectors.fields(action.message)
            is Pin -> mapOf("arithmetic" to action.arithmetic)
            is DraftTree -> mapOf("prefix" to action.prefix, "version" to action.version) + sizeOf(action.size)
            is DraftChain ->
                mapOf("prefix" to action.prefix, "version" to action.version, "tokens" to action.tokens)
            is Compare ->
                mapOf("prefix" to action.prefix, "arm" to action.arm.name.lowercase()) + sizeOf(action.size)
            is DraftAhead -> mapOf("version" to action.version)
            is WriteToken -> mapOf(
                "prefix" to action.prefix, "version" to action.version, "writer" to action.writer.name.lowercase(),
            )
            is ReadText -> mapOf("prefix" to action.prefix, "base" to action.base)
            is AddRows -> mapOf("positions" to action.positions.toList())
            is Commit -> mapOf("tokens" to action.tokens, "confirmed" to action.confirmed)
            is Provide -> mapOf("token" to action.token, "writer" to action.writer.name.lowercase())
            is HandOver -> mapOf("writer" to action.writer.name.lowercase(), "why" to action.why)
            is RollBack -> mapOf("tokens" to action.tokens)
            is Adopt -> mapOf("tokens" to action.tokens)
            is Stall -> mapOf("deadline" to action.deadline)
            is Pause -> mapOf("reason" to action.reason.name.lowercase())
            is Done -> mapOf("reason" to action.reason.name.lowercase())
            Resume, Reconnect -> emptyMap<String, Any>()
        },
    )

    private inline fun <reified E : Enum<E>> named(word: String): E = enumValueOf(word.uppercase().replace('-', '_'))
}
