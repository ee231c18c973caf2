package dev.outrider.core.runtime

import dev.outrider.core.Vectors
import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFalse
import kotlin.test.assertTrue

/** Replays outrider_core/protocol/vectors/sessions.json: the same events must give the same actions and states. */
class SessionTracesTest {
    private val traces = Vectors.read("sessions")

    @Test
    fun everyTraceReplays() {
        assertTrue(traces.size >= 200)
        val calls = HashSet<String>()
        for (trace in traces) {
            val session = sessionOf(trace.field<Any>("setup"))
            for ((number, step) in trace.field<List<List<Any?>>>("steps").withIndex()) {
                val (call, arguments, wanted, state) = step
                calls += call as String
                val given = session.call(call, arguments as List<*>).map(::json)
                val where = "${trace.field<String>("name")}, step $number: $call"
                assertTrue(Vectors.same(wanted, given), "$where gives\n$given, not\n$wanted")
                assertEquals(state, stateOf(session), where)
            }
        }
        assertEquals(12, calls.size)
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
                policy.double("min_confidence"), policy.int("lead"),
            ),
        )
        session.mode = named(setup.field("mode"))
        return session
    }

    private fun Session.call(call: String, arguments: List<Any?>): List<Action> {
        val now = (arguments.last() as Number).toDouble()
        fun int(index: Int) = (arguments[index] as Long).toInt()
        return when (call) {
            "start" -> start(now)
            "link_up" -> linkUp(Vectors.message(arguments[0]) as Welcome, now)
            "link_down" -> linkDown(now)
            "message" -> message(Vectors.message(arguments[0]) as ServerMessage, now)
            "tree_ready" -> treeReady(TokenTree(arguments[0].ints("tokens"), arguments[0].ints("parents")), int(1), now)
            "token_written" -> tokenWritten(int(0), (arguments[1] as Number).toDouble(), int(2), now)
            "tick" -> tick(now)
            "set_mode" -> changeMode(named(arguments[0] as String), now)
            "pause" -> pause(now)
            "proceed" -> proceed(now)
            "cancel" -> cancel()
            "stop" -> stop(int(0))
            else -> error("no event $call")
        }
    }

    /** The box of docs/design.md's diagram that a session is in. */
    private fun stateOf(session: Session): String = when {
        session.finished != null -> "finished"
        session.alone && session.paused == null && session.policy.writer != Writer.CLOUD_ONLY -> "writing alone"
        session.alone -> "waiting for the link"
        session.flight != null -> if (session.flight?.tree == null) "streaming" else "verifying"
        else -> "drafting"
    }

    private fun json(action: Action): List<Any?> = listOf(
        action::class.simpleName,
        when (action) {
            is Send -> Vectors.fields(action.message)
            is DraftTree -> with(action) {
                mapOf("prefix" to prefix, "version" to version, "nodes" to nodes, "depth" to depth)
            }
            is DraftAhead -> mapOf("version" to action.version)
            is WriteToken -> mapOf("prefix" to action.prefix, "version" to action.version)
            is AddRows -> mapOf("positions" to action.positions.toList())
            is Commit -> mapOf("tokens" to action.tokens, "confirmed" to action.confirmed)
            is Provide -> mapOf("token" to action.token)
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
