package dev.outrider.app

import android.content.Intent
import android.os.Bundle
import android.view.KeyEvent
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

/** Most visible lines of the question. */
private const val LINES = 5

/** Milliseconds between checks whether text is still selected. */
private const val SELECTED = 500L

/** The conversation's screen. The answer lives in [OutriderApp] and continues when the screen is turned or closed. */
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

    /** The turns in the views below the legend, and whether they are complete; null: empty. */
    private val shown = mutableListOf<Pair<Turn, Boolean>?>()
    private val again = Runnable { show(app.session.state.value) }

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        setContentView(R.layout.activity_chat)
        legend.text = words.legend()
        view<View>(R.id.settings).setOnClickListener {
            startActivity(Intent(this, SettingsActivity::class.java))
        }
        view<View>(R.id.clear).setOnClickListener { app.session.clear() }
        send.setOnClickListener { if (app.session.state.value.answering) app.session.stop() else ask() }
        // For Android this is one line, which wraps: in a field of several lines Enter would not send.
        question.setHorizontallyScrolling(false)
        question.maxLines = LINES
        question.setOnEditorActionListener { _, action, key ->
            val enter = key?.keyCode == KeyEvent.KEYCODE_ENTER // of a keyboard with keys
            if (action == EditorInfo.IME_ACTION_SEND || enter && key.action == KeyEvent.ACTION_DOWN) ask()
            action == EditorInfo.IME_ACTION_SEND || enter
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
        val reply = state.reply?.let { Turn(ASSISTANT, it.pieces()) to false }
        showTurns(state.turns.map { it to true } + listOfNotNull(reply))
    }

    /**
     * Update the views whose turn has changed, except those with selected text. A screen reader gets the description of
     * a complete answer; of an incomplete one it reads the plain text.
     */
    private fun showTurns(turns: List<Pair<Turn, Boolean>>) {
        if (turns == shown) return
        val atEnd = !scroll.canScrollVertically(1)
        val first = list.indexOfChild(legend) + 1
        while (shown.size > turns.size) shown.removeAt(shown.lastIndex)
        while (shown.size < turns.size) shown += null
        for ((index, row) in turns.withIndex()) {
            if (shown[index] == row) continue
            if (first + index == list.childCount) layoutInflater.inflate(R.layout.turn, list)
            val view = list.getChildAt(first + index) as TextView
            if (view.hasSelection()) {
                view.removeCallbacks(again)
                view.postDelayed(again, SELECTED)
                continue
            }
            shown[index] = row
            val (turn, done) = row
            view.text = words.drawn(turn.pieces)
            view.contentDescription = if (done) words.spoken(turn) else null
            if (turn.role == USER) view.setBackgroundResource(R.drawable.question) else view.background = null
        }
        while (list.childCount > first + turns.size) list.removeViewAt(list.childCount - 1)
        if (atEnd) scroll.post { scroll.scrollTo(0, list.height) } // follow the text, unless the user has scrolled up
    }

    /** Setting the same text again would make a screen reader speak it again. */
    private fun setText(view: TextView, text: String) {
        if (view.text.toString() != text) view.text = text
    }
}
