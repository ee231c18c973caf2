package dev.outrider.app

import android.content.Intent
import android.os.Bundle
import android.view.View
import android.view.inputmethod.EditorInfo
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import dev.outrider.app.chat.ASSISTANT
import dev.outrider.app.chat.ChatState
import dev.outrider.app.chat.Turn
import dev.outrider.app.chat.USER

/** The conversation. It only shows: the answer lives in [OutriderApp] and goes on behind a turned or closed screen. */
class ChatActivity : Screen() {
    private val badge by lazy { view<TextView>(R.id.badge) }
    private val problem by lazy { view<TextView>(R.id.problem) }
    private val figures by lazy { view<TextView>(R.id.figures) }
    private val legend by lazy { view<TextView>(R.id.legend) }
    private val scroll by lazy { view<ScrollView>(R.id.scroll) }
    private val list by lazy { view<LinearLayout>(R.id.turns) }
    private val question by lazy { view<EditText>(R.id.question) }
    private val send by lazy { view<Button>(R.id.send) }
    private val words by lazy { Words(this) }

    /** What the views below the legend show. */
    private var shown = emptyList<Turn>()

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        setContentView(R.layout.activity_chat)
        legend.text = words.legend()
        view<View>(R.id.settings).setOnClickListener {
            startActivity(Intent(this, SettingsActivity::class.java))
        }
        view<View>(R.id.clear).setOnClickListener { app.session.clear() }
        send.setOnClickListener { if (app.session.state.value.answering) app.session.stop() else ask() }
        question.setOnEditorActionListener { _, action, _ ->
            (action == EditorInfo.IME_ACTION_SEND).also { if (it) ask() }
        }
    }

    override fun onStart() {
        super.onStart()
        follow(app.session.state, ::show)
    }

    private fun ask() {
        val state = app.session.state.value
        if (!state.ready || state.answering || question.text.isBlank()) return
        app.session.ask(question.text.toString())
        question.text.clear()
    }

    private fun show(state: ChatState) {
        setText(badge, words.badge(state))
        badge.contentDescription = getString(R.string.badge_label, badge.text)
        setText(problem, state.problem.orEmpty())
        problem.visibility = if (state.problem == null) View.GONE else View.VISIBLE
        setText(figures, state.figures?.let(words::figures).orEmpty())
        setText(send, getString(if (state.answering) R.string.stop else R.string.send))
        send.contentDescription = getString(if (state.answering) R.string.stop_label else R.string.send)
        send.isEnabled = state.ready || state.answering
        showTurns(state.turns + listOfNotNull(state.reply?.let { Turn(ASSISTANT, it.pieces()) }))
    }

    /** Touches only the views whose turn is another than before. */
    private fun showTurns(turns: List<Turn>) {
        if (turns == shown) return
        val atEnd = !scroll.canScrollVertically(1)
        val first = list.indexOfChild(legend) + 1
        for ((index, turn) in turns.withIndex()) {
            if (shown.getOrNull(index) == turn) continue
            if (first + index == list.childCount) layoutInflater.inflate(R.layout.turn, list)
            val view = list.getChildAt(first + index) as TextView
            view.text = words.drawn(turn.pieces)
            view.contentDescription = words.spoken(turn)
            if (turn.role == USER) view.setBackgroundResource(R.drawable.question) else view.background = null
        }
        while (list.childCount > first + turns.size) list.removeViewAt(list.childCount - 1)
        shown = turns
        if (atEnd) scroll.post { scroll.scrollTo(0, list.height) } // follow the text, unless somebody reads above
    }

    /** Setting the same text again would make a screen reader speak it again. */
    private fun setText(view: TextView, text: String) {
        if (view.text.toString() != text) view.text = text
    }
}
