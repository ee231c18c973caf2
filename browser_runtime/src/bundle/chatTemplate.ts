/** A Jinja chat template, rendered as the Python runtime renders it, but for booleans: `true`, not `True`. */

import { Template } from "@huggingface/jinja";

export class ChatTemplate {
  private readonly template: Template;

  /** Throws the library's errors on unsupported templates. */
  constructor(source: string) {
    // the library lacks `+`, which keeps the white space around a block: an adjacent empty expression does the same
    this.template = new Template(source.replaceAll("{%+", "{{ '' }}{%").replaceAll("+%}", "%}{{ '' }}"));
  }

  render(variables: Record<string, unknown>): string {
    return this.template.render({ add_generation_prompt: true, ...variables });
  }
}
