/** A Jinja chat template, rendered as the Python runtime renders it, but for booleans: `true`, not `True`. */

import { Template } from "@huggingface/jinja";

export class ChatTemplate {
  private readonly template: Template;

  /** Throws what the library throws of a template that it does not know. */
  constructor(source: string) {
    // the library knows no `+`, which keeps the white space around a block: an empty expression beside it does the same
    this.template = new Template(source.replaceAll("{%+", "{{ '' }}{%").replaceAll("+%}", "%}{{ '' }}"));
  }

  render(variables: Record<string, unknown>): string {
    return this.template.render({ add_generation_prompt: true, ...variables });
  }
}
