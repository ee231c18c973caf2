/** Writing without the target: the drafter at once, the understudy once it has read the text. */
package dev.outrider.core.session

/** Ask for one more provisional token, where one may be written and the answer is not full. */
internal fun Session.write(now: Double): List<Action> {
    if (!solo.mayWrite(provisional.size) || text.full) return if (alone) waitForTarget(now) else emptyList()
    val all = text.all()
    if (alone && provisional.isEmpty()) handover.begin(all)
    val actions = ArrayList<Action>()
    // the drafter's first token comes before the work of loading and reading
    val begun = provisional.isNotEmpty() || policy.writer == WhoWrites.DEVICE_ONLY
    if (alone && handover.reading == Reading.IDLE && begun) actions += handover.read(all, committed.size)
    if (busy != null) return actions
    val writer = handover.nextWriter
    if (alone && writer == Writer.DRAFTER) {
        val enough = solo.drafterIsDone || policy.writer == WhoWrites.DEVICE_ONLY || handover.holds
        if (handover.coming && enough) return actions
        if (solo.drafterIsDone) return listOf(pauseFor(PauseReason.LIMIT)) + waitForTarget(now)
    }
    if (writer != handover.writer) {
        handover.writer = writer
        solo.handedOver()
        actions += HandOver(writer)
    }
    busy = writer
    return actions + WriteToken(all, version, writer)
}

/** The token that was asked for has come; it may not be wanted any more. */
internal fun Session.takeToken(token: Int, sure: Double, version: Int): List<Action> {
    val writer = busy ?: Writer.DRAFTER
    busy = null
    if (version != this.version || finished != null || !solo.mayWrite(provisional.size)) return emptyList()
    text.provide(token, writer)
    this.version++
    solo.wrote(token, sure, writer)
    // a better writer that is on its way may be surer
    val doubts = if (solo.doubts && !handover.coming) listOf(pauseFor(PauseReason.UNSURE)) else emptyList()
    return listOf(Provide(token, writer)) + doubts
}

/**
 * The understudy has read the text, or gave that up (null). If the target is still silent, what it would not have
 * written is withdrawn. Where there is no such thing, it reads what the drafter wrote meanwhile; that one waits.
 */
internal fun Session.takeReading(agreed: Int?): List<Action> {
    if (finished != null) return emptyList()
    val all = text.all()
    if (agreed == null) {
        handover.gaveUp()
    } else if (handover.hasRead(all, alone) && alone) {
        val judged = maxOf(handover.base + agreed, committed.size)
        if (judged < all.size) {
            version++ // a token under way is not wanted any more
            if (judged >= handover.text.size) return listOf(handover.read(all, judged, holds = true))
            return text.withdrawProvisional(judged - committed.size)
        }
    }
    return handover.readAlong(committed)
}

/** Write nothing more, until the target answers or somebody asks to go on. */
internal fun Session.pauseFor(reason: PauseReason): Pause {
    solo.paused = reason
    stats.pauses++
    version++ // a token under way is not wanted any more
    return Pause(reason)
}

/** Nothing more can be written alone: wait for the target, but not for ever. */
private fun Session.waitForTarget(now: Double): List<Action> {
    deadlines.giveUp = deadlines.giveUp ?: (now + if (solo.paused == null) returnWait else patience.offline)
    val over = policy.writer == WhoWrites.DEVICE_ONLY && solo.obeys && solo.paused == null
    return if (over) finish(FinishReason.UNVERIFIED) else emptyList()
}
