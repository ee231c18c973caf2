package dev.outrider.app

import android.content.ActivityNotFoundException
import android.content.Intent
import android.os.Bundle
import android.view.View
import android.widget.CheckBox
import android.widget.EditText
import android.widget.RadioButton
import android.widget.RadioGroup
import android.widget.Switch
import android.widget.TextView
import dev.outrider.app.chat.Settings
import dev.outrider.core.session.OnReturn
import dev.outrider.core.session.UnderstudyUse
import dev.outrider.core.session.WhoWrites

private const val PICK_BUNDLE = 1
private const val BUNDLE_NAME = "bundle"

private val WRITERS = mapOf(
    R.id.prefer_cloud to WhoWrites.PREFER_CLOUD, R.id.prefer_device to WhoWrites.PREFER_DEVICE,
    R.id.cloud_only to WhoWrites.CLOUD_ONLY, R.id.device_only to WhoWrites.DEVICE_ONLY,
)

private val UNDERSTUDIES = mapOf(
    R.id.understudy_cold to UnderstudyUse.COLD, R.id.understudy_warm to UnderstudyUse.WARM,
    R.id.understudy_off to UnderstudyUse.OFF,
)

/** Server, token, policy and bundle. Nothing changes until Save. */
class SettingsActivity : Screen() {
    private val server by lazy { view<EditText>(R.id.server) }
    private val token by lazy { view<EditText>(R.id.token) }
    private val forget by lazy { view<CheckBox>(R.id.forget) }
    private val writer by lazy { view<RadioGroup>(R.id.writer) }
    private val keep by lazy { view<Switch>(R.id.keep) }
    private val unsure by lazy { view<Switch>(R.id.unsure) }
    private val understudy by lazy { view<RadioGroup>(R.id.understudy) }
    private val bundle by lazy { view<TextView>(R.id.bundle) }
    private val executorch by lazy { view<Switch>(R.id.executorch) }
    private val save by lazy { view<View>(R.id.save) }

    /** Name of the picked bundle; null: the app's own. */
    private var bundleName: String? = null

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        setContentView(R.layout.activity_settings)
        if (state == null) show(app.settings.value) else bundleName = state.getString(BUNDLE_NAME)
        view<View>(R.id.pick).setOnClickListener { pick() }
        view<View>(R.id.own).setOnClickListener {
            app.unpick()
            choose(null)
        }
        save.setOnClickListener { save() }
    }

    override fun onStart() {
        super.onStart()
        follow(app.pick) { pick ->
            save.isEnabled = pick != Pick.Copying
            when (pick) {
                Pick.None -> choose(bundleName)
                Pick.Copying -> bundle.setText(R.string.bundle_copying)
                is Pick.Done -> choose(pick.name)
                is Pick.Failed -> bundle.text = pick.text
            }
        }
    }

    override fun onSaveInstanceState(state: Bundle) {
        super.onSaveInstanceState(state)
        state.putString(BUNDLE_NAME, bundleName)
    }

    private fun show(settings: Settings) {
        server.setText(settings.server)
        view<RadioButton>(WRITERS.entries.first { it.value == settings.writer }.key).isChecked = true
        keep.isChecked = settings.onReturn == OnReturn.KEEP
        unsure.isChecked = settings.sure
        view<RadioButton>(UNDERSTUDIES.entries.first { it.value == settings.understudy }.key).isChecked = true
        bundleName = settings.bundle
        executorch.isChecked = settings.executorch
    }

    private fun choose(name: String?) {
        bundleName = name
        bundle.setText(if (name == null) R.string.bundle_own else R.string.bundle_picked)
    }

    private fun pick() {
        val intent = Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE).setType("*/*")
            .putExtra(Intent.EXTRA_MIME_TYPES, arrayOf("application/zip", "application/octet-stream"))
        try {
            startActivityForResult(intent, PICK_BUNDLE)
        } catch (_: ActivityNotFoundException) { // a device without a file picker
            view<View>(R.id.pick).isEnabled = false
        }
    }

    override fun onActivityResult(request: Int, result: Int, data: Intent?) {
        super.onActivityResult(request, result, data)
        val uri = data?.data
        if (request == PICK_BUNDLE && result == RESULT_OK && uri != null) app.install(uri)
    }

    private fun save() {
        val settings = Settings(
            server.text.toString().trim(), WRITERS.getValue(writer.checkedRadioButtonId),
            if (keep.isChecked) OnReturn.KEEP else OnReturn.REPAIR, unsure.isChecked, bundleName,
            UNDERSTUDIES.getValue(understudy.checkedRadioButtonId), executorch.isChecked,
        )
        val typed = token.text.toString().trim()
        app.save(settings, if (forget.isChecked) "" else typed.ifEmpty { null })
        finish()
    }
}
